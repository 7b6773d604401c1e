"""What a method computes for each class, so that long class lists are encoded in parts and shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClassRows:
    """Cached tensors with one row per class, [C, ...]."""

    classes: tuple[str, ...]
    cached: dict[str, Tensor]  #: by the keys of `Method.cached`
    frozen: Tensor  #: unit features of the prompts under the frozen tower, [C, E]

    def __post_init__(self) -> None:
        count = len(self.classes)
        for name, rows in {**self.cached, "frozen": self.frozen}.items():
            if len(rows) != count:
                raise RuntimeError(f"{name} must have a row per class ({count}), got {len(rows)}")

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(rows.nbytes for rows in (*self.cached.values(), self.frozen))

    def select(self, classes: Sequence[str]) -> ClassRows:
        """Copies of the rows of some classes, in their order."""
        place_of = {name: place for place, name in enumerate(self.classes)}
        places = [place_of[name] for name in classes]
        cached = {key: rows[places] for key, rows in self.cached.items()}
        return ClassRows(tuple(classes), cached, self.frozen[places])

    @classmethod
    def join(cls, parts: Sequence[ClassRows]) -> ClassRows:
        """The rows of several parts, one after the other."""
        keys = set(parts[0].cached).intersection(*(part.cached for part in parts))
        return cls(
            tuple(name for part in parts for name in part.classes),
            {key: torch.cat([part.cached[key] for part in parts]) for key in keys},
            torch.cat([part.frozen for part in parts]),
        )
