"""What methods that learn from the frozen image feature read of it: the feature, or one with a focus.

With a focus on some heads, a linear layer, a kernel or a cache reads the focused feature (method page,
section 2d), while the zero-shot part of a method reads the image feature, which texts can be compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dear.clip.model import Clip
from dear.heads.focus import focused_feature
from dear.methods.base import Batches, features_of, unit
from dear.methods.options import Options, Positive


@dataclass(frozen=True)
class FocusConfig(Options):
    """Options of every method that can learn with a focus."""

    focus: tuple[tuple[int, int], ...] = ()  #: (layer, head) pairs to focus on; none: the whole feature alone
    focus_weight: Positive = 1.0  #: of these heads beside the whole feature


class FeatureReader(nn.Module):
    """Reads frozen image features [..., W], W = E or, with a focus, 2 E."""

    mean: Tensor | None

    def __init__(self, clip: Clip, config: FocusConfig) -> None:
        super().__init__()
        self.width = clip.feature_width
        self.weight = config.focus_weight
        self._feature_width = clip.config.embed_dim
        wide = torch.float64 if clip.dtype == torch.float64 else torch.float32
        mean = torch.zeros(self.width, device=clip.device, dtype=wide) if config.focus else None
        self.register_buffer("mean", mean)  # no tensor of the run without a focus

    @torch.no_grad()
    def fit(self, clip: Clip, batches: Batches) -> None:
        """Take the mean over the training images, which a focus subtracts."""
        if self.mean is None:
            return
        total, count = torch.zeros_like(self.mean), 0
        for batch in batches(False):
            features = features_of(clip, batch)
            total, count = total + features.to(total).sum(dim=0), count + len(features)
        self.mean = total / max(1, count)

    def forward(self, features: Tensor) -> Tensor:
        """What is learned from: unit rows [..., W]."""
        if self.mean is None:
            return unit(features)
        return focused_feature(features.to(self.mean.dtype), self.mean, self.weight)

    def image(self, features: Tensor) -> Tensor:
        """The image feature at unit length, to be compared with texts, [..., E]."""
        return unit(features[..., : self._feature_width])


@torch.no_grad()
def training_features(
    clip: Clip, reader: FeatureReader, batches: Batches, views: int, mean: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """What a method learns from: rows of `reader` [n, W], unit image features [n, E] and labels [n].

    Args:
        clip: the backbone.
        reader: is fitted first.
        batches: walks the training set; every walk meets the images in the same order.
        views: random views per image; 0: the whole image once.
        mean: average the views of each image, to unit length again; else each counts as an image.
    """
    reader.fit(clip, batches)
    rows, images, labels = list[Tensor](), list[Tensor](), list[Tensor]()
    for _ in range(max(1, views)):
        walk = list(batches(views > 0))
        features = torch.cat([features_of(clip, batch) for batch in walk])
        own = torch.cat([batch.labels for batch in walk]).to(features.device)
        if mean and rows:
            rows[0], images[0] = rows[0] + reader(features), images[0] + reader.image(features)
        else:
            rows.append(reader(features))
            images.append(reader.image(features))
            labels.append(own)
    if mean:
        return unit(rows[0]), unit(images[0]), labels[0]
    return torch.cat(rows), torch.cat(images), torch.cat(labels)
