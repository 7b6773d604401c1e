"""Resumable discovery: moments are saved beside the result while the images are read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from dear._io.files import read_safetensors, require_finite, write_safetensors
from dear._io.image_file import Size
from dear.clip.model import Clip
from dear.errors import DearError
from dear.heads.moments import Moments

EVERY = 10  #: batches between two saves


@runtime_checkable
class NamedImages(Protocol):
    """An image set with a name per image: discovery can check that it resumes on the same images."""

    def __len__(self) -> int:
        """Number of images."""

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        """uint8 [b, 3, size, size]."""

    def key(self, index: int) -> str:
        """An image's name."""

    def subset(self, indices: Sequence[int]) -> NamedImages:
        """Some of the images."""


class Kept:
    """Moments on disk, with a key of the computation that they belong to.

    Args:
        path: the file.
        clip: the backbone.
        images: what is read; names and order are part of the computation, since sums depend on the order.
        layers: whose heads are measured.
        batch_size: images at once; part of it for the same reason.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        clip: Clip,
        images: NamedImages,
        layers: tuple[int, ...],
        batch_size: int,
    ) -> None:
        self.path = Path(path)
        self.images = len(images)
        names = hashlib.sha256()
        for index in range(len(images)):
            names.update(f"{images.key(index)}\n".encode("utf-8", "surrogatepass"))
        about = [clip.fingerprint, clip.device.type, str(clip.dtype), layers, batch_size, names.hexdigest()]
        self.key = hashlib.sha256(json.dumps(about).encode()).hexdigest()

    def restore(self, moments: Moments) -> int:
        """Load what an interrupted run of the same computation saved; returns how many images it has read."""
        try:
            tensors, words = read_safetensors(self.path, "kept moments")
            key, count = words["dear"].split()
            require_finite(tensors, str(self.path))
        except (DearError, KeyError, ValueError):  # none, or damaged: the images are read again
            return 0
        if key != self.key or not count.isdecimal() or len(count) > 12 or int(count) > self.images:
            return 0
        return int(count) if moments.take(tensors, int(count)) else 0

    def save(self, moments: Moments) -> None:
        """Keep the moments of the images seen so far."""
        write_safetensors(self.path, moments.tensors(), {"dear": f"{self.key} {moments.count}"})

    def remove(self) -> None:
        """Delete the file; the computation is done."""
        self.path.unlink(missing_ok=True)


def resume_path(out: str | os.PathLike[str]) -> Path:
    """Where moments are kept for a role map that goes to `out`."""
    return Path(out).with_name(f".{Path(out).name}.resume.safetensors")
