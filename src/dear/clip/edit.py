"""What a method changes in a tower, said layer by layer; the tower applies it and knows no method.

An `Edit` names extra tokens and, for every layer it touches, a `LayerEdit`: what those tokens are on the way
into the layer, and how each head's attention differs there (mask, gate, low-rank change of q, k, v).
"""

from __future__ import annotations

from collections.abc import Mapping
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
    dropout: float = 0.0  #: probability with which an element of the input is set to 0, for training

    def __call__(self, x: Tensor) -> Tensor:
        """The change of the projection's output for inputs x [B, N, D]: [B, H, N, d]."""
        if self.dropout:
            x = F.dropout(x, self.dropout)
        inner = torch.einsum("bnw,hrw->bhnr", x, self.down.to(x))
        return self.scale * torch.einsum("bhnr,hdr->bhnd", inner, self.up.to(x))

    def matrix(self) -> Tensor:
        """The change as one matrix [H*d, D], to be added to the projection's weight."""
        down = self.down.expand(self.up.shape[0], -1, -1)
        return self.scale * torch.einsum("hdr,hrw->hdw", self.up, down).flatten(0, 1)


@dataclass(frozen=True)
class BlockMask:
    """Which tokens each head lets read which: the original tokens are one block, then each extra token.

    `see[h, 0, 0]`: originals read originals (always true); `see[h, 0, 1 + t]`: originals read token t;
    `see[h, 1 + t, 0]`: token t reads the originals; `see[h, 1 + t, 1 + u]`: token t reads token u.
    """

    see: Tensor  #: bool [H, 1 + T, 1 + T]
    _expanded: dict[tuple[int, torch.device, torch.dtype], Tensor] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if self.see.dtype != torch.bool or self.see.ndim != 3 or self.see.shape[1] != self.see.shape[2]:
            raise UsageError(
                f"a block mask is bool [H, 1+T, 1+T]; got {self.see.dtype} {tuple(self.see.shape)}"
            )
        if not bool(self.see.any(dim=2).all()):
            head, row = (~self.see.any(dim=2)).nonzero()[0].tolist()
            raise UsageError(f"head {head} leaves row {row} of its mask empty: that token could read nothing")
        if not bool(self.see[:, 0, 0].all()):
            head = int((~self.see[:, 0, 0]).nonzero()[0])
            raise UsageError(
                f"head {head} hides the original tokens from each other (see[{head}, 0, 0] is false); a "
                "block mask cannot say that, use a mask of [H, N, N]"
            )

    @cached_property
    def isolated(self) -> tuple[bool, ...]:
        """For each head: whether original and extra tokens do not see each other at all."""
        apart = ~self.see[:, 0, 1:].any(1) & ~self.see[:, 1:, 0].any(1)
        return tuple(bool(flag) for flag in apart)

    def additive(self, originals: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The mask to add to the scores, [H, N + T, N + T], for N originals followed by T extra tokens."""
        key = (originals, device, dtype)
        if key not in self._expanded:
            tokens = self.see.shape[1] - 1
            block = torch.cat([torch.zeros(originals, dtype=torch.long), torch.arange(1, tokens + 1)])
            see = self.see.cpu()[:, block][:, :, block]
            full = torch.zeros(see.shape, dtype=dtype).masked_fill(~see, float("-inf"))
            self._expanded[key] = full.to(device)
        return self._expanded[key]


@dataclass(frozen=True)
class LayerEdit:
    """What changes in one layer. Every field left out changes nothing."""

    tokens: Tensor | None = None  #: the extra tokens' own input of this layer, [T, D] or [B, T, D]
    anchor: float = 1.0  #: weight of `tokens` against the tokens' output of the layer before (eq. 5: beta)
    mask: Tensor | BlockMask | None = None  #: added to the scores, [(B,) H or 1, N + T, N + T], or blocks
    gate: Tensor | None = None  #: [H], multiplied on each head's output
    q: LowRank | None = None
    k: LowRank | None = None
    v: LowRank | None = None
    added: Mapping[str, Tensor] | None = None  #: by parameter name ("ln_1.weight"): added to the layer's own

    def __post_init__(self) -> None:
        for name, value, axes in (
            ("tokens", self.tokens, (2, 3)),
            ("mask", self.mask, (3, 4)),
            ("gate", self.gate, (1,)),
        ):
            if isinstance(value, Tensor) and value.ndim not in axes:
                raise UsageError(
                    f"{name} of a layer must have {' or '.join(map(str, axes))} axes; got {list(value.shape)}"
                )


@dataclass(frozen=True)
class Edit:
    """Changes of a tower, keyed by layer (counted from 1).

    Args:
        layers: what changes in each layer.
        count: how many extra tokens there are; 0 for none.
        at: where they stand in the sequence; None puts them at its end.
    """

    layers: Mapping[int, LayerEdit]
    count: int = 0
    at: int | None = None

    def __post_init__(self) -> None:
        for layer, change in self.layers.items():
            if layer < 1:
                raise UsageError(f"layer {layer} does not exist: layers count from 1")
            if isinstance(change.mask, BlockMask) and self.at is not None:
                raise UsageError("a block mask needs its extra tokens at the end of the sequence (at=None)")
            if change.tokens is not None and change.tokens.shape[-2] != self.count:
                raise UsageError(
                    f"layer {layer} brings {change.tokens.shape[-2]} tokens, the edit says {self.count}"
                )
        if self.count and self.first is None:
            raise UsageError(f"the edit has {self.count} extra tokens but no layer brings them in")

    @property
    def first(self) -> int | None:
        """The layer at which the extra tokens enter; None without any."""
        entering = [layer for layer, change in self.layers.items() if change.tokens is not None]
        return min(entering) if entering else None
