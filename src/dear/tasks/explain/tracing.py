"""A backbone that records the runs of its image tower, and a mode in which norms are constants.

`dear.tasks.explain.parts` decomposes scores with the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dear.clip.config import Head
from dear.clip.edit import Edit, Record
from dear.clip.model import Clip
from dear.clip.rows import Rows, spread_of
from dear.clip.sharing import replace
from dear.clip.tower import LayerNorm, LayerRange
from dear.clip.towers import TextTower, VisionTower
from dear.errors import UsageError

_NONLINEAR = (
    torch.exp, Tensor.exp, torch.softmax, Tensor.softmax, F.softmax, torch.sigmoid, Tensor.sigmoid,
    torch.tanh, Tensor.tanh, F.gelu, F.silu, torch.log, Tensor.log, torch.logsumexp,
    Tensor.logsumexp,
)  # fmt: skip
_SPREAD = (torch.var, Tensor.var)
_GATED = (torch.relu, Tensor.relu, F.relu)


class ConstantNorms(TorchFunctionMode):
    """Treat norms and standard deviations as constants of a gradient, so that normalization is linear."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []  #: of other nonlinear functions, also constant

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
    """One run of the image tower: its input, what happened inside, and its output."""

    first: int
    last: int
    x: Tensor
    edit: Edit | None
    record: Record
    positions: tuple[int, ...]  #: positions in the sequence of the rows of the output
    out: Tensor  #: [B, R, D]
    final: Rows | None = None  #: for the last layer: the rows, as the starting point of a gradient
    #: by layer: heads' outputs of the class token [B, H, 1, d] that a caller recorded, likewise
    heads: dict[int, Tensor] = field(default_factory=dict)

    def fill(self, record: Record, heads: Mapping[int, Tensor]) -> None:
        """Fill a caller's record; `heads` are outputs [B, H, 1, d] that replace those of some layers."""
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
    """The result of a run that is replayed, with changes, instead of computed."""

    segment: Segment
    rows: Rows
    heads: Mapping[int, Tensor]  #: by layer, for the caller's record


class TracedVision(VisionTower):
    """The image tower of a traced backbone: every run is added to `segments`.

    Methods read the frozen tower without gradient. Everything from the last layer's rows on is differentiated
    nevertheless: those functions enable gradients for themselves, so the caller's mode is never changed.
    """

    segments: list[Segment]
    script: Iterator[Scripted] | None  #: results to replay instead of running

    def run_layers(self, layers: LayerRange) -> Tensor:
        """As the base's, and recorded where the layers ends before the last layer."""
        if layers.last == self.config.layers:
            return super().run_layers(layers)  # of `final_rows`
        if self.script is not None:
            scripted = next(self.script)
            if layers.record is not None:
                scripted.segment.fill(layers.record, scripted.heads)
            return scripted.rows.x
        record = Record(slice(None), pattern=True)
        with torch.no_grad():
            out = super().run_layers(layers._replace(x=layers.x.detach(), record=record))
        segment = self._segment(layers, record, out)
        if layers.record is not None:
            segment.fill(layers.record, {})
        return out

    def run_to_rows(self, layers: LayerRange) -> Rows:
        """As the base's, recorded; the rows, and heads' outputs that the caller records, begin a gradient."""
        if self.script is not None:
            scripted = next(self.script)
            if layers.record is not None:
                scripted.segment.fill(layers.record, scripted.heads)
            return scripted.rows
        record = Record(slice(None), pattern=True)
        with torch.no_grad():
            rows = super().run_to_rows(layers._replace(x=layers.x.detach(), record=record))
            spread = spread_of(rows.x, self.ln_post.eps)
        segment = self._segment(layers, record, rows.x)
        segment.final = Rows(rows.x.clone().requires_grad_(), rows.removed, spread)
        if layers.record is not None:
            for layer in range(layers.first, layers.last + 1):
                z = record[f"blocks.{layer}.attn.heads"][:, :, :1]
                segment.heads[layer] = z.clone().requires_grad_()
            segment.fill(layers.record, segment.heads)
        return segment.final

    def _segment(self, layers: LayerRange, record: Record, out: Tensor) -> Segment:
        x, first, last, edit, read, _ = layers
        length = x.shape[1]
        if edit is not None and edit.first is not None and first <= edit.first <= last:
            length += edit.count  # extra tokens entered within these layers
        positions = range(length) if read is None else read.tolist()
        segment = Segment(first, last, x.detach(), edit, record, tuple(positions), out)
        self.segments.append(segment)
        return segment

    @torch.enable_grad()
    def pooled(self, rows: Rows, extra: int = 0) -> Tensor:
        """As the base's, with gradient."""
        return super().pooled(rows, extra)

    @torch.enable_grad()
    def image_vector(self, rows: Rows) -> Tensor:
        """As the base's, with gradient."""
        return super().image_vector(rows)

    @torch.enable_grad()
    def features(self, rows: Rows) -> Tensor:
        """As the base's, with gradient."""
        return super().features(rows)

    @torch.enable_grad()
    def head_terms(self, rows: Rows, record: Record, groups: Sequence[Sequence[Head]]) -> list[Tensor]:
        """As the base's, with gradient."""
        return super().head_terms(rows, record, groups)


class ConstantText(TextTower):
    """The text tower of a traced backbone: texts are constants, so no gradient passes."""

    def run_layers(self, layers: LayerRange) -> Tensor:
        """As the base's, without gradient."""
        with torch.no_grad():
            return super().run_layers(layers)


def trace_backbone(clip: Clip, segments: list[Segment]) -> tuple[Clip, TracedVision, dict[str, Tensor]]:
    """The same backbone, which adds every run of its image tower to `segments`.

    Also returns that tower, and by name the biases behind the last layer as starting points of gradients.
    """
    tower, parts = clip.visual, dict[str, Any]()
    leaves = {"norm": _leaf(tower.ln_post.bias)}
    parts["ln_post"] = replace(tower.ln_post, LayerNorm, bias=leaves["norm"])
    if tower.proj_bias is not None:
        leaves["projection"] = parts["proj_bias"] = _leaf(tower.proj_bias)
    if tower.correction is not None:
        leaves["correction"] = _leaf(tower.correction.bias)
        leaves["correction of tokens"] = _leaf(tower.correction.pooled_bias)
        parts["correction"] = tower.correction._replace(
            bias=leaves["correction"], pooled_bias=leaves["correction of tokens"]
        )
    visual = replace(tower, TracedVision, segments=segments, script=None, **parts)
    other = replace(clip, type(clip), visual=visual, text=replace(clip.text, ConstantText), _plain=())
    return other, visual, leaves


def _leaf(bias: Tensor) -> Tensor:
    return bias.detach().clone().requires_grad_()
