"""Attention of the fast path: PyTorch's kernels where they support the mask, else Triton's.

The inputs are q, k and v packed as one product returns them, and the output has all heads side by side, so
that nothing is copied between the matrix products.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.edit import BlockMask
from dear.clip.tower import Attention, full_mask, take_rows


@cache
def kernels() -> Any:
    """The kernels' module."""
    from dear.clip.gpu import attention_kernels

    return attention_kernels


def attention(
    attn: Attention, x: Tensor, read: Tensor | None, change: Tensor | BlockMask | None, extra: int
) -> Tensor:
    """All heads' outputs side by side, [B, R, D], from the normed input x [B, N, D]."""
    width = x.shape[-1]
    weight, bias = attn.packed()
    mask = full_mask(change, x, extra, attn.heads)
    unmasked = x.shape[1]
    if mask is not None:  # a block mask never hides the original tokens from each other
        unmasked = x.shape[1] - extra if isinstance(change, BlockMask) else 0
    if read is None:
        qkv = F.linear(x, weight, bias)  # [B, N, 3D]
        if mask is None and not attn.causal:  # PyTorch's kernel is the fastest where it applies
            q, k, v = (attn.split(part) for part in qkv.split(width, dim=-1))
            # [B, H, N, d] -> [B, N, H, d] -> [B, N, D]
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        with_gradient = torch.is_grad_enabled() and qkv.requires_grad
        aligned = width // attn.heads % 8 == 0  # a requirement of PyTorch's kernels
        if mask is not None and 0 < unmasked < x.shape[1] and aligned and not (with_gradient or attn.causal):
            return join_tokens(qkv, attn.heads, mask.to(qkv.dtype).contiguous(), unmasked)
        return attend(qkv, None, attn.heads, mask, None, attn.causal, unmasked)
    q = F.linear(take_rows(x, read), weight[:width], bias[:width])  # [B, R, D]
    kv = F.linear(x, weight[width:], bias[width:])  # [B, N, 2D]
    return attend(kv, q, attn.heads, mask, read, attn.causal, unmasked)


