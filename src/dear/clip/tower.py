"""A pre-norm transformer with separate heads that runs any range of layers, edited and recorded.

Attention has two equivalent implementations: `attend_eager` computes the softmax explicitly, `attend_fused`
calls PyTorch's fused kernel. If all heads of a layer isolate the extra tokens, the layer runs on the
original and on the extra tokens separately and needs no mask. If only some heads do, one masked call is
faster than one call per kind of head, on the CPU and on a GPU.

Shapes: B batch, N tokens (extra ones included), Q queries, K keys, R rows that are read, H heads, D width,
d width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dear.clip.config import TowerConfig
from dear.clip.cpu import linear, mlp_by_onednn, uses_onednn
from dear.clip.edit import BlockMask, Edit, LayerEdit, LowRank, Record, insert_tokens
from dear.clip.gpu import run_by_kernels
from dear.clip.rotary import RotaryAngles
from dear.errors import UsageError


def attend_eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(d) + mask) v, computed explicitly (eq. 1 and 7), and the softmax itself.

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
        # On a CPU the kernel's gradient is twelve times as slow in bfloat16 as in float32.
        return attend_fused(q.float(), k.float(), v.float(), mask, causal).to(q.dtype)
    if mask is not None and mask.dtype != q.dtype:
        mask = mask.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


class Linear(nn.Module):
    """x W^T + b in the precision of its weights, which a checkpoint or `Clip` initializes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        x = x.to(self.weight.dtype)
        return linear(x, self.weight, self.bias)


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
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)  # [B, N, H, d] -> [B, H, N, d]

    def packed(self) -> tuple[Tensor, Tensor]:
        """Weight [3D, D] and bias [3D] of q, k and v as one product; the three become views of them."""
        parts = (self.q, self.k, self.v)
        if self._packed is None or self._packed[2] != _addresses(parts):  # loaded, moved or cast since
            weight = torch.cat([part.weight.detach() for part in parts])
            bias = torch.cat([part.bias.detach() for part in parts])
            for part, w, b in zip(parts, weight.chunk(3), bias.chunk(3), strict=True):
                part.weight.data, part.bias.data = w, b
            self._packed = (weight, bias, _addresses(parts))
        return self._packed[:2]

    def _project(self, linear: Linear, x: Tensor, delta: LowRank | None) -> Tensor:
        heads = self.split(linear(x))  # [B, H, N, d]
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
            edit: changes of this layer.
            read: the query rows to compute, [R] or [B, R]; None for all.
            extra: number of extra tokens among the N (for block masks: the last ones).
            fused: use the fused kernel.
            pattern: also return the attention pattern, which only the eager implementation computes.
            angles: rotary angles of the N tokens.

        Returns:
            [B, H, R, d] and, if requested, the pattern [B, H, R, N].
        """
        edit = edit or LayerEdit()
        x = x.to(self.q.weight.dtype)  # once for q, k, v: the residual stream may have a higher precision
        rows = x if read is None else take_rows(x, read)
        q = self._project(self.q, rows, edit.q)  # [B, H, R, d]
        k = self._project(self.k, x, edit.k)  # [B, H, N, d]
        v = self._project(self.v, x, edit.v)
        if angles is not None:
            q, k = angles.at(read)(q), angles(k)
        weights: Tensor | None = None
        if pattern or not fused:
            mask = self._mask(x, edit.mask, read, extra, eager=True)
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
            mask = self._mask(x, edit.mask, read, extra, eager=False)
            z = attend_fused(q, k, v, mask, causal=self.causal and mask is None)
        if edit.gate is not None:
            z = z * edit.gate.to(z)[:, None, None]  # an edit may have been made on another device
        return z, weights if pattern else None

    def _mask(
        self, x: Tensor, change: Tensor | BlockMask | None, read: Tensor | None, extra: int, eager: bool
    ) -> Tensor | None:
        """The complete additive mask [1 or B, 1 or H, R, N]; None where the kernel needs none."""
        length = x.shape[1]
        change = full_mask(change, x, extra, self.heads)
        if change is not None and read is not None:
            change = _query_rows(change, read)
        mask = None if change is None else change if change.ndim == 4 else change[None]  # [1 or B, H, R, N]
        if self.causal and (eager or read is not None or mask is not None):
            keys = torch.arange(length, device=x.device)
            rows = keys if read is None else read  # [R] or [B, R]
            future = keys > rows[..., None]  # [R, N] or [B, R, N]
            causal = torch.zeros(future.shape, dtype=x.dtype, device=x.device).masked_fill(
                future, float("-inf")
            )
            causal = causal[:, None] if causal.ndim == 3 else causal  # [R, N] or [B, 1, R, N]
            mask = causal if mask is None else mask + causal
        return mask

    def merge(self, z: Tensor) -> Tensor:
        """Output projection of the heads' outputs: [B, H, R, d] -> [B, R, D]."""
        merged: Tensor = self.o(z.transpose(1, 2).flatten(2))  # [B, R, H*d] -> [B, R, D]
        return merged


