"""A service over a few small runs."""

from __future__ import annotations

import asyncio
import io
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "methods"))

from tiny import Colors, mixed_roles, tiny_clip

from dear.methods import build_method
from dear.runs.recipe import Recipe
from dear.serve.app import make_app
from dear.serve.decode import Upload
from dear.serve.errors import Refused
from dear.serve.service import Service
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


@pytest.fixture(scope="session")
def made_runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for number, (name, method) in enumerate(RUNS.items()):
        make_run(folder / name, method, seed=number + 1)
    return folder


@pytest.fixture
def runs(made_runs, tmp_path) -> Path:
    shutil.copytree(made_runs, tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture(scope="session")
def shared(made_runs) -> Iterator[TestClient]:
    """A client of one service, for all tests that change neither its runs nor its settings."""
    settings = replace(QUICK, poll_seconds=60)
    with TestClient(make_app(Service(made_runs, tiny_clip(dtype=torch.float32), settings))) as client:
        yield client


def image_bytes(seed: int = 0, size: int = 40, kind: str = "PNG") -> bytes:
    pixels = torch.randint(0, 256, (size, size, 3), generator=torch.Generator().manual_seed(seed))
    file = io.BytesIO()
    Image.fromarray(pixels.to(torch.uint8).numpy()).save(file, kind)
    return file.getvalue()


def decoded(decoder, content: bytes, name: str = "a") -> torch.Tensor:
    """One image through the decoder; refusals are raised."""
    (found,) = asyncio.run(decoder.decode([Upload(name, content)]))
    if isinstance(found, Refused):
        raise found
    return found
