"""Threads and batch sizes of an answer on a CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dear.clip.model import Clip
from dear.heads.roles import RoleMap
from measure.serving import make_adapters


def thread_rows(
    clip: Clip, roles: RoleMap | None, batches: Sequence[int], threads: Sequence[int], repeats: int
) -> Iterator[dict[str, Any]]:
    """Milliseconds of a DeAR adapter's answer for 100 classes, thread counts taking turns."""
    (method,) = make_adapters(clip, 1, 100, roles)
    size, before = clip.config.vision.image_size, torch.get_num_threads()
    for batch in batches:
        pixels = torch.randn(batch, 3, size, size)
        seconds: dict[int, list[float]] = {count: [] for count in threads}
        for repeat in range(repeats + 2):
            for count in threads:
                torch.set_num_threads(count)
                began = time.perf_counter()
                method.logits(pixels)
                if repeat >= 2:
                    seconds[count].append(time.perf_counter() - began)
        for count, found in seconds.items():
            middle = sorted(found)[len(found) // 2]
            yield {
                "backbone": clip.name,
                "batch": batch,
                "threads": count,
                "ms": round(1000 * middle, 2),
                "ms_per_image": round(1000 * middle / batch, 2),
            }
    torch.set_num_threads(before)
