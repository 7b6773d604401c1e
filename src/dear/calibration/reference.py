"""The training images of a run as frozen features: how near a new image is to them.

`reference.safetensors` of a run folder holds unit features in half precision, at most `PER_CLASS` images per
class and `MOST` in all; 16 images of 10 classes on ViT-B/16 are 164 kB. How near an image is to the training
images is its mean cosine with the `NEIGHBORS` nearest of them; for a training image, with the nearest others.
Of copies of an image one is kept: copies are no neighbors of each other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dear.data.folds import IntArray, equal_rows
from dear.errors import RunError
from dear.utils.digest import of_tensors
from dear.utils.files import read_safetensors, require_finite, write_safetensors

REFERENCE = "reference.safetensors"
NEIGHBORS = 5
PER_CLASS = 64  #: images that are kept
MOST = 16_384  #: of all classes together; of each class at least one
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class Reference:
    """Unit features [n, E] of training images and their labels [n]."""

    features: Tensor
    labels: Tensor

    @classmethod
    def of(
        cls,
        features: Tensor,
        labels: Tensor,
        units: IntArray | None = None,
        contents: Sequence[bytes] | None = None,
    ) -> Reference:
        """Some images of each class, drawn by `draw_reference` where there are many.

        `units` [n]: copies of an image have the same; None: images with equal features are copies.
        """
        rows = draw_reference(labels, equal_rows(features) if units is None else units, contents)
        return cls(F.normalize(features[rows].float(), dim=-1).half().cpu(), labels[rows].long().cpu())

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return self.features.numel() * 2 + self.labels.numel() * 8

    @cached_property
    def unit(self) -> Tensor:
        """The features in float32, [n, E]."""
        return F.normalize(self.features.float(), dim=-1)

    def nearness(self, features: Tensor) -> Tensor:
        """Mean cosine [b] of features [b, E] with their nearest training images."""
        return _nearness(features, self.unit)

    @cached_property
    def mutual_nearness(self) -> Tensor:
        """Nearness of each training image to the others, [n]."""
        return _nearness(self.unit, self.unit, torch.arange(len(self.features)))

    @cached_property
    def digest(self) -> str:
        """Changes with the features."""
        return of_tensors({"features": self.features}).hex()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the run folder's file."""
        tensors = {"features": self.features, "labels": self.labels}
        write_safetensors(Path(folder) / REFERENCE, tensors, {"dear": "features of training images"})

    @classmethod
    def load(cls, folder: str | os.PathLike[str], width: int | None = None) -> Reference | None:
        """The reference of a run folder, with features of this width; None: it has none."""
        path = Path(folder) / REFERENCE
        if not path.is_file():
            return None
        tensors, _ = read_safetensors(path, "file of training features")
        require_finite(tensors, str(path))
        features, labels = tensors.get("features"), tensors.get("labels")
        if features is None or labels is None or set(tensors) != {"features", "labels"}:
            raise RunError(f"{path}: must hold the tensors features and labels")
        if features.ndim != 2 or labels.shape != features.shape[:1] or not len(labels):
            raise RunError(f"{path}: its features and labels do not fit each other")
        if width is not None and features.shape[1] != width:
            raise RunError(f"{path}: its features have {features.shape[1]} numbers, those of the run {width}")
        return cls(features.half(), labels.long())


def draw_reference(
    labels: Tensor, units: IntArray | None = None, contents: Sequence[bytes] | None = None
) -> Tensor:
    """Indices [k] of some images of each class, ascending: at most `PER_CLASS`, and `MOST` together.

    Of the images of a unit one is drawn; `units` [n] is None where there are no copies. Which images are
    drawn depends on hashes of their contents, not on their order; on the order where `contents` is None.
    """
    units = np.arange(len(labels)) if units is None else units
    limit = max(1, min(PER_CLASS, MOST // max(1, len(labels.unique()))))
    if contents is None:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1)).tolist()
    else:
        order = sorted(range(len(labels)), key=lambda index: contents[index])
    keep: list[int] = []
    counts: dict[int, int] = {}
    seen: set[int] = set()
    for index in order:
        if int(units[index]) in seen:
            continue
        seen.add(int(units[index]))
        label = int(labels[index])
        counts[label] = counts.get(label, 0) + 1
        if counts[label] <= limit:
            keep.append(index)
    return torch.tensor(sorted(keep), dtype=torch.long)


def held_out_nearness(features: Tensor, kept: Tensor, rows: Tensor, units: IntArray) -> Tensor:
    """How near the training images at `rows` [m] are to those at `kept` [k], [m]; none counts its copies.

    Features [n, E] and units [n] are those of all training images, `kept` has at most one of each unit.
    """
    number = torch.from_numpy(units)
    kept_row = torch.full((int(number.max()) + 1 if len(number) else 0,), -1)  # of each unit
    kept_row[number[kept]] = torch.arange(len(kept))
    return _nearness(features[rows], F.normalize(features[kept].float(), dim=-1), kept_row[number[rows]])


def _nearness(features: Tensor, others: Tensor, self_rows: Tensor | None = None) -> Tensor:
    """Mean cosine [b] of features [b, E] with the nearest of unit features [n, E].

    An image is not compared with the feature in row `self_rows` [b]; -1: there is none.
    """
    count = max(1, min(NEIGHBORS, len(others) - (self_rows is not None)))
    others = others.to(features.device)
    blocks = []
    for start in range(0, len(features), _ROWS_AT_ONCE):
        cosines = F.normalize(features[start : start + _ROWS_AT_ONCE].float(), dim=-1) @ others.T
        if self_rows is not None:
            columns = self_rows[start : start + len(cosines)]
            rows = (columns >= 0).nonzero()[:, 0]
            cosines[rows, columns[rows]] = -2.0
        blocks.append(cosines.topk(count, dim=-1).values.mean(dim=-1))
    return torch.cat([features.new_empty(0, dtype=torch.float32), *blocks])
