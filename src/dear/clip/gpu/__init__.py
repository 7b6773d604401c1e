"""The fast path on an NVIDIA GPU: Triton kernels, recorded inference, two streams. All have a plain twin.

This is the package's one entry point. The environment variable `DEAR_KERNELS=0` turns the kernels off: towers
then run PyTorch's operations on a GPU as on a CPU.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dear.clip.gpu.recorded import BUCKETS, Recorder, Recording, Runner, Tensors, run_eagerly
from dear.clip.gpu.streams import run_concurrently

if TYPE_CHECKING:
    from torch import Tensor

    from dear.clip.edit import Edit
    from dear.clip.tower import Tower

__all__ = [
    "BUCKETS",
    "Recorder",
    "Recording",
    "Runner",
    "Tensors",
    "run_by_kernels",
    "run_concurrently",
    "run_eagerly",
]


def run_by_kernels(
    tower: Tower, x: Tensor, first: int, last: int, edit: Edit | None, read: Tensor | None
) -> Tensor | None:
    """`Tower.run` by kernels; None if they are turned off or do not support the arguments."""
    if os.environ.get("DEAR_KERNELS") == "0":
        return None
    from dear.clip.gpu import tower as kernels  # here: it imports the tower, and Triton where that is used

    return kernels.run(tower, x, first, last, edit, read) if kernels.is_supported(tower, x, edit) else None
