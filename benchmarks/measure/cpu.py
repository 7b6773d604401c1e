"""Threads and batch sizes of an answer on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dear.clip.model import Clip
from dear.heads.roles import RoleMap
from measure.clock import medians
from measure.serving import make_adapters


def thread_rows(
    clip: Clip, roles: RoleMap | None, batches: Sequence[int], threads: Sequence[int], repeats: int
) -> Iterator[dict[str, Any]]:
    """Milliseconds of a DeAR adapter's answer for 100 classes, thread counts taking turns."""
    (adapter,) = make_adapters(clip, 1, 100, roles)
    method = adapter.method
    size, before = clip.config.vision.image_size, torch.get_num_threads()
    for batch in batches:
        pixels = torch.randn(batch, 3, size, size)

        def answer(count: int, pixels: Tensor = pixels) -> None:
            torch.set_num_threads(count)
            method.logits(pixels)

        found = medians({str(count): partial(answer, count) for count in threads}, repeats, warm_up=2)
        for count, middle in found.items():
            yield {
                "backbone": clip.name,
                "batch": batch,
                "threads": int(count),
                "ms": round(1000 * middle, 2),
                "ms_per_image": round(1000 * middle / batch, 2),
            }
    torch.set_num_threads(before)
