"""What an image shows: the file it is read from, and the hash of its content."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache

from dear.data.images import FileImages, ImageSet, ImageSetWrapper, ListedImages
from dear.images.open import ImageLike
from dear.utils.digest import of_file, of_parts


def source_of(images: ImageSet, index: int) -> ImageLike:
    """The source of an image that is read fastest: its file if it has one."""
    match images:
        case FileImages():
            return images.path(index)
        case ListedImages():
            return images.items[index]
    cell = getattr(images, "cell", None)
    return images.image(index) if cell is None else cell(index)


def content_digest(images: ImageSet, index: int) -> bytes:
    """Hash of an image's content: of the file's bytes, or of the pixels of an image in memory.

    The digest of a file that cannot be read is that of its error's type.
    """
    digest = stored_digest(images, index)
    if digest is not None:
        return digest
    image = images.image(index)
    return of_parts(f"{image.mode} {image.size}", image.tobytes())


def stored_digest(images: ImageSet, index: int) -> bytes | None:
    """Hash of an image's stored bytes (a file, a box of a file, a cell); None for an image in memory."""
    while isinstance(images, ImageSetWrapper) and images.same_content:
        images = images.images
    match images:
        case FileImages():
            return file_digest(images.path(index))
        case ListedImages():
            item = images.items[index]
            return file_digest(item) if isinstance(item, str | os.PathLike) else None
    digest: Callable[[int], bytes | None] | None = getattr(images, "digest", None)
    return None if digest is None else digest(index)


def file_digest(path: str | os.PathLike[str]) -> bytes:
    """Hash of a file's bytes; if it cannot be read, of its error's type."""
    try:
        state = os.stat(path)
        return _file_digest(os.path.abspath(path), (state.st_size, state.st_mtime_ns, state.st_ctime_ns))
    except OSError as error:
        return of_parts(type(error).__name__)


@lru_cache(maxsize=1 << 17)
def _file_digest(path: str, state: tuple[int, ...]) -> bytes:
    """Hash of a file's bytes, cached by its size and times of change."""
    return of_file(path)
