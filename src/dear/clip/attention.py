"""Multi-head attention with the heads kept apart, so that each can be masked, gated, changed and watched.

Two ways to compute the same thing stand side by side: `attend_eager` writes the softmax out, `attend_fused`
calls PyTorch's fused kernel. If all heads of a layer isolate the extra tokens, the original tokens need no
mask: the layer then runs on them and on the extra tokens separately. If only some heads do, one masked call
is faster than a call per kind of head, on the CPU and on a GPU: splitting q, k and v by head costs more than
the mask.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear.clip.config import TowerConfig
from dear.clip.edit import BlockMask, LayerEdit, LowRank
from dear.clip.rotary import Turn
from dear.errors import UsageError

_NOTHING = LayerEdit()


def attend_eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(d) + mask) v, written out (eq. 1 and 7).

    Args:
        q: [B, H, Q, d].
        k: [B, H, K, d].
        v: [B, H, K, d].
        mask: added to the scores, broadcast to [B, H, Q, K].

    Returns:
        The heads' outputs [B, H, Q, d] and the attention pattern [B, H, Q, K].
    """
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # [B, H, Q, K]
    if mask is not None:
        scores = scores + mask
    pattern = scores.softmax(dim=-1)
    return pattern @ v, pattern


def attend_fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """The same as `attend_eager` through PyTorch's fused kernel; `causal` needs no mask of its own."""
    if mask is not None and mask.dtype != q.dtype:
        mask = mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


class Linear(nn.Module):
    """x W^T + b in the precision of its weights, which are left unset: a checkpoint or `Clip` fills them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class Attention(nn.Module):
    """Projections to q, k, v and back, with the heads as an axis of their own."""

    def __init__(self, config: TowerConfig, causal: bool) -> None:
        super().__init__()
        self.heads = config.heads
        self.causal = causal
        self.q, self.k, self.v, self.o = (Linear(config.width, config.width) for _ in range(4))
        self._packed: tuple[Tensor, Tensor, tuple[int, ...]] | None = None

    def split(self, x: Tensor) -> Tensor:
        """[B, N, D] -> [B, H, N, d]."""
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)

    def packed(self) -> tuple[Tensor, Tensor]:
        """Weight [3D, D] and bias [3D] of q, k and v as one product; the three become views of them."""
        parts = (self.q, self.k, self.v)
        if self._packed is None or self._packed[2] != _places(parts):  # loaded, moved or cast since
            weight = torch.cat([part.weight.detach() for part in parts])
            bias = torch.cat([part.bias.detach() for part in parts])
            for part, w, b in zip(parts, weight.chunk(3), bias.chunk(3), strict=True):
                part.weight.data, part.bias.data = w, b
            self._packed = (weight, bias, _places(parts))
        return self._packed[:2]

    def _project(self, linear: Linear, x: Tensor, delta: LowRank | None) -> Tensor:
        heads = self.split(linear(x))
        return heads if delta is None else heads + delta(x)

    def heads_output(
        self,
        x: Tensor,
        edit: LayerEdit | None,
        read: Tensor | None,
        extra: int,
        fused: bool,
        pattern: bool = False,
        turn: Turn | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Each head's output before the output projection.

        Args:
            x: the normed input [B, N, D].
            edit: what changes here.
            read: the query rows to compute, [R] or [B, R]; None for all.
            extra: how many of the N tokens are extra tokens of the edit (for block masks: the last ones).
            fused: use the fused kernel.
            pattern: also return the attention pattern (needs the eager way).
            turn: rotary angles of the N tokens.

        Returns:
            [B, H, R, d] and, if asked for, the pattern [B, H, R, N].
        """
        edit = edit or _NOTHING
        x = x.to(self.q.weight.dtype)  # once for q, k, v: the residual stream may be wider
        rows = x if read is None else take_rows(x, read)
        q = self._project(self.q, rows, edit.q)  # [B, H, R, d]
        k = self._project(self.k, x, edit.k)  # [B, H, N, d]
        v = self._project(self.v, x, edit.v)
        if turn is not None:
            q, k = turn.at(read)(q), turn(k)
        weights: Tensor | None = None
        if pattern or not fused:
            mask = self._mask(x, edit.mask, read, extra, written_out=True)
            z, weights = attend_eager(q, k, v, mask)
        elif isinstance(edit.mask, BlockMask) and read is None and all(edit.mask.isolated):
            originals = x.shape[1] - extra
            z = torch.cat(
                [
                    attend_fused(q[:, :, part], k[:, :, part], v[:, :, part], inner, causal)
                    for part, inner, causal in (
                        (slice(0, originals), None, self.causal),
                        (slice(originals, None), _inner_mask(edit.mask, x, self.causal), False),
                    )
                ],
                dim=2,
            )
        else:
            mask = self._mask(x, edit.mask, read, extra, written_out=False)
            z = attend_fused(q, k, v, mask, causal=self.causal and mask is None)
        if edit.gate is not None:
            z = z * edit.gate.to(z)[:, None, None]  # an edit may have been made on another device
        return z, weights if pattern else None

    def _mask(
        self, x: Tensor, change: Tensor | BlockMask | None, read: Tensor | None, extra: int, written_out: bool
    ) -> Tensor | None:
        """The whole additive mask [1 or B, 1 or H, R, N]; None where the kernel needs none."""
        length = x.shape[1]
        change = full_mask(change, x, extra, self.heads)
        if change is not None and read is not None:
            change = _query_rows(change, read)
        mask = None if change is None else change if change.ndim == 4 else change[None]  # [1 or B, H, R, N]
        if self.causal and (written_out or read is not None or mask is not None):
            keys = torch.arange(length, device=x.device)
            rows = keys if read is None else read  # [R] or [B, R]
            future = keys > rows[..., None]  # [R, N] or [B, R, N]
            causal = torch.zeros(future.shape, dtype=x.dtype, device=x.device).masked_fill(
                future, float("-inf")
            )
            causal = causal[:, None] if causal.ndim == 3 else causal
            mask = causal if mask is None else mask + causal
        return mask

    def merge(self, z: Tensor) -> Tensor:
        """Output projection of the heads' outputs: [B, H, R, d] -> [B, R, D]."""
        merged: Tensor = self.o(z.transpose(1, 2).flatten(2))
        return merged


