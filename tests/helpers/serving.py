"""Small runs, images, and settings for tests of the service."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import torch
from PIL import Image
from tiny import Colors, mixed_roles, tiny_clip

from dear.methods import build_method
from dear.runs.recipe import Recipe
from dear.serve.decoding import Upload
from dear.serve.errors import Refused
from dear.serve.settings import Limits, ServeSettings
from dear.train.run import train

RUNS = {
    "probe": "linear-probe", "zero": "zeroshot", "coop": "coop", "vpt": "vpt",
    "roles": "dear", "other-roles": "dear",
}  # fmt: skip

#: a service that looks often at its folder; on a busy machine its decoders may take long to start
QUICK = ServeSettings(
    Limits(images=6, body_bytes=200_000, pixels=1_000_000, seconds=120), poll_seconds=0.05, decoders=1
)


def make_run(folder: Path, method: str, seed: int = 1, classes: int = 3, **options) -> Path:
    model = build_method(method, tiny_clip(dtype=torch.float32), ("red", "green", "blue")[:classes],
                         roles=mixed_roles(), seed=seed, **options)  # fmt: skip
    train(model, Colors(classes=classes), Recipe.of(model, epochs=2, batch=6, lr=1e-2, seed=seed), folder)
    return folder


def image_bytes(seed: int = 0, size: int = 40, kind: str = "PNG") -> bytes:
    pixels = torch.randint(0, 256, (size, size, 3), generator=torch.Generator().manual_seed(seed))
    file = io.BytesIO()
    Image.fromarray(pixels.to(torch.uint8).numpy()).save(file, kind)
    return file.getvalue()


def upload(decoder, content: bytes, name: str = "a") -> Upload:
    """A file as the service reads it from a request."""
    return Upload(name, content, decoder.decoding.cost(content))


def decoded(decoder, content: bytes, name: str = "a") -> torch.Tensor:
    """One image through the decoder; refusals are raised."""
    (result,) = asyncio.run(decoder.decode([upload(decoder, content, name)]))
    if isinstance(result, Refused):
        raise result
    return result
