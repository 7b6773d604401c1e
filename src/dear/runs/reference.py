"""The training images of a run as frozen features: how near a new image is to them.

`reference.safetensors` of a run folder holds unit features in half precision, at most `PER_CLASS` images per
class; 16 images of 10 classes on ViT-B/16 are 164 kB. How near an image is to the training images is its mean
cosine with the `NEIGHBORS` nearest of them, after their mean was subtracted; for a training image, with the
nearest others.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dear._io.files import read_safetensors, require_finite, write_safetensors
from dear.errors import RunError

FILE = "reference.safetensors"
NEIGHBORS = 5
PER_CLASS = 64
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class Reference:
    """Unit features [n, E] of training images and their labels [n]."""

    features: Tensor
    labels: Tensor

    @classmethod
    def of(cls, features: Tensor, labels: Tensor, seed: int = 1) -> Reference:
        """Some images of each class, drawn at random where there are many."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(labels), generator=generator)
        keep: list[int] = []
        counts: dict[int, int] = {}
        for index in order.tolist():
            label = int(labels[index])
            counts[label] = counts.get(label, 0) + 1
            if counts[label] <= PER_CLASS:
                keep.append(index)
        rows = torch.tensor(sorted(keep), dtype=torch.long)
        return cls(F.normalize(features[rows].float(), dim=-1).half(), labels[rows].long())

    @cached_property
    def mean(self) -> Tensor:
        """The mean feature, [E]."""
        return self.features.float().mean(dim=0)

    @cached_property
    def centered(self) -> Tensor:
        """Unit features around the mean, [n, E]."""
        return F.normalize(self.features.float() - self.mean, dim=-1)

    def nearness(self, features: Tensor) -> Tensor:
        """Mean cosine [b] of features [b, E] with their nearest training images."""
        device = features.device
        x = F.normalize(F.normalize(features.float(), dim=-1) - self.mean.to(device), dim=-1)
        return torch.cat([_nearest(part @ self.centered.to(device).T) for part in x.split(_ROWS_AT_ONCE)])

    @cached_property
    def own_nearness(self) -> Tensor:
        """The same of each training image with the others, [n]."""
        parts = []
        for start in range(0, len(self.centered), _ROWS_AT_ONCE):
            cosines = self.centered[start : start + _ROWS_AT_ONCE] @ self.centered.T
            rows = torch.arange(len(cosines))
            cosines[rows, start + rows] = -2.0
            parts.append(_nearest(cosines, own=True))
        return torch.cat(parts)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the run folder's file."""
        tensors = {"features": self.features.cpu(), "labels": self.labels.cpu()}
        write_safetensors(Path(folder) / FILE, tensors, {"dear": "features of training images"})

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Reference | None:
        """What a run folder holds; None: nothing."""
        path = Path(folder) / FILE
        if not path.is_file():
            return None
        tensors, _ = read_safetensors(path, "file of training features")
        require_finite(tensors, str(path))
        features, labels = tensors.get("features"), tensors.get("labels")
        if features is None or labels is None or set(tensors) != {"features", "labels"}:
            raise RunError(f"{path}: must hold the tensors features and labels")
        if features.ndim != 2 or labels.shape != features.shape[:1] or not len(labels):
            raise RunError(f"{path}: its features and labels do not fit each other")
        return cls(features.half(), labels.long())


def _nearest(cosines: Tensor, own: bool = False) -> Tensor:
    """Mean of the largest cosines of each row [b, n]; with `own`, one of the n is the image itself."""
    count = max(1, min(NEIGHBORS, cosines.shape[1] - own))
    return cosines.topk(count, dim=-1).values.mean(dim=-1)
