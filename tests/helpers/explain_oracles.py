"""Methods to explain, and their contributions computed the plain way."""

from __future__ import annotations

import torch
from tiny import images, mixed_roles, token_ids

from dear.clip import Clip
from dear.methods import Method, build_method
from dear.methods.frozen import FeatureBatch, encode_with_focus
from dear.tasks.explain.parts import Trace

NAMES = ("a cat", "a dog", "a tree")


def method_of(name: str, clip: Clip, **options: object) -> Method:
    method = build_method(name, clip, NAMES, ids=token_ids((20, 18, 19)), roles=mixed_roles(), **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # as if it had been trained
        for parameter in method.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise.to(parameter))
    stage = encode_with_focus(method.clip, images(6, dtype=clip.dtype, seed=7), method.focus)
    batch = FeatureBatch(stage.x, torch.arange(6) % 3, focus=stage.focus)
    method.prepare(lambda augment: iter([batch]))
    return method


def trace(method: Method, pixels: torch.Tensor, mode: str) -> Trace:
    return Trace(method.clip, lambda clip: method.bind(clip)(pixels)[mode])


def each_class(method: Method) -> torch.Tensor:
    return torch.eye(len(method.classes), dtype=torch.float64)
