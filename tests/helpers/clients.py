"""Clients of the service, and what a run answers alone."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from fastapi.testclient import TestClient
from serving import QUICK, image_bytes
from tiny import tiny_clip

from dear.data.images import ListedImages
from dear.images.open import open_image
from dear.images.views import normalize, resize_crop
from dear.runs.folder import load_run
from dear.serve.app import make_app
from dear.serve.keys import Keys
from dear.serve.service import Service
from dear.serve.settings import ServeSettings

OPEN_ONE, OPEN_ALL, MANAGE = "key-for-probe-0123", "key-for-everything-1", "key-to-manage-012345"


def file(seed: int = 0, **options) -> tuple[str, tuple[str, bytes]]:
    return "files", (f"{seed}.png", image_bytes(seed, **options))


def alone(run: Path, seeds: list[int]) -> torch.Tensor:
    """What the run says by itself: probabilities [n, C]."""
    method = load_run(run, tiny_clip(dtype=torch.float32))
    config = method.clip.config
    raw = torch.stack([resize_crop(open_image(image_bytes(s)), config.vision.image_size) for s in seeds])
    return method.logits(normalize(raw, config.mean, config.std)).softmax(-1)


def client_of(runs: Path, settings: ServeSettings = QUICK, keys: Keys | None = None) -> TestClient:
    return TestClient(make_app(Service(runs, tiny_clip(dtype=torch.float32), settings, keys=keys)))


def wait_for(condition, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def gallery(tmp_path: Path, count: int = 5) -> ListedImages:
    files = [tmp_path / f"{number}.png" for number in range(count)]
    for number, path in enumerate(files):
        path.write_bytes(image_bytes(number))
    return ListedImages(tuple(files), torch.zeros(count, dtype=torch.long), ("image",), name="stored")
