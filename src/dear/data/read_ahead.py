"""Images of the next batches are read while the present one is computed with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from dear.data.images import FileImages, ImageSet, ListedImages, Wrapped, source_of
from dear.images.views import Size, read_views

Images = TypeVar("Images")
# Batches that are begun before they are asked for. On a GPU files of one are read while another is decoded.
_DEPTH, _GPU_DEPTH = 1, 2


@contextmanager
def read_ahead(images: Images, device: torch.device | None = None) -> Iterator[Images]:
    """A set that will be walked in order, a batch at a time: files are read before they are asked for.

    Views of files lie on `device`, if that is a GPU; see `dear.images.views.read_views`.
    """
    if not isinstance(images, FileImages | ListedImages):
        yield images
        return
    device = None if device is None or device.type == "cpu" else device
    depth = _DEPTH if device is None else _GPU_DEPTH
    reader = ThreadPoolExecutor(depth, thread_name_prefix="dear-read-ahead")
    try:
        yield cast(Images, _Ahead(images, reader, depth, device))
    finally:
        reader.shutdown(wait=True, cancel_futures=True)


class _Ahead(Wrapped):
    """`images`, whose `pixels` of some places starts to read the next batches: as many as the most so far."""

    def __init__(
        self,
        images: FileImages | ListedImages,
        reader: ThreadPoolExecutor,
        depth: int,
        device: torch.device | None,
    ) -> None:
        self.images, self._reader, self._depth, self._device = images, reader, depth, device
        self._begun: dict[tuple[range, Size], Future[Tensor]] = {}
        self._most = 0

    def __getattr__(self, name: str) -> Any:  # what only some sets have, such as `paths`
        return getattr(self.images, name)

    def subset(self, indices: Sequence[int]) -> ImageSet:
        """The same images without reading ahead."""
        return self.images.subset(indices)

    def select_classes(self, names: Sequence[str]) -> ImageSet:
        """The same images without reading ahead."""
        return self.images.select_classes(names)

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        wanted = [int(index) for index in indices]
        self._most = max(self._most, len(wanted))
        ready = self._begun.pop((_span(wanted), size), None)
        if len(wanted) > 1:
            self._begin_after(wanted[-1] + 1, size)
        batch_pixels = self._read(wanted, size) if ready is None else ready.result()
        if batch_pixels.is_cuda:  # it was made on another stream than it is used on
            batch_pixels.record_stream(torch.cuda.current_stream(batch_pixels.device))
        return batch_pixels

    def _begin_after(self, start: int, size: Size) -> None:
        """Have the batches read that come next; what was begun and is not among them is forgotten."""
        begun, self._begun = self._begun, {}
        for first in range(start, min(start + self._depth * self._most, len(self)), self._most):
            batch = range(first, min(first + self._most, len(self)))
            pending = begun.pop((batch, size), None)
            self._begun[batch, size] = pending or self._reader.submit(self._read, batch, size)
        for late in begun.values():
            late.cancel()

    def _read(self, wanted: Sequence[int], size: Size) -> Tensor:
        if self._device is None or type(self.images).pixels not in (FileImages.pixels, ListedImages.pixels):
            return self.images.pixels(wanted, size)  # by the CPU, or in a way of its own
        return read_views([source_of(self.images, index) for index in wanted], size, self._device)


def _span(places: Sequence[int]) -> range:
    """The range of places that follow one another; an empty one for others."""
    span = range(places[0], places[-1] + 1) if places else range(0)
    return span if list(span) == list(places) else range(0)
