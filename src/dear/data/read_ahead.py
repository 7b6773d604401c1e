"""Images of the next batch are read while those of the present one are computed with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor

from dear._io.image_file import Size
from dear.data.images import FileImages, ImageSet, ListedImages


@contextmanager
def read_ahead(images: ImageSet) -> Iterator[ImageSet]:
    """A set that will be walked in order, a batch at a time: files are read before they are asked for."""
    if not isinstance(images, FileImages | ListedImages):
        yield images
        return
    reader = ThreadPoolExecutor(1, thread_name_prefix="dear-read-ahead")
    try:
        yield cast(ImageSet, _Ahead(images, reader))
    finally:
        reader.shutdown(wait=True, cancel_futures=True)


class _Ahead:
    """`images`, whose `pixels` of some places starts to read as many places after them."""

    def __init__(self, images: FileImages | ListedImages, reader: ThreadPoolExecutor) -> None:
        self._images, self._reader = images, reader
        self._next: tuple[list[int], Size, Future[Tensor]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._images, name)

    def __len__(self) -> int:
        return len(self._images)

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        wanted, ready = [int(index) for index in indices], self._next
        if len(wanted) > 1:
            after = list(range(wanted[-1] + 1, min(wanted[-1] + 1 + len(wanted), len(self))))
            self._next = (after, size, self._reader.submit(self._images.pixels, after, size))
        if ready is not None and ready[:2] == (wanted, size):
            return ready[2].result()
        return self._images.pixels(wanted, size)
