"""A pre-norm transformer that can run in part, be edited, and be recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dear.clip.attention import Attention, Linear, take_rows
from dear.clip.config import TowerConfig
from dear.clip.edit import Edit, LayerEdit
from dear.clip.gpu import tower as gpu_tower
from dear.clip.rotary import Turn
from dear.errors import UsageError


class Record(Mapping[str, Tensor]):
    """Activations kept from a run: a mapping from stable dotted names to tensors.

    Pass one to `Tower.run`. Layers count from 1; R is the number of recorded rows:
    `blocks.9.attn.heads` [B, H, R, d] (before the output projection), `blocks.9.attn.pattern` [B, H, R, N]
    (with `pattern=True`), `blocks.9.mlp` [B, R, D], `blocks.9.out` [B, R, D].

    Args:
        rows: which rows of the sequence to keep, in every layer; the class token alone by default.
        pattern: also keep the attention pattern of those rows.
    """

    def __init__(self, rows: slice = slice(0, 1), pattern: bool = False) -> None:
        self.rows = rows
        self.pattern = pattern
        self._kept: dict[str, Tensor] = {}

    def rows_within(self, read: Tensor, length: int) -> Tensor | None:
        """Where in `read` [R] the recorded rows stand, if all are there; else None."""
        if read.ndim != 1:
            return None
        given = read.tolist()
        wanted = range(length)[self.rows]
        if not set(wanted) <= set(given):
            return None
        return torch.tensor([given.index(row) for row in wanted], dtype=torch.long, device=read.device)

    def keep(self, name: str, value: Tensor) -> None:
        """Store `value` under `name`."""
        self._kept[name] = value

    def __getitem__(self, name: str) -> Tensor:
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def activate(x: Tensor, activation: str) -> Tensor:
    """QuickGELU, `x * sigmoid(1.702 x)`, GELU, or GELU's tanh approximation."""
    if activation == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
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
        out: Tensor = self.down(activate(self.up(x), self.activation))
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
        turn: Turn | None = None,
    ) -> Tensor:
        """Run the layer on x [B, N, D]; only the rows `read` come out if it is given."""
        rows: slice | Tensor | None = None if record is None else record.rows
        late: Tensor | None = None
        if record is not None and read is not None:
            rows = record.rows_within(read, x.shape[1])
            if rows is None:  # other rows are recorded than read: compute all, take those read at the end
                rows, read, late = record.rows, None, read
        with_pattern = record is not None and record.pattern
        z, pattern = self.attn.heads_output(self.ln_1(x), edit, read, extra, fused, with_pattern, turn)
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

    def turn(self, edit: Edit | None, layer: int, device: torch.device) -> Turn | None:
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
        is taken to hold them already, as a run that stopped there returned it.

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

        Raises:
            UsageError: a layer is named that does not exist.
        """
        last = self.config.layers if last is None else last
        if not 1 <= first <= self.config.layers or not first - 1 <= last <= self.config.layers:
            raise UsageError(f"layers {first} to {last} do not exist in a tower of {self.config.layers}")
        if edit is not None and max(edit.layers, default=0) > self.config.layers:
            raise UsageError(f"the edit names layer {max(edit.layers)}; the tower has {self.config.layers}")
        if x.is_cuda and record is None and first <= last and gpu_tower.usable(self, x, edit):
            return gpu_tower.run(self, x, first, last, edit, read)
        for layer in range(first, last + 1):
            change = None if edit is None else edit.layers.get(layer)
            extra = 0
            if edit is not None and edit.first is not None and layer >= edit.first:
                extra = edit.count
                x = bring_in(x, edit, layer)
            rows = read if layer == last else None
            turn = self.turn(edit, layer, x.device)
            block, inputs = self.blocks[layer - 1], (x, change, rows, extra, self.fused, record, layer, turn)
            if change is None or not change.added:
                x = block(*inputs)
            else:
                x = functional_call(block, added_weights(block, change.added), inputs)
        if last < first and read is not None:
            x = take_rows(x, read)
        return x


def added_weights(block: nn.Module, added: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a layer with something added to some of them, in the layer's own precision.

    Raises:
        UsageError: the layer has no parameter of that name.
    """
    own = dict(block.named_parameters())
    for name in added:
        if name not in own:
            raise UsageError(f"a layer has no parameter {name!r}; it has {', '.join(own)}")
    return {name: (own[name] + change).to(own[name].dtype) for name, change in added.items()}


def bring_in(x: Tensor, edit: Edit, layer: int) -> Tensor:
    """Put the extra tokens' input of this layer into the sequence (eq. 5 and 6)."""
    change = edit.layers.get(layer)
    if change is None or change.tokens is None:
        return x  # the tokens flow on as the layer before left them
    fresh = tokens_for(change.tokens, x).expand(x.shape[0], -1, -1)  # [B, T, D]
    if layer == edit.first:
        start = x.shape[1] if edit.at is None else edit.at
        return torch.cat([x[:, :start], fresh, x[:, start:]], dim=1)
    start = x.shape[1] - edit.count if edit.at is None else edit.at
    stop = start + edit.count
    if change.anchor != 1.0:
        fresh = change.anchor * fresh + (1.0 - change.anchor) * x[:, start:stop]
    return torch.cat([x[:, :start], fresh, x[:, stop:]], dim=1)


def tokens_for(tokens: Tensor, x: Tensor) -> Tensor:
    """Extra tokens [T, D], [1, T, D] or [B, T, D] on the device and in the precision of x [B, N, D].

    Raises:
        UsageError: they are for another batch or width.
    """
    # The batch first: an exported graph must not depend on whether it is 1.
    batches = (x.shape[0], 1) if tokens.ndim == 3 else (tokens.shape[0],)
    if tokens.shape[0] not in batches or tokens.shape[-1] != x.shape[-1]:
        raise UsageError(
            f"extra tokens of {list(tokens.shape)} do not fit activations of {list(x.shape)}; give "
            f"[T, {x.shape[-1]}] or [{x.shape[0]}, T, {x.shape[-1]}]"
        )
    return tokens.to(x)