def attend(
    packed: Tensor,
    q: Tensor | None,
    heads: int,
    mask: Tensor | None,
    rows: Tensor | None,
    causal: bool,
    unmasked: int = 0,
) -> Tensor:
    """Attention [B, R, D] of packed q, k, v [B, N, 3D]; or of q [B, R, D] at `rows` on k, v [B, N, 2D].

    The mask hides nothing of the first `unmasked` tokens from each other.
    """
    if mask is not None:
        mask = mask.to(packed.dtype).contiguous()
    result: Tensor = _Attend.apply(packed, q, heads, mask, rows, causal, unmasked)  # type: ignore[no-untyped-call]
    return result


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        packed: Tensor,
        q: Tensor | None,
        heads: int,
        mask: Tensor | None,
        rows: Tensor | None,
        causal: bool,
        unmasked: int,
    ) -> Tensor:
        query, key, value, width = _unpack(packed, q)
        queries = query.shape[1]
        out = packed.new_empty(len(packed), queries, width)
        norm = packed.new_empty(len(packed), heads, queries, dtype=torch.float32)
        blocks, shape = _tile_sizes(queries, width // heads), _scalar_arguments(packed, q, heads, mask, rows)
        kernels().attend[(-(-queries // blocks["BM"]) * len(packed) * heads,)](
            query, key, value, packed if mask is None else mask, packed if rows is None else rows, out, norm,
            *shape, unmasked, WIDTH=width // heads, MASK=mask is not None, ROWS=rows is not None,
            CAUSAL=causal, **blocks,
        )  # fmt: skip
        ctx.save_for_backward(packed, q, mask, rows, out, norm)
        ctx.heads, ctx.causal, ctx.unmasked = heads, causal, unmasked
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        packed, q, mask, rows, out, norm = ctx.saved_tensors
        query, key, value, width = _unpack(packed, q)
        d_packed, d_q = torch.empty_like(packed), None if q is None else torch.empty_like(q)
        d_query, d_key, d_value, _ = _unpack(d_packed, d_q)
        blocks = _tile_sizes(query.shape[1], width // ctx.heads)
        shape = _scalar_arguments(packed, q, ctx.heads, mask, rows)
        key_blocks = -(-packed.shape[1] // blocks["BN"])
        grid = (key_blocks + -(-query.shape[1] // blocks["BM"])) * len(packed) * ctx.heads
        kernels().attend_backward[(grid,)](
            query, key, value, packed if mask is None else mask, packed if rows is None else rows, out, norm,
            d_out.contiguous(), d_query, d_key, d_value, *shape, ctx.unmasked, key_blocks,
            WIDTH=width // ctx.heads, MASK=mask is not None, ROWS=rows is not None, CAUSAL=ctx.causal,
            **blocks,
        )  # fmt: skip
        return d_packed, d_q, *[None] * 5


def join_tokens(qkv: Tensor, heads: int, mask: Tensor, originals: int) -> Tensor:
    """Attention [B, N, D] under a block mask, without gradient: PyTorch's on originals, then the tokens."""
    width, count = qkv.shape[-1] // 3, qkv.shape[1]
    # [B, N, D] -> [B, N, H, d] -> [B, H, N, d]
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.split(width, dim=-1))
    part, norm = _attention_and_norm(q, k[:, :, :originals], v[:, :, :originals])
    out = qkv.new_empty(len(qkv), count, width)
    tokens, size = max(16, next_power_of_two(count - originals)), width // heads
    kernels().join_tokens[(-(-count // 64) * len(qkv) * heads,)](
        q, k, v, mask, part, norm.contiguous(), out, qkv.stride(0), qkv.stride(1),
        0 if mask.shape[0] == 1 else mask.stride(0), part.stride(0), part.stride(1), part.stride(2),
        originals, count, size**-0.5, heads,
        WIDTH=size, BM=64, BT=tokens, BD=max(16, next_power_of_two(size)), num_warps=4,
    )  # fmt: skip
    return out


def _attention_and_norm(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention [B, H, N, d] without a mask, and the logarithm of its softmax's sum [B, H, N]."""
    if _cudnn_works():
        results = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    else:
        results = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
    return results[0], results[1]


@cache
def _cudnn_works() -> bool:
    """Whether cuDNN's attention, the fastest on current GPUs, works."""
    if torch.cuda.get_device_capability() < (9, 0):
        return False
    try:
        x = torch.zeros(1, 1, 64, 64, device="cuda", dtype=torch.bfloat16)
        torch.ops.aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)
    except RuntimeError:
        return False
    return True


def _unpack(packed: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor, Tensor, int]:
    """q, k and v as views, and their width."""
    width = packed.shape[-1] // (3 if q is None else 2)
    parts = packed.split(width, dim=-1)
    return (parts[0] if q is None else q), parts[-2], parts[-1], width


def _scalar_arguments(
    packed: Tensor, q: Tensor | None, heads: int, mask: Tensor | None, rows: Tensor | None
) -> tuple[Any, ...]:
    """The scalar arguments of both attention kernels."""
    query = packed if q is None else q
    width = packed.shape[-1] // (3 if q is None else 2)
    return (
        query.stride(0), query.stride(1), packed.stride(0), packed.stride(1),
        0 if mask is None or mask.shape[0] == 1 else mask.stride(0),
        0 if rows is None or rows.ndim == 1 else rows.stride(0),
        query.shape[1], packed.shape[1], (width // heads) ** -0.5, heads,
    )  # fmt: skip


def _tile_sizes(queries: int, width: int) -> dict[str, int]:
    """Tile sizes of the attention kernels."""
    few = queries <= 32
    tiles = {"BM": 16, "BN": 64, "TAIL": 64} if few else {"BM": 64, "BN": 64, "TAIL": 32}
    return {**tiles, "BD": max(16, next_power_of_two(width)), "num_warps": 4}


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`.

    >>> next_power_of_two(5), next_power_of_two(64)
    (8, 64)
    """
    return 1 << (number - 1).bit_length()
