"""Where the frozen part of the image tower ends for a method and what it gives there; batches and losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from dear.clip.model import Clip


@dataclass(frozen=True)
class Loss:
    """What is minimized, and its named parts (unweighted, for the log)."""

    total: Tensor  #: scalar
    parts: Mapping[str, Tensor]  #: name -> scalar, detached


class Batch(NamedTuple):
    """Normalized pixels [B, 3, S, S], labels [B] and, where the dataset has them, domain numbers [B]."""

    pixels: Tensor
    labels: Tensor
    domains: Tensor | None = None


class FeatureBatch(NamedTuple):
    """A batch whose frozen image features [B, E] are known already, in place of its pixels."""

    features: Tensor
    labels: Tensor
    domains: Tensor | None = None


Batches = Callable[[bool], Iterator[Batch | FeatureBatch]]  #: batches(augment) walks the training set once


def features_of(clip: Clip, batch: Batch | FeatureBatch) -> Tensor:
    """Frozen image features [B, E] of a batch: the known ones, or computed from its pixels."""
    return batch.features if isinstance(batch, FeatureBatch) else clip.encode_image(batch.pixels)


Frozen = tuple[Tensor, ...]  #: what the frozen backbone gives of a batch: tensors [B, ...]
Cut = int | Literal["pixels", "pooled", "feature"]
"""Where the frozen part of the image tower ends: before anything ("pixels" [B, 3, S, S]), at the input of a
layer (its number, from 1; [B, N, D]), at the pooled vector before the projection ("pooled" [B, D]), or at the
image feature ("feature" [B, E])."""


def frozen_input(clip: Clip, cut: Cut, pixels: Tensor) -> Tensor:
    """What the frozen image tower gives at the cut, for pixels [B, 3, S, S]."""
    visual = clip.visual
    if isinstance(cut, int):
        return visual.prefix(pixels, cut)
    if cut == "pooled":
        return visual.pooled_image(pixels)
    return clip.encode_image(pixels) if cut == "feature" else pixels


def frozen_feature(clip: Clip, cut: Cut, found: Tensor) -> Tensor:
    """The frozen image feature [B, E], not of unit length, from what the tower gives at the cut."""
    if isinstance(cut, int):
        return clip.visual.frozen_features(found, cut)
    if cut == "pooled":
        return clip.visual.correct(clip.visual.into_space(found))
    return found if cut == "feature" else clip.encode_image(found)
