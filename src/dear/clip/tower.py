"""A pre-norm transformer that can run in part, be edited and be recorded, with the heads kept apart.

Attention has two equivalent implementations: `attend_eager` writes the softmax out, `attend_fused` calls
PyTorch's fused kernel. If all heads of a layer isolate the extra tokens, the original tokens need no
mask: the layer then runs on them and on the extra tokens separately. If only some heads do, one masked call
is faster than a call per kind of head, on the CPU and on a GPU: splitting q, k and v by head costs more than
the mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dear.clip import cpu
from dear.clip.config import TowerConfig
from dear.clip.edit import BlockMask, Edit, LayerEdit, LowRank, Record, insert_tokens
from dear.clip.gpu import run_by_kernels
from dear.clip.rotary import RotaryAngles
from dear.errors import UsageError


def attend_eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(d) + mask) v, written out (eq. 1 and 7), and the softmax itself.

    q is [B, H, Q, d], k and v are [B, H, K, d], the mask is broadcast to [B, H, Q, K]; the heads' outputs are
    [B, H, Q, d], the attention pattern is [B, H, Q, K].
    """
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # [B, H, Q, K]
    if mask is not None:
        scores = scores + mask
    pattern = scores.softmax(dim=-1)
    return pattern @ v, pattern


def attend_fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """The same as `attend_eager` through PyTorch's fused kernel; `causal` needs no mask."""
    if q.dtype == torch.bfloat16 and q.device.type == "cpu" and torch.is_grad_enabled():
        # Its gradient in bfloat16 takes a CPU twelve times as long as in float32.
        return attend_fused(q.float(), k.float(), v.float(), mask, causal).to(q.dtype)
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
        x = x.to(self.weight.dtype)
        if cpu.usable(x, self.weight):
            return cpu.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


class Attention(nn.Module):
    """Projections to q, k, v and back, with an axis for the heads."""

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
        angles: RotaryAngles | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Each head's output before the output projection.

        Args:
            x: the normed input [B, N, D].
            edit: what changes here.
            read: the query rows to compute, [R] or [B, R]; None for all.
            extra: how many of the N tokens are extra tokens of the edit (for block masks: the last ones).
            fused: use the fused kernel.
            pattern: also return the attention pattern (needs the eager way).
            angles: rotary angles of the N tokens.

        Returns:
            [B, H, R, d] and, if requested, the pattern [B, H, R, N].
        """
        edit = edit or LayerEdit()
        x = x.to(self.q.weight.dtype)  # once for q, k, v: the residual stream may be wider
        rows = x if read is None else take_rows(x, read)
        q = self._project(self.q, rows, edit.q)  # [B, H, R, d]
        k = self._project(self.k, x, edit.k)  # [B, H, N, d]
        v = self._project(self.v, x, edit.v)
        if angles is not None:
            q, k = angles.at(read)(q), angles(k)
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
    """The rows of x [B, N, D] that `rows` names: [R] for all items, [B, R] per item."""
    if rows.ndim == 1:
        return x[:, rows]
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))


def full_mask(change: Tensor | BlockMask | None, x: Tensor, extra: int, heads: int) -> Tensor | None:
    """The additive mask of an edit on the device and in the precision of x [B, N, D].

    [H or 1, N, N], or [B, H or 1, N, N] with one mask per item.
    """
    if change is None:
        return None
    length = x.shape[1]
    if isinstance(change, BlockMask):
        if change.visible.shape[1] != 1 + extra:
            raise UsageError(
                f"a block mask for {change.visible.shape[1] - 1} extra tokens was used in a layer with "
                f"{extra}"
            )
        change = change.additive(length - extra, x.device, x.dtype)
    shape = tuple(change.shape[-3:])
    fits = change.ndim == 3 or change.shape[0] == x.shape[0]
    if not fits or shape[0] not in (1, heads) or shape[1:] != (length, length):
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
    inner = mask.visible[:, 1:, 1:]
    if causal:
        inner = inner & torch.ones_like(inner[0]).tril()
    if bool(inner.all()):
        return None
    return torch.zeros(inner.shape, dtype=x.dtype, device=x.device).masked_fill(
        ~inner.to(x.device), float("-inf")
    )


def activate(x: Tensor, activation: str) -> Tensor:
    """QuickGELU, `x * sigmoid(1.702 x)`, GELU, or GELU's tanh approximation."""
    if activation == "quick_gelu":
        gate = 1.702 * x
        # In place where no gradient needs the parts: the same numbers in less than half the time on a CPU.
        return x * gate.sigmoid() if gate.requires_grad else gate.sigmoid_().mul_(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class LayerNorm(nn.Module):
    """Layer normalization in the precision of its weights, whatever the activations' precision."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis of x [..., D]."""
        y = F.layer_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.bias, self.eps)
        return y.to(x.dtype)


