"""Reads images of the next batches while the current one is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from dear.data.content import source_of
from dear.data.images import FileImages, ImageSet, ImageSetWrapper, ListedImages
from dear.images.views import Size, read_views

Images = TypeVar("Images")
# Batches that are read in advance. For a GPU, files of one are read while another is decoded.
_DEPTH, _GPU_DEPTH = 1, 2


@contextmanager
def read_ahead(images: Images, device: torch.device | None = None) -> Iterator[Images]:
    """A set that is read in order, a batch at a time: files of the next batches are read in advance.

    Views of files are on `device`, if that is a GPU; see `dear.images.views.read_views`.
    """
    if not isinstance(images, FileImages | ListedImages):
        yield images
        return
    device = None if device is None or device.type == "cpu" else device
    depth = _DEPTH if device is None else _GPU_DEPTH
    reader = ThreadPoolExecutor(depth, thread_name_prefix="dear-read-ahead")
    try:
        yield cast(Images, _ReadAhead(images, reader, depth, device))
    finally:
        reader.shutdown(wait=True, cancel_futures=True)


class _ReadAhead(ImageSetWrapper):
    """`images`, whose `pixels` also starts to read the next batches, of the largest size so far."""

    def __init__(
        self,
        images: FileImages | ListedImages,
        reader: ThreadPoolExecutor,
        depth: int,
        device: torch.device | None,
    ) -> None:
        self.images, self._reader, self._depth, self._device = images, reader, depth, device
        self._pending: dict[tuple[range, Size], Future[Tensor]] = {}
        self._batch = 0

    def __getattr__(self, name: str) -> Any:  # attributes that only some sets have, such as `paths`
        return getattr(self.images, name)

    def subset(self, indices: Sequence[int]) -> ImageSet:
        """The same images without reading ahead."""
        return self.images.subset(indices)

    def select_classes(self, names: Sequence[str]) -> ImageSet:
        """The same images without reading ahead."""
        return self.images.select_classes(names)

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        rows = [int(index) for index in indices]
        self._batch = max(self._batch, len(rows))
        ready = self._pending.pop((_as_range(rows), size), None)
        if len(rows) > 1:
            self._start_after(rows[-1] + 1, size)
        batch_pixels = self._read(rows, size) if ready is None else ready.result()
        if batch_pixels.is_cuda:  # it was created on another stream
            batch_pixels.record_stream(torch.cuda.current_stream(batch_pixels.device))
        return batch_pixels

    def _start_after(self, start: int, size: Size) -> None:
        """Start to read the next batches, and cancel others that were started."""
        previous, self._pending = self._pending, {}
        for first in range(start, min(start + self._depth * self._batch, len(self)), self._batch):
            batch = range(first, min(first + self._batch, len(self)))
            future = previous.pop((batch, size), None)
            self._pending[batch, size] = future or self._reader.submit(self._read, batch, size)
        for future in previous.values():
            future.cancel()

    def _read(self, rows: Sequence[int], size: Size) -> Tensor:
        if self._device is None or type(self.images).pixels not in (FileImages.pixels, ListedImages.pixels):
            return self.images.pixels(rows, size)  # by the CPU, or by a subclass
        return read_views([source_of(self.images, index) for index in rows], size, self._device)


def _as_range(indices: Sequence[int]) -> range:
    """Consecutive indices as a range; an empty range for others."""
    span = range(indices[0], indices[-1] + 1) if indices else range(0)
    return span if list(span) == list(indices) else range(0)
