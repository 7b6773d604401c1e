"""What the frozen and the adapted image pass share: the layers before the first change, run once."""

from __future__ import annotations

import torch
from torch import Tensor

from dear.clip.edit import Edit
from dear.clip.model import Clip


def image_prefix(clip: Clip, pixels: Tensor, first: int) -> Tensor:
    """Layers before `first` without gradient: [B, 3, S, S] -> [B, N, D]."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and pixels.requires_grad):
        return clip.visual.run(clip.visual.embed(pixels), last=first - 1)


def frozen_features(clip: Clip, prefix: Tensor, first: int) -> Tensor:
    """Frozen image features [B, E] from the shared prefix."""
    with torch.no_grad():
        read = torch.zeros(1, dtype=torch.long, device=prefix.device)
        return clip.visual.project(clip.visual.run(prefix, first=first, read=read)[:, 0])


def class_and_tokens(clip: Clip, prefix: Tensor, first: int, edit: Edit) -> tuple[Tensor, Tensor]:
    """The last layer's class token [B, D] and extra tokens [B, T, D] under `edit`, both normed."""
    end = prefix.shape[1]
    own = torch.zeros(1, dtype=torch.long, device=prefix.device)
    read = torch.cat([own, torch.arange(end, end + edit.count, device=prefix.device)])
    x = clip.visual.ln_post(clip.visual.run(prefix, first=first, edit=edit, read=read))  # [B, 1 + T, D]
    return x[:, 0], x[:, 1:]