class MLP(nn.Module):
    """Two linear layers around an activation."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.up = Linear(config.width, config.mlp)
        self.down = Linear(config.mlp, config.width)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        up, down = self.up, self.down
        x = x.to(up.weight.dtype)
        if cpu.usable(x, up.weight):
            return cpu.mlp(x, (up.weight, up.bias), (down.weight, down.bias), self.activation)
        out: Tensor = down(activate(up(x), self.activation))
        return out


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, config: TowerConfig, causal: bool) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.width, config.eps)
        self.attn = Attention(config, causal)
        self.ln_2 = LayerNorm(config.width, config.eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        edit: LayerEdit | None = None,
        read: Tensor | None = None,
        extra: int = 0,
        fused: bool = True,
        record: Record | None = None,
        layer: int = 0,
        angles: RotaryAngles | None = None,
    ) -> Tensor:
        """Run the layer on x [B, N, D]; with `read` only those rows are returned."""
        rows: slice | Tensor | None = None if record is None else record.rows
        late: Tensor | None = None
        if record is not None and read is not None:
            rows = record.rows_within(read, x.shape[1])
            if rows is None:  # other rows are recorded than read: compute all, take those read at the end
                rows, read, late = record.rows, None, read
        with_pattern = record is not None and record.pattern
        z, pattern = self.attn.heads_output(self.ln_1(x), edit, read, extra, fused, with_pattern, angles)
        x = (x if read is None else take_rows(x, read)) + self.attn.merge(z)
        m = self.mlp(self.ln_2(x))
        x = x + m
        if record is not None:
            name = f"blocks.{layer}"
            record.keep(f"{name}.attn.heads", z[:, :, rows])
            record.keep(f"{name}.mlp", m[:, rows])
            record.keep(f"{name}.out", x[:, rows])
            if pattern is not None:
                record.keep(f"{name}.attn.pattern", pattern[:, :, rows])
        return x if late is None else take_rows(x, late)


class Stretch(NamedTuple):
    """The arguments of `Tower.run`, checked."""

    x: Tensor
    first: int
    last: int
    edit: Edit | None
    read: Tensor | None
    record: Record | None


class Tower(nn.Module):
    """A stack of blocks. `fused` switches between the fused kernel and the written-out attention."""

    def __init__(self, config: TowerConfig, causal: bool) -> None:
        super().__init__()
        self.config: TowerConfig = config
        self.blocks = nn.ModuleList(Block(config, causal) for _ in range(config.layers))
        self.fused = True

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the matrices."""
        block = self.blocks[0]
        assert isinstance(block, Block)
        return block.mlp.up.weight.dtype

    def rotary_angles(self, edit: Edit | None, layer: int, device: torch.device) -> RotaryAngles | None:
        """Rotary angles of the tokens in a layer; None for a tower without rotary positions."""
        return None

    def run(
        self,
        x: Tensor,
        first: int = 1,
        last: int | None = None,
        edit: Edit | None = None,
        read: Tensor | None = None,
        record: Record | None = None,
    ) -> Tensor:
        """Run layers `first` to `last` (counted from 1, both included).

        Extra tokens of `edit` enter at the first layer that brings them; if that layer lies before `first`, x
        must contain them already, as a run that stopped there returned it.

        Args:
            x: [B, N, D], the input of layer `first`.
            first: first layer to run.
            last: last layer to run; None for the last there is.
            edit: what changes, layer by layer.
            read: rows of the sequence (extra tokens counted) that are wanted, [R] or [B, R]: the last layer
                computes these queries only, and they alone are returned, in that order.
            record: where to keep what happens inside.

        Returns:
            [B, N + extra tokens, D], or [B, R, D] with `read`.
        """
        last = self.config.layers if last is None else last
        if not 1 <= first <= self.config.layers or not first - 1 <= last <= self.config.layers:
            raise UsageError(f"layers {first} to {last} do not exist in a tower of {self.config.layers}")
        if edit is not None and max(edit.layers, default=0) > self.config.layers:
            raise UsageError(f"the edit names layer {max(edit.layers)}; the tower has {self.config.layers}")
        return self.run_layers(Stretch(x, first, last, edit, read, record))

    def run_layers(self, stretch: Stretch) -> Tensor:
        """`run` after its checks; a tower that records or replaces it overrides this."""
        x, first, last, edit, read, record = stretch
        if x.is_cuda and record is None and first <= last:
            result = run_by_kernels(self, x, first, last, edit, read)
            if result is not None:
                return result
        for layer in range(first, last + 1):
            change = None if edit is None else edit.layers.get(layer)
            extra = 0
            if edit is not None and edit.first is not None and layer >= edit.first:
                extra = edit.count
                x = insert_tokens(x, edit, layer)
            rows = read if layer == last else None
            angles = self.rotary_angles(edit, layer, x.device)
            block, inputs = (
                self.blocks[layer - 1],
                (x, change, rows, extra, self.fused, record, layer, angles),
            )
            if change is None or not change.added:
                x = block(*inputs)
            else:
                x = functional_call(block, added_weights(block, change.added), inputs)
        if last < first and read is not None:
            x = take_rows(x, read)
        return x


def added_weights(block: nn.Module, added: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a layer with something added to some of them, in the layer's precision."""
    weights = dict(block.named_parameters())
    for name in added:
        if name not in weights:
            raise UsageError(f"a layer has no parameter {name!r}; it has {', '.join(weights)}")
    return {name: (weights[name] + change).to(weights[name].dtype) for name, change in added.items()}
