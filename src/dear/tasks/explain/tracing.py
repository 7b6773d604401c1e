"""A backbone that keeps what its image tower did, and a mode in which lengths of vectors are constants.

`dear.tasks.explain.parts` takes scores apart with the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dear.clip.edit import Edit, Record
from dear.clip.model import Clip
from dear.clip.tower import Stretch, shared_copy
from dear.clip.towers import TextTower, VisionTower
from dear.errors import UsageError

_NONLINEAR = (
    torch.exp, Tensor.exp, torch.softmax, Tensor.softmax, F.softmax, torch.sigmoid, Tensor.sigmoid,
    torch.tanh, Tensor.tanh, F.gelu, F.silu, torch.log, Tensor.log,
)  # fmt: skip
_SPREAD = (torch.var, Tensor.var)
_GATED = (torch.relu, Tensor.relu, F.relu)


class Held(TorchFunctionMode):
    """Lengths of vectors are constants where a gradient is wanted: unit vectors and norms become linear."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []  #: of functions that had to be held, beside lengths

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args and isinstance(args[0], Tensor) else None
        if x is None or not x.requires_grad:
            return func(*args, **kwargs)
        if func is F.normalize:
            return _normalize(x, *args[1:], **kwargs)
        if func is F.layer_norm:
            return _layer_norm(x, *args[1:], **kwargs)
        if func in _SPREAD:
            return func(x.detach(), *args[1:], **kwargs)
        if func in _GATED:
            return x * (x > 0).to(x.dtype)
        if func in _NONLINEAR:
            self.inputs.append(x)
            return func(x.detach(), *args[1:], **kwargs)
        return func(*args, **kwargs)


def _normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Tensor:
    length: Tensor = x.detach().norm(p, dim, keepdim=True)
    return x / length.clamp(min=eps)


def _layer_norm(x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    spread = (x.detach().var(-1, keepdim=True, unbiased=False) + eps).sqrt()
    return (x - x.mean(-1, keepdim=True)) / spread * weight + bias


@dataclass
class Segment:
    """One call of the image tower's `run`: its input, what happened inside, and what came out."""

    first: int
    last: int
    x: Tensor
    edit: Edit | None
    record: Record
    positions: tuple[int, ...]  #: positions in the sequence of the rows that came out
    out: Tensor
    leaf: Tensor | None = None  #: for the last layer: the rows as a gradient's starting point
    #: by layer: heads' outputs of the class token [B, H, 1, d] that were asked for beside the rows, likewise
    heads: dict[int, Tensor] = field(default_factory=dict)

    def hand_on(self, record: Record, heads: Mapping[int, Tensor]) -> None:
        """Fill a record that a caller gave; `heads` are outputs [B, H, 1, d] in the place of some layers'."""
        if record.rows != slice(0, 1) or record.pattern:
            raise UsageError(
                "of a traced backbone the class token's row can be recorded, without its pattern"
            )
        for layer in range(self.first, self.last + 1):
            for name in ("attn.heads", "mlp", "out"):
                value = self.record[f"blocks.{layer}.{name}"]
                value = value[:, :, :1] if name == "attn.heads" else value[:, :1]
                record.keep(
                    f"blocks.{layer}.{name}", heads.get(layer, value) if name == "attn.heads" else value
                )


@dataclass(frozen=True)
class Scripted:
    """What a run is to give instead of running again."""

    segment: Segment
    out: Tensor
    heads: Mapping[int, Tensor]  #: by layer, for a record that the caller gives


class TracedVision(VisionTower):
    """The image tower of a traced backbone; made by `on`."""

    @classmethod
    def on(cls, tower: VisionTower, segments: list[Segment]) -> TracedVision:
        """A tower on the weights of another that adds every run to `segments`."""
        own = shared_copy(tower, cls)
        own.segments, own.script, own.spreads = segments, None, {}
        return own

    segments: list[Segment]
    script: Iterator[Scripted] | None  #: what to give instead of running again
    spreads: dict[int, Tensor]  #: by id of such an output: what the final norm divides it by

    def run_layers(self, given: Stretch) -> Tensor:
        """As the tower's own, with everything recorded; the last layer's rows begin a gradient."""
        x, first, last, edit, read, record = given
        if self.script is not None:
            known = next(self.script)
            if record is not None:
                known.segment.hand_on(record, known.heads)
            return known.out
        own = Record(slice(None), pattern=True)
        with torch.no_grad():
            out = super().run_layers(given._replace(x=x.detach(), record=own))
        length = x.shape[1] + self._brought(edit, first, last)
        rows = range(length) if read is None else read.tolist()
        segment = Segment(first, last, x.detach(), edit, own, tuple(rows), out)
        self.segments.append(segment)
        if last < self.config.layers:
            if record is not None:
                segment.hand_on(record, {})
            return out
        # Feature methods call this within no_grad; from here on a gradient is wanted. Leaving their
        # no_grad block restores the mode.
        torch.set_grad_enabled(True)
        segment.leaf = out.detach().clone().requires_grad_()
        if record is not None:
            for layer in range(first, last + 1):
                z = own[f"blocks.{layer}.attn.heads"][:, :, :1]
                segment.heads[layer] = z.detach().clone().requires_grad_()
            segment.hand_on(record, segment.heads)
        return segment.leaf

    @staticmethod
    def _brought(edit: Edit | None, first: int, last: int) -> int:
        """How many extra tokens came into the sequence within these layers."""
        if edit is None or edit.first is None or not first <= edit.first <= last:
            return 0
        return edit.count

    def norm_rows(self, x: Tensor) -> Tensor:
        """As the tower's own; a spread that travels in the mean of the rows is held."""
        if not self.ablated_heads and id(x) not in self.spreads:
            normed: Tensor = self.ln_post(x)
            return normed
        spread = self.spreads.get(id(x), x.detach().mean(-1, keepdim=True))
        return (x - x.mean(-1, keepdim=True)) / spread * self.ln_post.weight + self.ln_post.bias


class HeldText(TextTower):
    """The text tower of a traced backbone: no gradient passes, for texts are taken as they are."""

    def run_layers(self, given: Stretch) -> Tensor:
        """As the tower's own, without gradient."""
        with torch.no_grad():
            return super().run_layers(given)


def traced(clip: Clip, segments: list[Segment]) -> tuple[Clip, TracedVision]:
    """The same backbone, which adds every run of its image tower to `segments`; and that tower."""
    other, visual = shared_copy(clip, type(clip)), TracedVision.on(clip.visual, segments)
    other.visual, other.text = visual, shared_copy(clip.text, HeldText)
    return other, visual
