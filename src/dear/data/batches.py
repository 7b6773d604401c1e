"""The one loop over images: reads, decodes, normalizes, skips or refuses, reports progress."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from PIL import Image
from torch import Tensor

from dear.data.images import ImageSet, unlabeled_images
from dear.data.read_ahead import read_ahead
from dear.data.unreadable import CheckedImages
from dear.errors import DataError, InputError, UsageError
from dear.images.open import ImageLike
from dear.images.views import normalize
from dear.utils.parallel import in_batches
from dear.utils.progress import Progress

if TYPE_CHECKING:
    from dear.clip.model import Clip

Images = ImageSet | Sequence[ImageLike]  #: a labeled set, or files and Pillow images in a list
Pixels = ImageSet | Tensor | Iterable[Tensor]
"""An image set, normalized pixels [n, 3, S, S], or an iterable of such batches."""
Result = TypeVar("Result")

GPU_BATCH = 250  #: the supplement's test batch
CPU_TOKENS = 2_000  #: tokens per batch on a CPU; measured by `python benchmarks/images.py batches`


def image_set(images: Images | ImageLike) -> ImageSet:
    """A list of files and Pillow images, or one of them, as a set without labels; a set stays as it is."""
    if isinstance(images, str | os.PathLike | bytes | Image.Image):
        return unlabeled_images([images])
    return images if isinstance(images, ImageSet) else unlabeled_images(images)


def pixels_for(clip: Clip, images: ImageSet, rows: Sequence[int]) -> Tensor:
    """A backbone's view of some images of a set, normalized [b, 3, S, S] on its device."""
    raw = images.pixels(rows, clip.config.view).to(clip.device)
    return normalize(raw, clip.config.mean, clip.config.std)


def images_at_once(clip: Clip) -> int:
    """The batch size for a backbone on its device; on a CPU it depends on the tokens per image."""
    if clip.device.type != "cpu":
        return GPU_BATCH
    return max(1, min(64, CPU_TOKENS // clip.config.vision.positions))


def over_batches(
    images: Images,
    compute: Callable[[ImageSet, list[int]], Result],
    clip: Clip,
    *,
    unreadable: str = "stop",
    progress: Progress | None = None,
    stage: str = "images",
    batch: int | None = None,
    rows: range | None = None,
) -> tuple[list[Result], dict[int, str]]:
    """`compute` of all images, a batch at a time and without gradient.

    Args:
        images: a set or a list.
        compute: from the set and the indices of a batch to a result; unreadable images are black.
        clip: the backbone that `compute` uses, which determines the batch size.
        unreadable: "stop" raises at an image that cannot be read, "skip" continues.
        progress: called with (stage, images done, total number of images).
        stage: for `progress`.
        batch: batch size; None: `images_at_once`. Halved when memory runs out.
        rows: indices of the images; None: all.

    Returns:
        the results of the batches, and by index the reason why an image could not be read.
    """
    if unreadable not in ("stop", "skip"):
        raise UsageError(f"unreadable must be stop or skip, got {unreadable!r}")
    is_list = not isinstance(images, ImageSet)
    source = image_set(images)
    size = images_at_once(clip) if batch is None else batch
    selected = range(len(source)) if rows is None else rows
    parts: list[Result] = []
    with read_ahead(source, clip.device) as ahead, torch.no_grad():
        # Of a list, the error names the first bad file; of a dataset, all bad files.
        reading: ImageSet = ahead if is_list and unreadable == "stop" else CheckedImages(ahead, unreadable)
        work = in_batches(
            lambda span: compute(reading, list(selected[span.start : span.stop])), len(selected), size
        )
        for span, part in work:
            parts.append(part)
            if progress is not None:
                progress(stage, span.stop, len(selected))
    problems = reading.problems if isinstance(reading, CheckedImages) else {}
    if not is_list and rows is None and problems and len(problems) == len(source):
        raise DataError(
            f"{source.name}: none of its {len(source)} images can be read; the first: {problems[0]}"
        )
    return parts, problems


def over_pixels(
    images: Pixels,
    compute: Callable[[Tensor], Result],
    clip: Clip,
    *,
    unreadable: str = "stop",
    progress: Progress | None = None,
    batch: int | None = None,
    rows: range | None = None,
) -> tuple[list[Result], dict[int, str]]:
    """`compute` of the normalized pixels [b, 3, S, S] of all images; see `over_batches`.

    Images that are skipped because they cannot be read are left out of the batches. Pixels that are passed
    as tensors are checked.
    """
    if isinstance(images, ImageSet):

        def compute_rows(reading: ImageSet, indices: list[int]) -> list[Result]:
            pixels = pixels_for(clip, reading, indices)
            problems = getattr(reading, "problems", {})
            readable = [number for number, index in enumerate(indices) if index not in problems]
            if not readable:
                return []
            return [compute(pixels if len(readable) == len(indices) else pixels[readable])]

        parts, problems = over_batches(
            images, compute_rows, clip, unreadable=unreadable, progress=progress, batch=batch, rows=rows
        )
        return [result for part in parts for result in part], problems
    total = len(images) if isinstance(images, Tensor) else None
    size = images_at_once(clip) if batch is None else batch
    done, results = 0, list[Result]()
    with torch.no_grad():
        for pixels in _checked_batches(images, clip):
            work = in_batches(lambda span: compute(pixels[span.start : span.stop]), len(pixels), size)  # noqa: B023
            for span, result in work:
                results.append(result)
                if progress is not None:
                    progress("images", done + span.stop, total)
            done += len(pixels)
    return results, {}


def count_images(images: Pixels) -> int | None:
    """Number of images; None where it is not known in advance."""
    return len(images) if isinstance(images, ImageSet | Tensor) else None


def _checked_batches(images: Tensor | Iterable[Tensor], clip: Clip) -> Iterator[Tensor]:
    """Batches of normalized pixels on the backbone's device; refused if shape or values are wrong."""
    size = clip.config.vision.image_size
    for batch in (images,) if isinstance(images, Tensor) else images:
        if not isinstance(batch, Tensor):
            raise InputError(f"batches of images must be tensors [B, 3, S, S], got {type(batch).__name__}")
        if batch.dim() != 4 or batch.shape[1:] != (3, size, size) or not batch.is_floating_point():
            raise InputError(
                f"pixels must be normalized floats [B, 3, {size}, {size}], got {batch.dtype} "
                f"{list(batch.shape)}"
            )
        if not bool(batch.isfinite().all()):
            row = int((~batch.isfinite().flatten(1).all(dim=1)).nonzero()[0])
            raise InputError(f"image {row} of the pixels contains NaN or infinity; leave it out")
        yield batch.to(clip.device)


def name_of(image: ImageLike) -> str:
    """Name of an image in answers."""
    if isinstance(image, Image.Image | bytes):
        return str(getattr(image, "filename", "")) or "image in memory"
    return os.fspath(image)
