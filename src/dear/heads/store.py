"""Contributions kept on disk: appended batch by batch, read back through a memory map.

What is stored is the heads' small form in float16 (d numbers a head instead of E, see `contributions`):
50,000 images and four layers of ViT-B/16 take 0.3 GB, and memory for one batch.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dear._io.files import read_json, read_safetensors, require_finite, write_json, write_safetensors
from dear.clip.model import Clip
from dear.errors import DearError
from dear.heads.contributions import check_layers, head_maps, head_outputs

_SCHEMA = 1


class ContributionStore:
    """Contributions of n images on disk; `store.contributions(12, 7)` is what head 7 of layer 12 adds.

    Attributes:
        outputs: float16 memory map [n, L, H, d], class-token outputs divided by the final deviation.
        features: float16 memory map [n, E], image features.
        maps: [L, H, d, E].
        layers: the L layers, counted from 1.
        fingerprint: of the weights they were computed with.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Open a finished store.

        Raises:
            DearError: the folder is no store, or a part of it is missing or cut.
        """
        self.folder = Path(folder)
        about = read_json(self.folder / "store.json", "contribution store")
        if not isinstance(about, dict) or about.get("schema") != _SCHEMA:
            raise DearError(
                f"{self.folder}: is not a contribution store of schema {_SCHEMA}; collect it again"
            )
        tensors, _ = read_safetensors(self.folder / "maps.safetensors", "contribution store")
        maps, count, listed = tensors.get("maps"), about.get("images"), about.get("layers")
        if maps is None or maps.dim() != 4 or not maps.is_floating_point() or 0 in maps.shape:
            raise DearError(f"{self.folder}: the contribution store is damaged (its maps); collect it again")
        require_finite({"maps": maps}, str(self.folder / "maps.safetensors"))
        layers, heads, width, embed = maps.shape
        if not (
            _whole(count)
            and isinstance(listed, list)
            and len(listed) == layers
            and all(_whole(layer) and layer > 0 for layer in listed)
            and isinstance(about.get("fingerprint"), str)
        ):
            raise DearError(
                f"{self.folder}: the contribution store is damaged (its description); collect it again"
            )
        count = int(count or 0)
        self.maps: Tensor = maps.float()
        self.layers: tuple[int, ...] = tuple(listed)
        self.fingerprint: str = about["fingerprint"]
        self.outputs = _mapped(self.folder / "outputs.f16", (count, layers, heads, width))
        self.features = _mapped(self.folder / "features.f16", (count, embed))

    def __len__(self) -> int:
        """Number of images."""
        return int(self.outputs.shape[0])

    def contributions(self, layer: int, head: int, rows: slice | Sequence[int] = slice(None)) -> Tensor:
        """What a head adds to the features of the images `rows`, [n, E] in float32."""
        place = self.layers.index(layer)
        small = torch.from_numpy(np.array(self.outputs[rows, place, head], dtype=np.float32))
        return small @ self.maps[place, head]


class StoreWriter:
    """Collects contributions into a folder that appears only when it is whole.

    Use as a context: leaving it normally finishes the store, leaving it by an error removes what was written.
    """

    def __init__(
        self, folder: str | os.PathLike[str], clip: Clip, layers: Iterable[int] | None = None
    ) -> None:
        self.folder = Path(folder)
        self.clip = clip
        self.layers = check_layers(clip, layers)
        self.count = 0
        if self.folder.exists():
            raise DearError(f"{self.folder}: exists already; name a new folder for the contributions")
        self._part = self.folder.with_name(f".{self.folder.name}.{uuid.uuid4().hex[:8]}.part")

    def __enter__(self) -> StoreWriter:
        """Open the files in a hidden neighbor of the folder."""
        with self._writing():
            self._part.mkdir(parents=True)
            self._outputs = (self._part / "outputs.f16").open("wb")
            self._features = (self._part / "features.f16").open("wb")
        return self

    def add(self, batch: Tensor) -> None:
        """Append the contributions of a batch [B, 3, S, S]."""
        result = head_outputs(self.clip, batch, self.layers)
        outputs, features = result.outputs.half().cpu(), result.features.half().cpu()
        if not bool(outputs.isfinite().all()) or not bool(features.isfinite().all()):
            raise DearError(
                f"{self.folder}: a contribution is larger than float16 holds (65,504), or not a number; "
                "this backbone's contributions cannot be kept on disk"
            )
        with self._writing():
            self._outputs.write(outputs.numpy().tobytes())
            self._features.write(features.numpy().tobytes())
        self.count += batch.shape[0]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the store, or remove what there is of it after an error."""
        try:
            for file in (self._outputs, self._features):
                with self._writing():
                    file.flush()
                    os.fsync(file.fileno())
                    file.close()
            if kind is None:
                write_safetensors(
                    self._part / "maps.safetensors", {"maps": head_maps(self.clip, self.layers)}
                )
                about = {
                    "schema": _SCHEMA,
                    "backbone": self.clip.name,
                    "fingerprint": self.clip.fingerprint,
                    "layers": list(self.layers),
                    "images": self.count,
                }
                write_json(self._part / "store.json", about)
                with self._writing():
                    os.replace(self._part, self.folder)
        finally:
            shutil.rmtree(self._part, ignore_errors=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DearError(
                f"{self.folder}: contributions could not be written ({error.strerror})"
            ) from error


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40


def _mapped(path: Path, shape: tuple[int, ...]) -> NDArray[np.float16]:
    """A read-only map of a raw float16 file whose size must fit the shape."""
    expected = 2 * math.prod(shape)
    size = path.stat().st_size if path.is_file() else -1
    if size != expected:
        raise DearError(f"{path}: holds {max(size, 0):,} bytes, {expected:,} expected; collect it again")
    if not expected:
        return np.zeros(shape, dtype=np.float16)
    return np.memmap(path, dtype=np.float16, mode="r", shape=shape)