def _places(parts: tuple[Linear, ...]) -> tuple[int, ...]:
    """The memory addresses of some weights and biases."""
    return tuple(p.data_ptr() for part in parts for p in (part.weight, part.bias))


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """The rows of x [B, N, D] that `rows` names: [R] for all alike, [B, R] for each its own."""
    if rows.ndim == 1:
        return x[:, rows]
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))


def full_mask(change: Tensor | BlockMask | None, x: Tensor, extra: int, heads: int) -> Tensor | None:
    """The additive mask of an edit on the device and in the precision of x [B, N, D].

    [H or 1, N, N], or [B, H or 1, N, N] where every item has its own.

    Raises:
        UsageError: the mask is for another number of heads or tokens.
    """
    if change is None:
        return None
    length = x.shape[1]
    if isinstance(change, BlockMask):
        if change.see.shape[1] != 1 + extra:
            raise UsageError(
                f"a block mask for {change.see.shape[1] - 1} extra tokens was given to a layer with {extra}"
            )
        change = change.additive(length - extra, x.device, x.dtype)
    shape = tuple(change.shape[-3:])
    own = change.ndim == 3 or change.shape[0] == x.shape[0]
    if not own or shape[0] not in (1, heads) or shape[1:] != (length, length):
        raise UsageError(
            f"a mask of this layer must be [{heads} or 1, {length}, {length}] (heads, tokens, tokens); "
            f"got {list(change.shape)}"
        )
    return change.to(x)


def _query_rows(mask: Tensor, read: Tensor) -> Tensor:
    """Rows `read` ([R] or [B, R]) of a mask [H, N, N] or [B, H, N, N]: [H, R, N] or [B, H, R, N]."""
    if read.ndim == 1:
        return mask[..., read, :]
    if mask.ndim == 3:
        return mask[:, read].transpose(0, 1)
    rows = read[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[-1])
    return mask.expand(len(read), -1, -1, -1).gather(2, rows)


def _inner_mask(mask: BlockMask, x: Tensor, causal: bool) -> Tensor | None:
    """The mask among the extra tokens, [H, T, T]; None when they all see each other."""
    inner = mask.see[:, 1:, 1:]
    if causal:
        inner = inner & torch.ones_like(inner[0]).tril()
    if bool(inner.all()):
        return None
    return torch.zeros(inner.shape, dtype=x.dtype, device=x.device).masked_fill(
        ~inner.to(x.device), float("-inf")
    )
