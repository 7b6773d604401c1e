"""Input of methods that learn from frozen features: the image feature, or a focused one.

With a focus on some heads, a linear layer, a kernel or a cache reads the focused feature
`[unit(z - mean z), w unit(c - mean c)]`, z the image feature and c the sum of the terms of these heads. The
zero-shot part of a method still reads z, which can be compared with texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dear.clip.model import Clip
from dear.data.folds import IntArray
from dear.heads.focus import focused_feature
from dear.methods.base import Method
from dear.methods.frozen import Batches, Frozen, features_of
from dear.methods.options import Options, Positive
from dear.methods.tensors import unit


@dataclass(frozen=True)
class FocusConfig(Options):
    """Options of all methods with `can_focus` that learn from frozen features."""

    #: (layer, head) pairs to focus on; empty: the image feature alone
    focus: tuple[tuple[int, int], ...] = ()
    focus_weight: Positive = 1.0  #: w, weight of these heads relative to the image feature


class FeatureReader(nn.Module):
    """Maps a frozen stage to the rows [..., W] that a method learns from; W is E or, with a focus, 2 E."""

    mean: Tensor | None

    def __init__(self, method: Method) -> None:
        super().__init__()
        clip, self.focus = method.clip, method.focus
        self.width = clip.config.embed_dim * (2 if self.focus else 1)
        self.weight = method.config.focus_weight
        dtype = torch.float64 if clip.dtype == torch.float64 else torch.float32
        mean = torch.zeros(self.width, device=clip.device, dtype=dtype) if self.focus else None
        self.register_buffer("mean", mean)  # [2 E]; None, and not saved, without a focus

    @torch.no_grad()
    def fit(self, clip: Clip, batches: Batches) -> None:
        """Set `mean` to the mean over the training images; without a focus nothing is computed."""
        if self.mean is None:
            return
        total, count = torch.zeros_like(self.mean), 0
        for batch in batches(False):
            frozen = features_of(clip, batch, self.focus)
            assert frozen.focus is not None
            sums = [part.to(total).sum(dim=0) for part in (frozen.x, frozen.focus)]  # [E] each
            total, count = total + torch.cat(sums), count + len(frozen.x)
        self.mean = total / max(1, count)

    def forward(self, frozen: Frozen) -> Tensor:
        """Unit rows [..., W] of a frozen stage whose `x` is the image feature."""
        if self.mean is None:
            return unit(frozen.x)
        assert frozen.focus is not None
        features, terms = (part.to(self.mean.dtype) for part in (frozen.x, frozen.focus))
        return focused_feature(features, terms, self.mean, self.weight)


class TrainingFeatures(NamedTuple):
    """Training data of a method that learns from frozen features."""

    rows: Tensor  #: of the reader, [n, W]
    images: Tensor  #: unit image features [n, E]
    labels: Tensor  #: [n]
    units: IntArray | None  #: [n], copies of an image have the same; None: not searched


@torch.no_grad()
def training_features(
    clip: Clip, reader: FeatureReader, batches: Batches, views: int, mean: bool = False
) -> TrainingFeatures:
    """Frozen features of the training images.

    Args:
        clip: the backbone.
        reader: its mean is fitted first.
        batches: iterates over the training set, always in the same order.
        views: number of random views per image; 0: the whole image, without augmentation.
        mean: average the views of each image and normalize; otherwise each view is a row.
    """
    reader.fit(clip, batches)
    rows, images, labels, units = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    for _ in range(max(1, views)):
        epoch = list(batches(views > 0))
        parts = [features_of(clip, batch, reader.focus) for batch in epoch]
        features = torch.cat([part.x for part in parts])  # [n, E]
        terms = [part.focus for part in parts if part.focus is not None]
        view = reader(Frozen(features, focus=torch.cat(terms) if terms else None))  # [n, W]
        if mean and rows:
            rows[0], images[0] = rows[0] + view, images[0] + unit(features)
        else:
            rows.append(view)
            images.append(unit(features))
            labels.append(torch.cat([batch.labels for batch in epoch]).to(features.device))
            units += [batch.units for batch in epoch if batch.units is not None]
    numbers = torch.cat(units).numpy() if units else None
    if mean:
        return TrainingFeatures(unit(rows[0]), unit(images[0]), labels[0], numbers)
    return TrainingFeatures(torch.cat(rows), torch.cat(images), torch.cat(labels), numbers)
