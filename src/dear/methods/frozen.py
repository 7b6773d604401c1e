"""The frozen stage: the part of the image tower before a method's first change, and its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dear.clip.config import Head
from dear.clip.model import Clip

Cut = int | Literal["pixels", "pooled", "feature"]
"""Where the frozen part of the image tower ends: before anything ("pixels" [B, 3, S, S]), at the input of a
layer (its number, from 1; [B, N, D]), at the pooled vector before the projection ("pooled" [B, D]), or at the
image feature ("feature" [B, E])."""


class Frozen(NamedTuple):
    """Outputs of the frozen backbone that a method reads; those it does not read are None."""

    x: Tensor  #: [B, ...], the output of the frozen part of the tower; `Cut` lists the shapes
    class_token: Tensor | None = None  #: [B, 1, D], at the input of layer `Method.class_token_at`
    focus: Tensor | None = None  #: [B, E], the sum of the terms of the heads `Method.focus`
    feature: Tensor | None = None  #: [B, E], the image feature; at length 1 for `loss_from_frozen`

    def map(self, function: Callable[[Tensor], Tensor]) -> Frozen:
        """A copy with `function` applied to every part that is not None.

        >>> Frozen(torch.zeros(4, 2)).map(lambda part: part[:3]).x.shape
        torch.Size([3, 2])
        """
        return Frozen._make(None if part is None else function(part) for part in self)

    def rows(self, places: Sequence[int] | Tensor) -> Frozen:
        """The stage of the images at the indices `places`."""
        return self.map(lambda part: part[places])

    def split(self, counts: Sequence[int]) -> list[Frozen]:
        """The batch split into stages of `counts` images each."""
        columns = [[None] * len(counts) if part is None else part.split(list(counts)) for part in self]
        return [Frozen._make(parts) for parts in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Loss:
    """The loss to minimize, and its named terms (unweighted, for the log)."""

    total: Tensor  #: scalar
    parts: Mapping[str, Tensor]  #: name -> scalar, detached


class Batch(NamedTuple):
    """Normalized pixels [B, 3, S, S], labels [B] and, where the dataset has them, domain numbers [B]."""

    pixels: Tensor
    labels: Tensor
    domains: Tensor | None = None
    units: Tensor | None = None  #: [B], copies of an image have the same; None: not searched


class FeatureBatch(NamedTuple):
    """A batch with precomputed frozen image features instead of pixels."""

    features: Tensor  #: [B, E]
    labels: Tensor  #: [B]
    domains: Tensor | None = None  #: [B]
    focus: Tensor | None = None  #: [B, E], for a method with a focus: see `Frozen`
    units: Tensor | None = None  #: [B], as in `Batch`


Batches = Callable[[bool], Iterator[Batch | FeatureBatch]]  #: batches(augment) iterates over the training set


def features_of(clip: Clip, batch: Batch | FeatureBatch, focus: Sequence[Head] = ()) -> Frozen:
    """Frozen image features `x` [B, E] of a batch and, with a focus, the sum of its heads' terms [B, E]."""
    if isinstance(batch, FeatureBatch):
        return Frozen(batch.features, focus=batch.focus)
    return encode_with_focus(clip, batch.pixels.to(clip.device), focus)


@torch.no_grad()
def encode_with_focus(clip: Clip, pixels: Tensor, focus: Sequence[Head]) -> Frozen:
    """Image features `x` [B, E] of pixels [B, 3, S, S] and, with a focus, the sum of its heads' terms."""
    if not focus:
        return Frozen(clip.encode_image(pixels))
    visual = clip.visual
    features, (terms,) = visual.features_and_terms(visual.embed(pixels), 1, (focus,))
    return Frozen(features, focus=terms)


def frozen_input(clip: Clip, cut: Cut, pixels: Tensor) -> Tensor:
    """Output of the frozen image tower at the cut, for pixels [B, 3, S, S]."""
    visual = clip.visual
    if isinstance(cut, int):
        return visual.prefix(pixels, cut)
    if cut == "pooled":
        return visual.pooled_image(pixels)
    return clip.encode_image(pixels) if cut == "feature" else pixels


def frozen_feature(clip: Clip, cut: Cut, x: Tensor) -> Tensor:
    """The unnormalized frozen image feature [B, E] from the output `x` of the tower at the cut."""
    if isinstance(cut, int):
        return clip.visual.frozen_features(x, cut)
    if cut == "pooled":
        return clip.visual.correct(clip.visual.project_pooled(x))
    return x if cut == "feature" else clip.encode_image(x)
