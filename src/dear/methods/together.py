"""Answers of several adapters of one backbone for one batch of images, each image with its own adapter.

What the adapters share is computed once for the whole batch: the layers before the first change, or the whole
image tower for methods that read the frozen image feature. An image's answer is that of its adapter alone,
whatever else is in the batch, but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from dear.clip.gpu.recorded import Runner, run_eagerly
from dear.methods.base import Frozen, Method

T = TypeVar("T")


@torch.no_grad()
def answer_together(
    methods: Sequence[Method], pixels: Tensor, mode: str | None = None, run: Runner = run_eagerly
) -> list[Tensor]:
    """Logits [C_i] for each of the images [B, 3, S, S] under its own method, of `methods` [B].

    Args:
        methods: the adapter of each image; what is shared is shared among those on one backbone object.
        pixels: normalized.
        mode: way to predict; None: the usual one of each method.
        run: runs what can be recorded: the shared stage, and adapters computed in one pass.
    """
    pixels = pixels.to(methods[0].clip.device)
    found: list[Tensor | None] = [None] * len(methods)
    for rows in _grouped([(id(method.clip), method.stage_key()) for method in methods]).values():
        own = [methods[row] for row in rows]
        part = pixels if len(rows) == len(methods) else pixels[rows]
        for row, logits in zip(rows, _answers(own, _stage(own[0], part, run), mode, run), strict=True):
            found[row] = logits
    return [logits for logits in found if logits is not None]


def _stage(method: Method, pixels: Tensor, run: Runner) -> Frozen:
    """The frozen stage; those that every adapter of a kind shares may be recorded."""
    key = method.stage_key()
    if isinstance(key, int):  # the method's own: a recording would serve this adapter alone
        return method.inference_stage(pixels)
    clip = method.clip
    return run(("stage", id(clip), clip.visual.positions.data_ptr(), key), method.inference_stage, pixels)


def _answers(methods: Sequence[Method], frozen: Frozen, mode: str | None, run: Runner) -> list[Tensor]:
    """Logits of each image from the frozen stage, which all methods here share."""
    found: list[Tensor | None] = [None] * len(methods)
    for key, rows in _grouped([method.stack_key() for method in methods]).items():
        own = [methods[row] for row in rows]
        part = frozen if len(rows) == len(methods) else tuple(tensor[rows] for tensor in frozen)
        several = run is not run_eagerly or any(method is not own[0] for method in own)
        if key is not None and several:  # a single adapter needs no stack unless it is to be recorded
            answers = own[0].stacked_logits(own, part, own[0].pick_mode(mode), run)
        else:
            answers = _one_by_one(own, part, mode)
        for row, logits in zip(rows, answers, strict=True):
            found[row] = logits
    return [logits for logits in found if logits is not None]


def _one_by_one(methods: Sequence[Method], frozen: Frozen, mode: str | None) -> list[Tensor]:
    """Logits of each image, a pass for every adapter."""
    found: list[Tensor | None] = [None] * len(methods)
    for rows in _grouped([id(method) for method in methods]).values():
        method = methods[rows[0]]
        logits = method.logits_from_frozen(tuple(tensor[rows] for tensor in frozen))[method.pick_mode(mode)]
        for row, own in zip(rows, logits, strict=True):
            found[row] = own
    return [logits for logits in found if logits is not None]


def _grouped(keys: Sequence[T]) -> dict[T, list[int]]:
    """Places of equal keys, in the order of their first one."""
    places: dict[T, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return places
