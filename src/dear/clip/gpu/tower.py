"""The fast path of a tower: 16-bit matrices on a GPU, and one kernel for everything between two of them.

`Tower.run` uses it where it can; the result equals that of the plain path up to rounding (sums, norms and
activations are computed in float32 here and rounded once). The plain path computes gates, low-rank changes,
records, eager attention, rotary positions, float32, CPUs, and machines without Triton or a compiler.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dear.clip.config import ACTIVATIONS
from dear.clip.edit import Edit, LayerEdit, match_tokens
from dear.clip.gpu.attention import attention, next_power_of_two
from dear.clip.tower import LayerNorm, Tower, take_rows
from dear.utils.notices import note

_ELEMENTS = 1024  # per program of an activation kernel
_HALF = (torch.bfloat16, torch.float16)


@cache
def _kernels() -> Any:
    """The module of kernels; None if Triton is missing, older than 3.4 or cannot build a kernel."""
    try:
        import triton

        from dear.clip.gpu import kernels

        if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 4):
            raise RuntimeError(
                f"Triton {triton.__version__} is installed, 3.4 or later (PyTorch 2.8) is needed"
            )
        x = torch.zeros(1, 16, device="cuda", dtype=torch.bfloat16)
        kernels.activate[(1,)](x, x.clone(), x.numel(), KIND=0, BLOCK=16)
    except Exception as error:  # the error of a missing compiler or driver depends on the version
        if not isinstance(error, ImportError):
            warnings.warn(f"Triton cannot build kernels here, so steps are slower: {error}", stacklevel=2)
        return None
    return kernels


def is_supported(tower: Tower, x: Tensor, edit: Edit | None) -> bool:
    """Whether the fast path supports this tower, x and edit on this machine."""
    if not x.is_cuda or not tower.fused or tower.dtype not in _HALF:
        return False
    if torch.compiler.is_compiling():  # compilers and exporters need PyTorch's operations
        return False
    if tower.rotary_angles(None, 1, x.device) is not None:
        note("towers with rotary positions take the plain path on a GPU: the same answers, but more slowly")
        return False
    changes = () if edit is None else edit.layers.values()
    return all(map(_has_only_tokens_and_masks, changes)) and _kernels() is not None


def _has_only_tokens_and_masks(change: LayerEdit) -> bool:
    """Whether a layer's change consists of tokens and masks, with one mask for all items of a batch."""
    shared = not isinstance(change.mask, Tensor) or change.mask.ndim == 3
    others = (change.gate, change.q, change.k, change.v, change.added)
    return shared and all(other is None for other in others)


def run(tower: Tower, x: Tensor, first: int, last: int, edit: Edit | None, read: Tensor | None) -> Tensor:
    """As `Tower.run`."""
    with torch.cuda.device_of(x):  # Triton launches on the current device
        return _layers(tower, x, first, last, edit, read)


def _layers(tower: Tower, x: Tensor, first: int, last: int, edit: Edit | None, read: Tensor | None) -> Tensor:
    """Run the layers; the residual stream is x plus a pending change, which the next norm adds."""
    pending: Tensor | None = None
    for layer in range(first, last + 1):
        block: Any = tower.blocks[layer - 1]
        change = None if edit is None else edit.layers.get(layer)
        extra, mix = 0, None
        if edit is not None and edit.first is not None and layer >= edit.first:
            extra = edit.count
            if change is not None and change.tokens is not None:
                mix = Mix(change.tokens, edit.at, change.token_weight, inserting=layer == edit.first)
        x, normed = add_norm(x, pending, block.ln_1, tower.dtype, mix)
        rows = read if layer == last else None
        z = attention(block.attn, normed, rows, None if change is None else change.mask, extra)
        if rows is not None:
            x = take_rows(x, rows)
        x, normed = add_norm(x, block.attn.o(z), block.ln_2, tower.dtype)
        pending = block.mlp.down(activate(block.mlp.up(normed), block.mlp.activation))
    return x if pending is None else x + pending


@dataclass(frozen=True)
class Mix:
    """Extra tokens that enter a layer: w * tokens + (1 - w) * the current values of their rows."""

    tokens: Tensor
    at: int | None  #: their position; None: at the end
    token_weight: float  #: w
    inserting: bool  #: their rows are inserted now, with the tokens alone


# -- residual stream and norm -----------------------------------------------------------------------


