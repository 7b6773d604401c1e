"""Images of the next batch are read while those of the present one are computed with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from torch import Tensor

from dear._io.image_file import Size
from dear.data.images import FileImages, ImageSet, ListedImages, Wrapped

Images = TypeVar("Images", bound=ImageSet)


@contextmanager
def read_ahead(images: Images) -> Iterator[Images]:
    """A set that will be walked in order, a batch at a time: files are read before they are asked for."""
    if not isinstance(images, FileImages | ListedImages):
        yield images
        return
    reader = ThreadPoolExecutor(1, thread_name_prefix="dear-read-ahead")
    try:
        yield cast(Images, _Ahead(images, reader))
    finally:
        reader.shutdown(wait=True, cancel_futures=True)


class _Ahead(Wrapped):
    """`images`, whose `pixels` of some places starts to read the next batch: as many as the most so far."""

    def __init__(self, images: FileImages | ListedImages, reader: ThreadPoolExecutor) -> None:
        self.images, self._reader = images, reader
        self._next: tuple[list[int], Size, Future[Tensor]] | None = None
        self._most = 0

    def __getattr__(self, name: str) -> Any:  # what only some sets have, such as `paths`
        return getattr(self.images, name)

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        wanted, ready = [int(index) for index in indices], self._next
        self._most = max(self._most, len(wanted))
        if len(wanted) > 1:
            after = list(range(wanted[-1] + 1, min(wanted[-1] + 1 + self._most, len(self))))
            self._next = (after, size, self._reader.submit(self.images.pixels, after, size))
        if ready is not None and ready[:2] == (wanted, size):
            return ready[2].result()
        return self.images.pixels(wanted, size)
