"""The service's decoder, queue and engine under load, without HTTP: JPEG files in, probabilities out."""

from __future__ import annotations

import asyncio
import copy
import io
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dear.clip.model import Clip
from dear.heads.roles import RoleMap
from dear.methods import DeAR
from dear.runs.model import Model
from dear.serve.batcher import Batcher
from dear.serve.decoding import Decoder, Decoding, Upload
from dear.serve.engine import Answerer, Engine, ImageJob
from measure.task import token_ids

try:
    import uvloop
except ImportError:
    uvloop = None


def jpegs(count: int, width: int = 500, height: int = 375, quality: int = 90) -> list[bytes]:
    """JPEG files that compress like photographs: smooth colors with some noise."""
    generator = np.random.default_rng(0)
    found = []
    for _ in range(count):
        coarse = generator.integers(0, 256, (8, 10, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
        noisy = smooth.astype(np.int16) + generator.integers(-12, 13, smooth.shape, dtype=np.int16)
        file = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=quality)
        found.append(file.getvalue())
    return found


def make_adapters(
    clip: Clip, count: int, classes: int, roles: RoleMap | None = None, until: float = math.inf
) -> list[Answerer]:
    """DeAR adapters that differ in every learned tensor and have texts of their own.

    Fewer than `count`, but not fewer than 64, where `time.monotonic()` is `until` before.
    """
    names = [f"class {number}" for number in range(classes)]
    ids = token_ids(clip.config, classes)
    base = DeAR(clip, names, roles=roles or RoleMap.table2(), ids=ids).in_precision("auto")
    shared = {id(one): one for one in (base.clip, clip, base.prompts, base.roles)}
    generator = torch.Generator(clip.device).manual_seed(0)
    found: list[Answerer] = []
    while len(found) < count and (len(found) < 64 or time.monotonic() < until):
        one = copy.deepcopy(base, dict(shared))
        with torch.no_grad():
            for p in one.parameters():
                p.add_(0.02 * torch.randn(p.shape, device=p.device, generator=generator))
        found.append(Answerer(Model(one)))
    return found


@dataclass(frozen=True)
class Load:
    """How requests come."""

    requests: int  #: one image each
    in_flight: int  #: requests that wait at once; a new one comes when one is answered
    seconds: float = math.inf  #: after which no further request comes


@dataclass(frozen=True)
class Batching:
    """How the service batches; as `ServeSettings`."""

    largest: int = 64
    wait: float = 0.004
    decoders: int = 4


def under_load(
    engine: Engine, adapters: Sequence[Answerer], files: Sequence[bytes], load: Load, batching: Batching
) -> dict[str, Any]:
    """Rate and waiting times of requests that go round over the adapters."""
    how = Decoding(engine.clip.config.view)
    decoder = Decoder(batching.decoders, how)
    sizes: list[int] = []
    batcher: Batcher[ImageJob, Any] = Batcher(
        engine.begin, batching.largest, batching.wait, 4 * load.in_flight + 64,
        observe=lambda images, _: sizes.append(images),
    )  # fmt: skip
    seconds: list[float] = []
    rankings = {adapter: adapter.ranking() for adapter in adapters}

    async def ask(number: int) -> None:
        began = time.perf_counter()
        content = files[number % len(files)]
        (pixels,) = await decoder.decode([Upload("a.jpg", content, decoder.decoding.cost(content))])
        assert isinstance(pixels, Tensor)
        adapter = adapters[number % len(adapters)]
        await batcher.compute([ImageJob(pixels, adapter, rankings[adapter])])
        seconds.append(time.perf_counter() - began)

    async def client(numbers: Any) -> None:
        for number in numbers:
            await ask(number)

    async def all_clients(requests: int) -> None:
        until = time.monotonic() + load.seconds
        numbers = itertools.takewhile(lambda _: time.monotonic() < until, range(requests))  # all take of it
        await asyncio.gather(*(client(numbers) for _ in range(load.in_flight)))

    run = uvloop.run if uvloop is not None else asyncio.run  # as uvicorn does
    run(all_clients(min(load.requests, 2 * load.in_flight + 2 * len(adapters))))  # warm
    seconds.clear()
    sizes.clear()
    began = time.perf_counter()
    run(all_clients(load.requests))
    wall = time.perf_counter() - began
    batcher.close()
    decoder.close()
    return {"images_per_s": round(len(seconds) / wall, 1), **waits(seconds),
            "mean_batch": round(sum(sizes) / max(1, len(sizes)), 1)}  # fmt: skip


def waits(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile in milliseconds."""
    ordered = sorted(seconds)
    at = {"p50_ms": 0.5, "p99_ms": 0.99}
    return {name: round(1000 * ordered[int(q * (len(ordered) - 1))], 1) for name, q in at.items()}


def batch_seconds(
    engine: Engine, groups: Sequence[Sequence[Answerer]], batch: int, repeats: int, most: float = math.inf
) -> list[float]:
    """Median seconds of the engine for a batch of decoded images, a group's adapters in turn.

    The groups take turns, so that a drift of the machine meets all of them. After `most` seconds one repeat
    is enough.
    """
    until = time.monotonic() + most
    size = engine.clip.config.vision.image_size
    images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8)
    found: list[list[float]] = [[] for _ in groups]
    for repeat in range(repeats + 3):
        if found[-1] and time.monotonic() > until:
            break
        for adapters, own in zip(groups, found, strict=True):
            start = repeat * batch
            jobs = [ImageJob(one, adapters[(start + row) % len(adapters)]) for row, one in enumerate(images)]
            engine.compute(jobs[:batch])  # texts of these adapters are kept from here on
            began = time.perf_counter()
            engine.compute(jobs)
            if repeat >= 3:
                own.append(time.perf_counter() - began)
    return [sorted(own)[len(own) // 2] for own in found]


def memory(device: torch.device) -> int:
    """Bytes in use: on the GPU, or of this process."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096