def add_norm(
    x: Tensor, change: Tensor | None, norm: LayerNorm, dtype: torch.dtype, mix: Mix | None = None
) -> tuple[Tensor, Tensor]:
    """The new residual stream x + change [B, N, D] with the tokens of `mix`, and its norm in `dtype`."""
    tokens, start, token_weight, inserting = None, 0, 1.0, False
    if mix is not None:
        tokens, inserting = match_tokens(mix.tokens, x).contiguous(), mix.inserting
        token_weight = 1.0 if inserting else mix.token_weight
        if tokens.ndim == 3 and len(tokens) == 1:  # one set for all images
            tokens = tokens[0]
        end = x.shape[1] if inserting else x.shape[1] - tokens.shape[-2]
        start = end if mix.at is None else mix.at
    results: tuple[Tensor, ...] = _AddNorm.apply(  # type: ignore[no-untyped-call]
        x.contiguous(),
        change,
        tokens,
        norm.weight,
        norm.bias,
        start,
        token_weight,
        inserting,
        norm.eps,
        dtype,
    )
    return (x, results[0]) if len(results) == 1 else (results[0], results[1])


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        change: Tensor | None,
        tokens: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        start: int,
        token_weight: float,
        inserting: bool,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        width, changed = x.shape[-1], change is not None or tokens is not None
        count = 0 if tokens is None else tokens.shape[-2]
        shape = (x.shape[0], x.shape[1] + (count if inserting else 0), width)
        new = x.new_empty(shape) if changed else x
        normed = x.new_empty(shape, dtype=dtype)
        stride = 0 if tokens is None or tokens.ndim == 2 else count * width
        block = next_power_of_two(width)
        _kernels().add_norm[(shape[0] * shape[1],)](
            x, x if change is None else change, x if tokens is None else tokens, weight, bias, new, normed,
            shape[1], start, count, stride, token_weight, eps, width,
            CHANGE=change is not None, TOKENS=tokens is not None, INSERT=inserting, BLOCK=block,
            num_warps=_warps(block),
        )  # fmt: skip
        ctx.save_for_backward(new, weight)
        ctx.change = None if change is None else change.dtype
        ctx.tokens = None if tokens is None else tokens.ndim
        ctx.start, ctx.count, ctx.token_weight, ctx.inserting, ctx.eps = (
            start,
            count,
            token_weight,
            inserting,
            eps,
        )
        ctx.set_materialize_grads(False)
        return (new, normed) if changed else (normed,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        d_new, d_normed = gradients if len(gradients) == 2 else (None, gradients[0])
        new, weight = ctx.saved_tensors
        batch, length, width = new.shape
        if d_normed is None:
            d_normed = torch.zeros_like(new)
        d_new = None if d_new is None else d_new.contiguous()
        d_x = new.new_empty(batch, length - (ctx.count if ctx.inserting else 0), width)
        d_change = d_x if ctx.change is None else torch.empty_like(d_x, dtype=ctx.change)
        d_tokens = d_x if ctx.tokens is None else new.new_empty(batch, ctx.count, width)
        block = next_power_of_two(width)
        _kernels().add_norm_backward[(batch * length,)](
            new, weight, d_x if d_new is None else d_new, d_normed.contiguous(), d_x, d_change, d_tokens,
            length, ctx.start, ctx.count, ctx.token_weight, ctx.eps, width,
            RESIDUAL=d_new is not None, CHANGE=ctx.change is not None, TOKENS=ctx.tokens is not None,
            INSERT=ctx.inserting, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
        if ctx.tokens == 2:  # one set for all images
            d_tokens = d_tokens.sum(0)
        return (
            d_x,
            None if ctx.change is None else d_change,
            None if ctx.tokens is None else d_tokens,
            *[None] * 7,
        )


# -- activation -------------------------------------------------------------------------------------


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation of x by its name, one of `dear.clip.config.ACTIVATIONS`."""
    result: Tensor = _Activate.apply(x, ACTIVATIONS.index(activation))  # type: ignore[no-untyped-call]
    return result


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: int) -> Tensor:
        y = torch.empty_like(x)
        grid = (-(-x.numel() // _ELEMENTS),)
        _kernels().activate[grid](x, y, x.numel(), KIND=kind, BLOCK=_ELEMENTS)
        ctx.save_for_backward(x)
        ctx.kind = kind
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        grid = (-(-x.numel() // _ELEMENTS),)
        _kernels().activate_backward[grid](x, dy.contiguous(), dx, x.numel(), KIND=ctx.kind, BLOCK=_ELEMENTS)
        return dx, None


def _warps(block: int) -> int:
    return min(8, max(1, block // 256))
