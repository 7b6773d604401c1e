"""Changes of a tower, layer by layer, and records of its activations.

An `Edit` is what a method changes in a tower: the number of extra tokens and, for every layer it changes, a
`LayerEdit` with the tokens' input and the changes of each head's attention (mask, gate, low-rank change of
q, k, v). The tower applies it without knowing the method.

Shapes: B batch, N original tokens, T extra tokens, H heads, D width, d width of a head, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.errors import UsageError


@dataclass(frozen=True)
class LowRank:
    """A low-rank change of one projection, one pair of matrices per head: `dW_h = scale * up_h down_h`.

    If `down` has one block, `[1, r, D]`, all heads share it: ordinary LoRA.
    """

    down: Tensor  #: [H or 1, r, D]
    up: Tensor  #: [H, d, r]
    scale: float = 1.0
    dropout: float = 0.0  #: probability of setting an element of the input to 0, in training

    def __call__(self, x: Tensor) -> Tensor:
        """The change of the projection's output for inputs x [B, N, D]: [B, H, N, d]."""
        if self.dropout:
            x = F.dropout(x, self.dropout)
        inner = torch.einsum("bnw,hrw->bhnr", x, self.down.to(x))  # [B, H or 1, N, r]
        return self.scale * torch.einsum("bhnr,hdr->bhnd", inner, self.up.to(x))

    def matrix(self) -> Tensor:
        """The change as one matrix [H*d, D], to be added to the projection's weight."""
        down = self.down.expand(self.up.shape[0], -1, -1)  # [H, r, D]
        return self.scale * torch.einsum("hdr,hrw->hdw", self.up, down).flatten(0, 1)  # [H*d, D]


