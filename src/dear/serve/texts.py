"""Class texts, encoded a few at a time between batches of images.

A method encodes the texts of its classes with its first answer, all at once: a thousand new names would
occupy the device for seconds. Here the same method on a few classes at a time computes the rows that the
method on all classes caches.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import torch

from dear.methods.base import Method
from dear.methods.class_rows import ClassRows
from dear.serve.engine import Answerer
from dear.serve.turns import Pace

SLICE = 16  #: classes whose texts are encoded at once on a CPU, between two batches; fewer if that takes long
SLICE_ON_GPU = 64
Call = Callable[[Callable[[], Any], float], Awaitable[Any]]  #: runs a function of some cost in its turn


async def prepare_texts(
    answerer: Answerer, call: Call, pace: Pace, base: ClassRows | None = None
) -> ClassRows | None:
    """Encode the texts of a model's classes in slices; None for a method that cannot take other classes.

    Args:
        answerer: whose first answer then encodes nothing.
        call: runs one slice.
        pace: how many classes a slice may have.
        base: rows of the adapter's trained classes; a list that begins with these classes starts with them.
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
            rows: ClassRows = await call(partial(pace.timed, len(names), last), len(names))
            return rows
        encode = partial(_rows, method, names)
        parts.append(await call(partial(pace.timed, len(names), encode), len(names)))


@torch.no_grad()
def _rows(method: Method, names: tuple[str, ...]) -> ClassRows:
    """What the method on these classes has cached after an answer."""
    part = method if names == method.classes else method.with_classes(names)
    _answer(part)
    return part.class_rows()


@torch.no_grad()
def _last(answerer: Answerer, names: tuple[str, ...], parts: Sequence[ClassRows]) -> ClassRows:
    """Encode the last slice, and give the model on all classes the rows of all slices."""
    rows = ClassRows.join([*parts, _rows(answerer.method, names)])
    answerer.method.set_class_rows(rows)
    return rows


@torch.no_grad()
def _answer(method: Method) -> None:
    """Answer a blank image, so that the method caches what the next one needs."""
    side = method.clip.config.vision.image_size
    method.all_logits(torch.zeros(1, 3, side, side, device=method.clip.device))
