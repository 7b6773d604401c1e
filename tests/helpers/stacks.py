"""Adapters answered in one batch, and each alone."""

from __future__ import annotations

import torch
from tiny import SMALL, images, mixed_roles, tiny_clip

from dear.methods import Batch, DeAR, Method, build_method

LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


def adapters(name: str, clip, count: int = 3) -> list[Method]:
    """Adapters of one method that differ in what they learned and in their number of classes."""
    found = []
    for number in range(count):
        names = ("red cat", "dog", "very old newt", "sea")[: 3 + number % 2]
        method = build_method(name, clip, names, roles=mixed_roles(), seed=number, **SMALL.get(name, {}))
        method.prepare(lambda augment: iter([Batch(images(6), LABELS)]))
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for p in method.parameters():
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.1)
        found.append(method)
    return found


def dear_adapters(count: int = 4, clip=None, **options) -> list[DeAR]:
    """Adapters that differ in what they learned and in their number of classes."""
    clip = clip or tiny_clip()
    found = []
    for number in range(count):
        names = ("red cat", "dog", "very old newt", "sea", "tree")[: 2 + number % 4]
        model = build_method("dear", clip, names, roles=mixed_roles(), seed=number, **options)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for p in (*model.parameters(), *model.buffers()):
                p.add_((torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3).to(p.device))
        found.append(model)
    return found


def alone(methods, pixels) -> list[torch.Tensor]:
    return [method.logits(image[None])[0] for method, image in zip(methods, pixels, strict=True)]