@dataclass(frozen=True)
class BlockMask:
    """Which tokens may read which, per head: the original tokens are one block, each extra token another.

    `visible[h, 0, 0]`: originals read originals (always true); `[h, 0, 1 + t]`: originals read token t;
    `[h, 1 + t, 0]`: token t reads the originals; `[h, 1 + t, 1 + u]`: token t reads token u.
    """

    visible: Tensor  #: bool [H, 1 + T, 1 + T]
    _expanded: dict[tuple[int, torch.device, torch.dtype], Tensor] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        shape = self.visible.shape
        if self.visible.dtype != torch.bool or len(shape) != 3 or shape[1] != shape[2]:
            raise UsageError(
                f"a block mask must be bool [H, 1+T, 1+T], got {self.visible.dtype} {list(shape)}"
            )
        if not bool(self.visible.any(dim=2).all()):
            head, row = (~self.visible.any(dim=2)).nonzero()[0].tolist()
            raise UsageError(f"row {row} of head {head}'s mask must allow at least one token, got none")
        if not bool(self.visible[:, 0, 0].all()):
            head = int((~self.visible[:, 0, 0]).nonzero()[0])
            raise UsageError(
                f"visible[{head}, 0, 0] must be true: a block mask cannot hide original tokens from each "
                "other; use a mask of [H, N, N]"
            )

    @cached_property
    def isolated(self) -> tuple[bool, ...]:
        """For each head: whether original and extra tokens do not read each other at all."""
        isolated = ~self.visible[:, 0, 1:].any(1) & ~self.visible[:, 1:, 0].any(1)  # [H]
        return tuple(bool(flag) for flag in isolated)

    def additive(self, originals: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The mask to add to the scores, [H, N + T, N + T], for N originals followed by T extra tokens."""
        key = (originals, device, dtype)
        if key not in self._expanded:
            tokens = self.visible.shape[1] - 1
            block = torch.cat([torch.zeros(originals, dtype=torch.long), torch.arange(1, tokens + 1)])
            visible = self.visible.cpu()[:, block][:, :, block]
            full = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, float("-inf"))
            self._expanded[key] = full.to(device)
        return self._expanded[key]


@dataclass(frozen=True)
class LayerEdit:
    """Changes of one layer. A field that is not set changes nothing."""

    tokens: Tensor | None = None  #: the extra tokens' input of this layer, [T, D] or [B, T, D]
    #: weight of `tokens` relative to the tokens' output of the previous layer (eq. 5: beta)
    token_weight: float = 1.0
    mask: Tensor | BlockMask | None = None  #: added to the scores, [(B,) H or 1, N + T, N + T], or blocks
    gate: Tensor | None = None  #: [H], factor of each head's output
    q: LowRank | None = None
    k: LowRank | None = None
    v: LowRank | None = None
    added: Mapping[str, Tensor] | None = None  #: by parameter name ("ln_1.weight"): added to that parameter

    def __post_init__(self) -> None:
        for name, value, axes in (
            ("tokens", self.tokens, (2, 3)),
            ("mask", self.mask, (3, 4)),
            ("gate", self.gate, (1,)),
        ):
            if isinstance(value, Tensor) and value.ndim not in axes:
                raise UsageError(
                    f"{name} of a layer must have {' or '.join(map(str, axes))} axes, got {list(value.shape)}"
                )


@dataclass(frozen=True)
class Edit:
    """Changes of a tower, keyed by layer (counted from 1).

    Args:
        layers: what changes in each layer.
        count: how many extra tokens there are; 0 for none.
        at: their position in the sequence; None puts them at its end.
    """

    layers: Mapping[int, LayerEdit]
    count: int = 0
    at: int | None = None

    def __post_init__(self) -> None:
        for layer, change in self.layers.items():
            if layer < 1:
                raise UsageError(f"layers count from 1, got {layer}")
            if isinstance(change.mask, BlockMask) and self.at is not None:
                raise UsageError(f"a block mask needs extra tokens at the end (at=None), got at={self.at}")
            if change.tokens is not None and change.tokens.shape[-2] != self.count:
                raise UsageError(
                    f"tokens of layer {layer} must be {self.count}, as the edit's count, got "
                    f"{change.tokens.shape[-2]}"
                )
        if self.count and self.first is None:
            raise UsageError(f"an edit with {self.count} extra tokens must set `tokens` in a layer")

    @property
    def first(self) -> int | None:
        """The layer at which the extra tokens are inserted; None without any."""
        entering = [layer for layer, change in self.layers.items() if change.tokens is not None]
        return min(entering) if entering else None


def insert_tokens(x: Tensor, edit: Edit, layer: int) -> Tensor:
    """Insert the extra tokens' input of a layer into x [B, N or N + T, D] (eq. 5 and 6): [B, N + T, D]."""
    change = edit.layers.get(layer)
    if change is None or change.tokens is None:
        return x  # the tokens keep the output of the previous layer
    tokens = match_tokens(change.tokens, x).expand(x.shape[0], -1, -1)  # [B, T, D]
    if layer == edit.first:
        start = x.shape[1] if edit.at is None else edit.at
        return torch.cat([x[:, :start], tokens, x[:, start:]], dim=1)
    start = x.shape[1] - edit.count if edit.at is None else edit.at
    stop = start + edit.count
    if change.token_weight != 1.0:
        tokens = change.token_weight * tokens + (1.0 - change.token_weight) * x[:, start:stop]
    return torch.cat([x[:, :start], tokens, x[:, stop:]], dim=1)


def match_tokens(tokens: Tensor, x: Tensor) -> Tensor:
    """Extra tokens [T, D], [1, T, D] or [B, T, D] on the device and in the precision of x [B, N, D]."""
    # The batch size comes first: an exported graph must not depend on whether it is 1.
    batches = (x.shape[0], 1) if tokens.ndim == 3 else (tokens.shape[0],)
    if tokens.shape[0] not in batches or tokens.shape[-1] != x.shape[-1]:
        raise UsageError(
            f"extra tokens for activations {list(x.shape)} must be [T, {x.shape[-1]}] or "
            f"[{x.shape[0]}, T, {x.shape[-1]}], got {list(tokens.shape)}"
        )
    return tokens.to(x)


class Record(Mapping[str, Tensor]):
    """Activations of a run: a mapping from stable dotted names to tensors.

    Pass one to `Tower.run`. Layers count from 1; R is the number of recorded rows:
    `blocks.9.attn.heads` [B, H, R, d] (before the output projection), `blocks.9.attn.pattern` [B, H, R, N]
    (with `pattern=True`), `blocks.9.mlp` [B, R, D], `blocks.9.out` [B, R, D].

    Args:
        rows: rows of the sequence to record in every layer; by default the class token alone.
        pattern: also record the attention pattern of those rows.
    """

    def __init__(self, rows: slice = slice(0, 1), pattern: bool = False) -> None:
        self.rows = rows
        self.pattern = pattern
        self._tensors: dict[str, Tensor] = {}

    def rows_within(self, read: Tensor, length: int) -> Tensor | None:
        """Indices of the recorded rows in `read` [R]; None if `read` lacks one of them."""
        if read.ndim != 1:
            return None
        rows = read.tolist()
        recorded = range(length)[self.rows]
        if not set(recorded) <= set(rows):
            return None
        return torch.tensor([rows.index(row) for row in recorded], dtype=torch.long, device=read.device)

    def keep(self, name: str, value: Tensor) -> None:
        """Store `value` under `name`."""
        self._tensors[name] = value

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
