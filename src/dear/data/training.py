"""Pictures held ready for training: shrunk once, kept as bytes, handed out in padded batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dear.clip.images import resize_short, to_tensor
from dear.data.pictures import PictureSet, threaded


class TrainingPixels:
    """The pictures of a set, large enough to crop training views of `size` from.

    A random crop covers at least half the area, so a short side of `size / sqrt(0.5)` is enough for the
    smallest crop to have about `size` pixels; larger pictures are shrunk to that once (aspect kept), smaller
    ones stay as they are. Decoded pictures are kept on `device` until `limit_bytes` are used; the rest are
    decoded each time.

    >>> from dear.clip.augment import augment_batch
    >>> ready = TrainingPixels(pictures, 224)                                        # doctest: +SKIP
    >>> pixels, sizes = ready.batch([3, 1, 4])                                       # doctest: +SKIP
    >>> augment_batch(pixels, 224, torch.Generator().manual_seed(1), sizes=sizes)    # doctest: +SKIP
    """

    def __init__(
        self,
        pictures: PictureSet,
        size: int,
        device: torch.device | str = "cpu",
        limit_bytes: int = 4 << 30,
    ) -> None:
        self.pictures = pictures
        self.short_side = math.ceil(size / math.sqrt(0.5))
        self.device = torch.device(device)
        self.limit_bytes = limit_bytes
        self._kept: dict[int, Tensor] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self.pictures)

    def batch(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Some pictures, padded at the right and bottom to the largest of them.

        Returns:
            uint8 [b, 3, h, w] on the device, and int64 [b, 2] (on the CPU): height and width of each picture.
        """
        wanted = [int(index) for index in indices]
        missing = [index for index in dict.fromkeys(wanted) if index not in self._kept]
        fresh = dict(zip(missing, threaded(self._decode, missing), strict=True))
        for index, picture in fresh.items():
            if self._bytes + picture.numel() <= self.limit_bytes:
                self._kept[index] = picture
                self._bytes += picture.numel()
        return pad([fresh[index] if index in fresh else self._kept[index] for index in wanted])

    def _decode(self, index: int) -> Tensor:
        """One picture, uint8 [3, h, w], on the device."""
        image = self.pictures.picture(index)
        if min(image.size) > self.short_side:
            image = resize_short(image, self.short_side)
        return to_tensor(image).to(self.device)


def pad(pictures: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Stack pictures of any sizes: uint8 [b, 3, h, w] and their true sizes, int64 [b, 2].

    >>> batch, sizes = pad([torch.ones(3, 4, 2), torch.ones(3, 3, 5)])
    >>> batch.shape, sizes.tolist()
    (torch.Size([2, 3, 4, 5]), [[4, 2], [3, 5]])
    """
    sizes = torch.tensor([picture.shape[-2:] for picture in pictures])
    height, width = sizes.amax(0).tolist()
    if bool((sizes == sizes[0]).all()):
        return torch.stack(list(pictures)), sizes
    batch = pictures[0].new_zeros(len(pictures), 3, height, width)
    for row, picture in zip(batch, pictures, strict=True):
        row[:, : picture.shape[1], : picture.shape[2]] = picture
    return batch, sizes