def _addresses(parts: tuple[Linear, ...]) -> tuple[int, ...]:
    """The memory addresses of weights and biases."""
    return tuple(p.data_ptr() for part in parts for p in (part.weight, part.bias))


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows [B, R, D] of x [B, N, D]; `rows` is [R] for all items, or [B, R] per item."""
    if rows.ndim == 1:
        return x[:, rows]
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))  # index [B, R, D]


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
                f"the block mask of a layer with {extra} extra tokens must be for as many, got one for "
                f"{change.visible.shape[1] - 1}"
            )
        change = change.additive(length - extra, x.device, x.dtype)
    shape = tuple(change.shape[-3:])
    fits = change.ndim == 3 or change.shape[0] == x.shape[0]
    if not fits or shape[0] not in (1, heads) or shape[1:] != (length, length):
        raise UsageError(
            f"a mask of this layer must be [{heads} or 1, {length}, {length}] (heads, tokens, tokens), got "
            f"{list(change.shape)}"
        )
    return change.to(x)


def _query_rows(mask: Tensor, read: Tensor) -> Tensor:
    """Rows `read` ([R] or [B, R]) of a mask [H, N, N] or [B, H, N, N]: [H, R, N] or [B, H, R, N]."""
    if read.ndim == 1:
        return mask[..., read, :]
    if mask.ndim == 3:
        return mask[:, read].transpose(0, 1)  # [H, B, R, N] -> [B, H, R, N]
    rows = read[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[-1])  # [B, H, R, N]
    return mask.expand(len(read), -1, -1, -1).gather(2, rows)


def _inner_mask(mask: BlockMask, x: Tensor, causal: bool) -> Tensor | None:
    """The mask among the extra tokens, [H, T, T]; None if they all read each other."""
    inner = mask.visible[:, 1:, 1:]  # [H, T, T]
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
        # In place where no gradient needs the factors: the same values in less than half the time on a CPU.
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
        known = type(up) is type(down) is Linear  # not replaced, as for LoRA by another library
        if known and self.activation != "gelu_tanh" and uses_onednn(x, up.weight):  # it has no tanh
            return mlp_by_onednn(
                x, (up.weight, up.bias), lambda h: activate(h, self.activation), (down.weight, down.bias)
            )
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
        """Run the layer on x [B, N, D]: [B, N, D], or with `read` only those rows, [B, R, D]."""
        rows: slice | Tensor | None = None if record is None else record.rows
        read_after: Tensor | None = None
        if record is not None and read is not None:
            rows = record.rows_within(read, x.shape[1])
            if rows is None:  # rows are recorded that are not read: compute all, select those read at the end
                rows, read, read_after = record.rows, None, read
        with_pattern = record is not None and record.pattern
        z, pattern = self.attn.heads_output(self.ln_1(x), edit, read, extra, fused, with_pattern, angles)
        x = (x if read is None else take_rows(x, read)) + self.attn.merge(z)
        m = self.mlp(self.ln_2(x))  # [B, R, D]
        x = x + m
        if record is not None:
            name = f"blocks.{layer}"
            record.keep(f"{name}.attn.heads", z[:, :, rows])
            record.keep(f"{name}.mlp", m[:, rows])
            record.keep(f"{name}.out", x[:, rows])
            if pattern is not None:
                record.keep(f"{name}.attn.pattern", pattern[:, :, rows])
        return x if read_after is None else take_rows(x, read_after)


class LayerRange(NamedTuple):
    """The arguments of `Tower.run`, checked."""

    x: Tensor
    first: int
    last: int
    edit: Edit | None
    read: Tensor | None
    record: Record | None


class Tower(nn.Module):
    """A stack of blocks. `fused` switches between `attend_fused` and `attend_eager`."""

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

        Extra tokens of `edit` are inserted at the first layer that sets them. If that layer is before
        `first`, x must contain them already, as the run of the previous layers returned it.

        Args:
            x: [B, N, D], the input of layer `first`.
            first: first layer to run.
            last: last layer to run; None for the last of the tower.
            edit: changes, layer by layer.
            read: rows of the sequence (extra tokens included) to return, [R] or [B, R], in this order; the
                last layer computes only these queries.
            record: stores activations.

        Returns:
            [B, N + extra tokens, D], or [B, R, D] with `read`.
        """
        last = self.config.layers if last is None else last
        if not 1 <= first <= self.config.layers or not first - 1 <= last <= self.config.layers:
            raise UsageError(f"layers must be 1 to {self.config.layers}, got {first} to {last}")
        if edit is not None and max(edit.layers, default=0) > self.config.layers:
            raise UsageError(
                f"an edit of this tower must name layers 1 to {self.config.layers}, got {max(edit.layers)}"
            )
        return self.run_layers(LayerRange(x, first, last, edit, read, record))

    def run_layers(self, layers: LayerRange) -> Tensor:
        """`run` after its checks; towers that trace or replay a run override this."""
        x, first, last, edit, read, record = layers
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
            block = self.blocks[layer - 1]
            inputs = (x, change, rows, extra, self.fused, record, layer, angles)
            if change is None or not change.added:
                x = block(*inputs)
            else:
                x = functional_call(block, added_weights(block, change.added), inputs)
        if last < first and read is not None:
            x = take_rows(x, read)
        return x


def added_weights(block: nn.Module, added: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a layer that change, with `added` added to them, in the layer's precision."""
    weights = dict(block.named_parameters())
    for name in added:
        if name not in weights:
            raise UsageError(f"a layer has no parameter {name!r}; it has {', '.join(weights)}")
    return {name: (weights[name] + change).to(weights[name].dtype) for name, change in added.items()}
