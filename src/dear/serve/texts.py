"""Class texts, encoded a few at a time between batches of images.

A method encodes the texts of its classes when it first answers, all at once: a thousand new names would hold
the device for seconds. Here the same method on a few classes at a time fills what the method on all of them
keeps.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dear.methods.base import Method
from dear.serve.engine import Answerer
from dear.serve.turns import Pace

SLICE = 16  #: classes whose texts are encoded at once on a CPU, between two batches; fewer if that takes long
SLICE_ON_GPU = 64
Call = Callable[[Callable[[], Any], float], Awaitable[Any]]  #: runs a function of some cost in its turn


@dataclass(frozen=True)
class Rows:
    """What a method keeps of some of its classes: tensors [c, ...]."""

    classes: tuple[str, ...]
    cached: dict[str, Tensor]  #: by the method's own names
    frozen: Tensor  #: unit features of the prompts under the frozen tower, [c, E]

    def __post_init__(self) -> None:
        count = len(self.classes)
        for name, rows in {**self.cached, "frozen": self.frozen}.items():
            if len(rows) != count:
                raise RuntimeError(f"{name} must have a row per class ({count}), got {len(rows)}")

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(rows.nbytes for rows in (*self.cached.values(), self.frozen))


async def prepare_texts(answerer: Answerer, call: Call, pace: Pace, base: Rows | None = None) -> Rows | None:
    """Encode the texts of a model's classes in slices; None for a method that cannot take other classes.

    Args:
        answerer: whose first answer then encodes nothing.
        call: runs one slice.
        pace: how many classes a slice may have.
        base: of the adapter's own classes, for the calibration of others; a list that begins with these
            classes starts with these rows.
    """
    method = answerer.method
    most = SLICE if method.clip.device.type == "cpu" else SLICE_ON_GPU
    if not method.open_classes:
        await call(partial(_answer, method), 1.0)
        return None
    parts = [base] if base is not None and method.classes[: len(base.classes)] == base.classes else []
    while True:
        start = sum(len(part.classes) for part in parts)
        names = method.classes[start : start + pace.pieces(most)]
        if start + len(names) == len(method.classes):
            last = partial(_last, answerer, names, parts)
            found: Rows = await call(partial(pace.timed, len(names), last), len(names))
            return found
        rows = partial(_rows, method, names)
        parts.append(await call(partial(pace.timed, len(names), rows), len(names)))


@torch.no_grad()
def _rows(method: Method, names: tuple[str, ...]) -> Rows:
    """What the method on these classes keeps after an answer."""
    part = method if names == method.classes else method.with_classes(names)
    _answer(part)
    cached = {key: rows for key, (_, rows) in part._cache.items() if len(rows) == len(names)}
    return Rows(names, cached, part.prompts.frozen)


def _last(answerer: Answerer, names: tuple[str, ...], parts: Sequence[Rows]) -> Rows:
    """The last slice, and what all of them give."""
    return _fill(answerer, [*parts, _rows(answerer.method, names)])


@torch.no_grad()
def _fill(answerer: Answerer, parts: Sequence[Rows]) -> Rows:
    """Give the model on all classes what the slices found."""
    method = answerer.method
    classes = tuple(name for part in parts for name in part.classes)
    if classes != method.classes:
        raise RuntimeError(
            f"the encoded texts must be those of the {len(method.classes)} classes, in their order; "
            f"got {len(classes)}"
        )
    stamp = method._stamp()
    shared = set(parts[0].cached).intersection(*(part.cached for part in parts))
    cached = {key: torch.cat([part.cached[key] for part in parts]) for key in shared}
    rows = Rows(classes, cached, torch.cat([part.frozen for part in parts]))
    method.prompts._frozen = rows.frozen
    method._cache.update({key: (stamp, value) for key, value in cached.items()})
    _ = answerer.scales  # now, not with the first image
    return rows


@torch.no_grad()
def _answer(method: Method) -> None:
    """Answer a blank image, so that the method keeps what it needs for the next one."""
    side = method.clip.config.vision.image_size
    method.all_logits(torch.zeros(1, 3, side, side, device=method.clip.device))
