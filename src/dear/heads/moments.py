"""Running moments of every head, the input of TEXTSPAN; saved regularly, so discovery can resume."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.errors import DearError, UsageError
from dear.heads.contributions import check_layers, head_maps, head_outputs
from dear.utils.digest import of_json
from dear.utils.files import PathLike, read_safetensors, require_finite, write_safetensors

SAVE_EVERY = 10  #: batches between two saves


class Moments:
    """Sums over images of a head's output z and of z z^T, in float64, for each of [L, H] heads.

    Moments of parts of an image set add up to the moments of the whole: `first + second`.
    """

    def __init__(self, maps: Tensor, layers: Sequence[int]) -> None:
        shape = maps.shape[:3]
        self.maps = maps  #: [L, H, d, E], from output to contribution
        self.layers = tuple(layers)  #: the L layers, counted from 1
        self.count = 0  #: images seen
        self.total = torch.zeros(*shape, dtype=torch.float64, device=maps.device)  #: [L, H, d]
        self.square = torch.zeros(*shape, shape[2], dtype=torch.float64, device=maps.device)  #: [L, H, d, d]

    def add(self, outputs: Tensor) -> None:
        """Add the outputs [B, L, H, d] of a batch."""
        z = outputs.to(self.total).permute(1, 2, 0, 3)  # [L, H, B, d]
        self.count += outputs.shape[0]
        self.total += z.sum(dim=2)
        self.square += z.transpose(2, 3) @ z  # [L, H, d, B] @ [L, H, B, d]

    def tensors(self) -> dict[str, Tensor]:
        """Everything but the count, by name: what `restore` reads."""
        return {"total": self.total, "square": self.square}

    def restore(self, tensors: Mapping[str, Tensor], count: int) -> bool:
        """Continue from tensors of `count` images; False, and nothing is changed, if they do not fit."""
        present = self.tensors()
        if any(name not in tensors or tensors[name].shape != present[name].shape for name in present):
            return False
        self.count = count
        self.total.copy_(tensors["total"])
        self.square.copy_(tensors["square"])
        return True

    def __add__(self, other: Moments) -> Moments:
        """Moments of both image sets together."""
        if self.layers != other.layers or not torch.equal(self.maps, other.maps):
            raise UsageError("moments of different layers or weights cannot be added")
        both = Moments(self.maps, self.layers)
        both.count = self.count + other.count
        both.total = self.total + other.total
        both.square = self.square + other.square
        return both

    def mean(self) -> Tensor:
        """Mean contribution of each head, [L, H, E] in float64."""
        return (self.total[..., None, :] @ self.maps.double())[..., 0, :] / max(self.count, 1)


def compute_moments(clip: Clip, batches: Iterable[Tensor], layers: Iterable[int] | None = None) -> Moments:
    """Moments of the heads of `layers` (None: all) over batches of normalized pixels, in constant memory."""
    chosen = check_layers(clip, layers)
    result = Moments(head_maps(clip, chosen), chosen)
    for batch in batches:
        result.add(head_outputs(clip, batch, chosen).outputs)
    return result


class SavedMoments:
    """Moments on disk, with a key of the computation that they belong to.

    Names and order of the images and the batch size are part of it, since sums depend on the order.
    """

    def __init__(
        self, path: PathLike, clip: Clip, images: ImageSet, layers: tuple[int, ...], batch_size: int
    ) -> None:
        self.path = Path(path)
        self.images = len(images)
        names = [images.key(index) for index in range(len(images))]
        about = [clip.fingerprint, clip.device.type, str(clip.dtype), layers, batch_size, names]
        self.key = of_json(about).hex()

    def restore(self, moments: Moments) -> int:
        """Load what an interrupted run of the same computation saved; returns the number of images done.

        Images that could not be read are done, but not part of the moments.
        """
        try:
            tensors, metadata = read_safetensors(self.path, "saved moments")
            key, *numbers = metadata["dear"].split()
            count, done = (int(number) for number in numbers if number.isdecimal() and len(number) <= 12)
            require_finite(tensors, str(self.path))
        except (DearError, KeyError, ValueError):  # missing or damaged: the images are read again
            return 0
        if key != self.key or not count <= done <= self.images:
            return 0
        return done if moments.restore(tensors, count) else 0

    def save(self, moments: Moments, done: int) -> None:
        """Save the moments of the first `done` images."""
        write_safetensors(self.path, moments.tensors(), {"dear": f"{self.key} {moments.count} {done}"})

    def remove(self) -> None:
        """Delete the file; the computation is done."""
        self.path.unlink(missing_ok=True)


def resume_path(out: PathLike) -> Path:
    """The file of the saved moments of a role map that is written to `out`."""
    return Path(out).with_name(f".{Path(out).name}.resume.safetensors")
