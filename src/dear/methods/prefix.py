"""What the frozen and the adapted image pass share: the layers before the first change, run once."""

from __future__ import annotations

import torch
from torch import Tensor

from dear.clip.edit import Edit
from dear.clip.model import Clip
from dear.clip.tower import Record


def image_prefix(clip: Clip, pixels: Tensor, first: int = 1) -> Tensor:
    """The input of layer `first`, [B, N, D], for pixels [B, 3, S, S]; 1: the embedded patches.

    Without gradient, unless the pixels themselves ask for one.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
        return clip.visual.run(clip.visual.embed(pixels), last=first - 1)


def class_feature(
    clip: Clip, prefix: Tensor, first: int = 1, edit: Edit | None = None, record: Record | None = None
) -> Tensor:
    """Feature [B, E] of the class token from the input of layer `first`, [B, N, D], under `edit`."""
    read = torch.zeros(1, dtype=torch.long, device=prefix.device)
    return clip.visual.project(
        clip.visual.run(prefix, first=first, edit=edit, read=read, record=record)[:, 0]
    )


def frozen_features(clip: Clip, prefix: Tensor, first: int = 1) -> Tensor:
    """Frozen image features [B, E] from the shared prefix."""
    with torch.no_grad():
        return class_feature(clip, prefix, first)


def class_and_tokens(clip: Clip, prefix: Tensor, first: int, edit: Edit) -> tuple[Tensor, Tensor]:
    """The last layer's class token [B, D] and extra tokens [B, T, D] under `edit`, both normed."""
    end = prefix.shape[1]
    own = torch.zeros(1, dtype=torch.long, device=prefix.device)
    read = torch.cat([own, torch.arange(end, end + edit.count, device=prefix.device)])
    x = clip.visual.norm_rows(clip.visual.run(prefix, first=first, edit=edit, read=read))  # [B, 1 + T, D]
    return x[:, 0], x[:, 1:]


@torch.no_grad()
def class_token(clip: Clip, pixels: Tensor) -> Tensor:
    """The frozen class token after the last norm and before the projection, [B, D]."""
    read = torch.zeros(1, dtype=torch.long, device=clip.device)
    rows = clip.visual.run(clip.visual.embed(pixels), read=read)[:, 0]
    normed: Tensor = clip.visual.ln_post(rows)
    return normed
