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
from dear.methods.base import Method
from dear.methods.frozen import Batches, Frozen, features_of
from dear.methods.options import Options, Positive
from dear.methods.tensors import unit


@dataclass(frozen=True)
class FocusConfig(Options):
    """Options of every method that can learn with a focus."""

    focus: tuple[tuple[int, int], ...] = ()  #: (layer, head) pairs to focus on; none: the whole feature alone
    focus_weight: Positive = 1.0  #: of these heads relative to the whole feature


class FeatureReader(nn.Module):
    """Frozen image features as a method learns from them: rows [..., W], W = E or, with a focus, 2 E."""

    mean: Tensor | None

    def __init__(self, method: Method) -> None:
        super().__init__()
        clip, self.focus = method.clip, method.focus
        self.width = clip.config.embed_dim * (2 if self.focus else 1)
        self.weight = method.config.focus_weight
        wide = torch.float64 if clip.dtype == torch.float64 else torch.float32
        mean = torch.zeros(self.width, device=clip.device, dtype=wide) if self.focus else None
        self.register_buffer("mean", mean)  # no tensor of the run without a focus

    @torch.no_grad()
    def fit(self, clip: Clip, batches: Batches) -> None:
        """Compute the mean over the training images, which a focus subtracts."""
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
        """Unit rows [..., W] of a frozen stage at the image feature."""
        if self.mean is None:
            return unit(frozen.x)
        assert frozen.focus is not None
        features, terms = (part.to(self.mean.dtype) for part in (frozen.x, frozen.focus))
        return focused_feature(features, terms, self.mean, self.weight)


@torch.no_grad()
def training_features(
    clip: Clip, reader: FeatureReader, batches: Batches, views: int, mean: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """What a method learns from: rows of `reader` [n, W], unit image features [n, E] and labels [n].

    Args:
        clip: the backbone.
        reader: is fitted first.
        batches: iterates over the training set, every time in the same order.
        views: random views per image; 0: the whole image once.
        mean: average the views of each image, to unit length again; else each counts as an image.
    """
    reader.fit(clip, batches)
    rows, images, labels = list[Tensor](), list[Tensor](), list[Tensor]()
    for _ in range(max(1, views)):
        walk = list(batches(views > 0))
        parts = [features_of(clip, batch, reader.focus) for batch in walk]
        features = torch.cat([part.x for part in parts])  # [n, E]
        terms = [part.focus for part in parts if part.focus is not None]
        view = reader(Frozen(features, focus=torch.cat(terms) if terms else None))  # [n, W]
        if mean and rows:
            rows[0], images[0] = rows[0] + view, images[0] + unit(features)
        else:
            rows.append(view)
            images.append(unit(features))
            labels.append(torch.cat([batch.labels for batch in walk]).to(features.device))
    if mean:
        return unit(rows[0]), unit(images[0]), labels[0]
    return torch.cat(rows), torch.cat(images), torch.cat(labels)
