"""Images in batches, from an image set, a tensor, or an iterable of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dear.clip.model import Clip
from dear.data.read_ahead import read_ahead
from dear.errors import InputError
from dear.images.views import Size, normalize


@runtime_checkable
class ImageSource(Protocol):
    """The part of an image set that discovery needs: a length, and pixels by number."""

    def __len__(self) -> int:
        """Number of images."""

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        """uint8 [b, 3, size, size]."""


Images = ImageSource | Tensor | Iterable[Tensor]
"""An image set, normalized pixels [n, 3, S, S], or an iterable of such batches."""


def count(images: Images) -> int | None:
    """Number of images; None where it is not known in advance."""
    return len(images) if isinstance(images, ImageSource | Tensor) else None


def batches(clip: Clip, images: Images, batch_size: int = 64) -> Iterator[Tensor]:
    """Normalized pixels [b, 3, S, S] on the backbone's device, in order.

    Images of a set are decoded one batch ahead, in a thread, while the backbone works on the last one.
    """
    if isinstance(images, Tensor):
        yield from _checked(images, clip).split(batch_size)
    elif isinstance(images, ImageSource):
        yield from _decoded(clip, images, batch_size)
    else:
        for batch in images:
            if not isinstance(batch, Tensor):
                raise InputError(
                    f"batches of images must be tensors [B, 3, S, S], not {type(batch).__name__}"
                )
            yield from _checked(batch, clip).split(batch_size)


def _checked(batch: Tensor, clip: Clip) -> Tensor:
    """Check the shape and values of pixels given as a tensor, and move them to the device."""
    size = clip.config.vision.image_size
    if batch.dim() != 4 or batch.shape[1:] != (3, size, size) or not batch.is_floating_point():
        raise InputError(
            f"pixels must be normalized floats [B, 3, {size}, {size}]; got {batch.dtype} {list(batch.shape)}"
        )
    if not bool(batch.isfinite().all()):
        row = int((~batch.isfinite().flatten(1).all(dim=1)).nonzero()[0])
        raise InputError(f"image {row} of the given pixels holds NaN or infinity; leave it out")
    return batch.to(clip.device)


def _decoded(clip: Clip, images: ImageSource, batch_size: int) -> Iterator[Tensor]:
    config = clip.config
    size, total = config.view, len(images)

    def decode(start: int) -> Tensor:
        return ahead.pixels(range(start, min(start + batch_size, total)), size)

    with read_ahead(images, clip.device) as ahead, ThreadPoolExecutor(max_workers=1) as pool:
        waiting = pool.submit(decode, 0) if total else None
        for start in range(0, total, batch_size):
            assert waiting is not None
            ready = waiting.result()
            if start + batch_size < total:
                waiting = pool.submit(decode, start + batch_size)
            yield normalize(ready.to(clip.device), config.mean, config.std).to(torch.float32)
