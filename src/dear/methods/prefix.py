"""What the frozen and the adapted image pass share: the layers before the first change, run once."""

from __future__ import annotations

import torch
from torch import Tensor

from dear.clip.edit import Edit
from dear.clip.model import Clip
from dear.clip.tower import Record
from dear.errors import UsageError


def image_prefix(clip: Clip, pixels: Tensor, first: int = 1) -> Tensor:
    """The input of layer `first`, [B, N, D], for pixels [B, 3, S, S]; 1: the embedded patches.

    Without gradient, unless the pixels themselves ask for one.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
        return clip.visual.run(clip.visual.embed(pixels), last=first - 1)


def class_feature(
    clip: Clip, prefix: Tensor, first: int = 1, edit: Edit | None = None, record: Record | None = None
) -> Tensor:
    """The image feature [B, E] from the input of layer `first`, [B, N, D], under `edit`."""
    return clip.visual.features_from(prefix, first, edit, record)


def frozen_features(clip: Clip, prefix: Tensor, first: int = 1) -> Tensor:
    """Frozen image features [B, E] from the shared prefix."""
    with torch.no_grad():
        return class_feature(clip, prefix, first)


def class_and_tokens(clip: Clip, prefix: Tensor, first: int, edit: Edit) -> tuple[Tensor, Tensor]:
    """The pooled vectors of the image [B, D] and of the extra tokens [B, T, D] under `edit`.

    With a class token these are the last layer's rows, normed; see `VisionTower.pooled` for other towers.
    """
    visual = clip.visual
    x = visual.run(prefix, first=first, edit=edit, read=visual.read_rows(edit.count))
    pooled = visual.pooled(x, edit.count)  # [B, 1 + T, D]
    return pooled[:, 0], pooled[:, 1:]


@torch.no_grad()
def class_token(clip: Clip, pixels: Tensor) -> Tensor:
    """The frozen image vector after the last norm (and pooling) and before the projection, [B, D]."""
    visual = clip.visual
    return visual.pooled(visual.run(visual.embed(pixels), read=visual.read_rows()))[:, 0]


def need_class_token(clip: Clip, title: str) -> None:
    """Refuse a tower whose image feature is not one token's.

    Raises:
        UsageError: the tower pools its tokens by attention, or has no projection.
    """
    if clip.visual.pool is not None or clip.visual.proj is None:
        raise UsageError(
            f"{title} works on the class token and its projection, which {clip.name} does not have (it pools "
            "its tokens by attention); take a plain CLIP or another method"
        )
