"""Training images in memory: resized once, kept as bytes, returned in padded batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dear._io.image_file import resize_short, to_tensor
from dear.data.images import ImageSet, threaded


class TrainingPixels:
    """The images of a set, large enough to crop training views of `size` from.

    A random crop covers at least `least_area` of an image, so a short side of `size / sqrt(least_area)` is
    enough for the smallest crop to have about `size` pixels; larger images are shrunk to that once (aspect
    kept), smaller ones stay as they are. Decoded images are kept on `device` until `limit_bytes` are used;
    the rest are decoded each time.

    >>> ready = TrainingPixels(images, 224)                                        # doctest: +SKIP
    >>> pixels, sizes = ready.batch([3, 1, 4])                                     # doctest: +SKIP
    """

    def __init__(
        self,
        images: ImageSet,
        size: int,
        device: torch.device | str = "cpu",
        least_area: float = 0.5,
        limit_bytes: int = 4 << 30,
    ) -> None:
        self.images = images
        self.short_side = math.ceil(size / math.sqrt(least_area))
        self.device = torch.device(device)
        self.limit_bytes = limit_bytes
        self._kept: dict[int, Tensor] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Some images, padded at the right and bottom to the largest of them.

        Returns:
            uint8 [b, 3, h, w] on the device, and int64 [b, 2] (on the CPU): height and width of each image.
        """
        wanted = [int(index) for index in indices]
        missing = [index for index in dict.fromkeys(wanted) if index not in self._kept]
        fresh = dict(zip(missing, threaded(self._decode, missing), strict=True))
        for index, image in fresh.items():
            if self._bytes + image.numel() <= self.limit_bytes:
                self._kept[index] = image
                self._bytes += image.numel()
        return pad([fresh[index] if index in fresh else self._kept[index] for index in wanted])

    def _decode(self, index: int) -> Tensor:
        """One image, uint8 [3, h, w], on the device."""
        image = self.images.image(index)
        if min(image.size) > self.short_side:
            image = resize_short(image, self.short_side)
        return to_tensor(image).to(self.device)


def pad(images: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Stack images of any sizes: uint8 [b, 3, h, w] and their true sizes, int64 [b, 2].

    >>> batch, sizes = pad([torch.ones(3, 4, 2), torch.ones(3, 3, 5)])
    >>> batch.shape, sizes.tolist()
    (torch.Size([2, 3, 4, 5]), [[4, 2], [3, 5]])
    """
    sizes = torch.tensor([image.shape[-2:] for image in images])
    height, width = sizes.amax(0).tolist()
    if bool((sizes == sizes[0]).all()):
        return torch.stack(list(images)), sizes
    batch = images[0].new_zeros(len(images), 3, height, width)
    for row, image in zip(batch, images, strict=True):
        row[:, : image.shape[1], : image.shape[2]] = image
    return batch, sizes
