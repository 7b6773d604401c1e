"""What a method computes for each class, so that long class lists are encoded in parts and shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClassRows:
    """Cached tensors with one row per class, [C, ...]."""

    classes: tuple[str, ...]
    cached: Mapping[str, Tensor]  #: by the keys of `Method.cached`
    frozen: Tensor | None  #: unit features [C, E] of the prompts under the frozen tower; None: not computed

    def __post_init__(self) -> None:
        count = len(self.classes)
        for name, rows in self.tensors.items():
            if len(rows) != count:
                raise RuntimeError(f"{name} must have a row per class ({count}), got {len(rows)}")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {**self.cached, **({} if self.frozen is None else {"frozen": self.frozen})}

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(rows.nbytes for rows in self.tensors.values())

    def select(self, classes: Sequence[str]) -> ClassRows:
        """Copies of the rows of some classes, in their order."""
        place_of = {name: place for place, name in enumerate(self.classes)}
        places = [place_of[name] for name in classes]
        tensors = {key: rows[places] for key, rows in self.tensors.items()}
        return ClassRows(tuple(classes), tensors, tensors.pop("frozen", None))

    @classmethod
    def join(cls, parts: Sequence[ClassRows]) -> ClassRows:
        """The rows of several parts, one after the other; tensors that a part does not have are left out."""
        keys = set(parts[0].tensors).intersection(*(part.tensors for part in parts))
        tensors = {key: torch.cat([part.tensors[key] for part in parts]) for key in keys}
        classes = tuple(name for part in parts for name in part.classes)
        return cls(classes, tensors, tensors.pop("frozen", None))
