"""Answers of several adapters of one backbone for one batch of images, each image with its own adapter.

What the adapters share is computed once for the whole batch: the layers before the first change, or the whole
image tower for methods that read the frozen image feature. An image's answer is that of its adapter alone,
whatever else is in the batch, but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from dear.clip.gpu import Runner, run_eagerly
from dear.clip.model import Clip
from dear.methods.base import Method
from dear.methods.dear import DeAR
from dear.methods.frozen import Frozen
from dear.serve.dear_stack import stack_key, stacked_logits

K = TypeVar("K", bound=Hashable)


@torch.no_grad()
def logits(
    methods: Sequence[Method], pixels: Tensor, mode: str | None = None, run: Runner = run_eagerly
) -> list[Tensor]:
    """Logits [C_i] for each of the images [B, 3, S, S] under its own method, of `methods` [B].

    Args:
        methods: the adapter of each image; what is shared is shared among those on one backbone object,
            whichever corrections of the image feature they have.
        pixels: normalized.
        mode: way to predict; None: the usual one of each method.
        run: runs what can be recorded: the shared stage, and adapters computed in one pass.
    """
    return logits_and_features(methods, pixels, (), mode, run)[0]


@torch.no_grad()
def logits_and_features(
    methods: Sequence[Method],
    pixels: Tensor,
    wanted: Collection[int],
    mode: str | None = None,
    run: Runner = run_eagerly,
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """`logits`, and of the images at the wanted places the frozen feature [E] of their method's backbone.

    An image that wants both goes through the frozen part of the tower once.
    """
    pixels = pixels.to(methods[0].clip.device)
    features: dict[int, Tensor] = {}
    groups = [(_groups(method)[0], _feature_clip(method) if row in wanted else None)
              for row, method in enumerate(methods)]  # fmt: skip

    def compute(group: tuple[Hashable, Clip | None], rows: list[int]) -> list[Tensor]:
        members, clip = [methods[row] for row in rows], group[1]
        part = pixels if len(rows) == len(methods) else pixels[rows]
        if clip is None:
            return _answers(members, _stage(members, part, run), mode, run)
        stage, more = _stage_and_feature(members, clip, part, run)
        features.update(zip(rows, more, strict=True))
        return _answers(members, stage, mode, run)

    return _in_groups(groups, compute), features


def _feature_clip(method: Method) -> Clip:
    """The backbone whose feature is the method's, but for the affine part of a correction."""
    return method.clip if method.clip.visual.removed_heads else method.clip.plain


def _stage_and_feature(
    methods: Sequence[Method], clip: Clip, pixels: Tensor, run: Runner
) -> tuple[Frozen, Tensor]:
    """The frozen stage of methods of one group, and their features [B, E] on one `_feature_clip`."""
    first = methods[0]
    if first.cut == "feature":
        stage = _stage(methods, pixels, run)
        return stage, stage.x
    key = ("stage and feature", id(clip), clip.visual.positions.data_ptr(), _stage_group(first))
    stage = run(key, lambda batch: first.inference_stage(batch, feature_of=clip), pixels)
    assert stage.feature is not None
    features = stage.feature if clip.visual.removed_heads else _corrected(methods, stage.feature)
    return stage._replace(feature=None), features


def _groups(method: Method) -> tuple[tuple[int, Hashable], tuple[Hashable, ...]]:
    """`_stage_group` and `_stack_group`, cached while the method is on this backbone."""
    cached = method.__dict__.get("_batch_groups")
    if cached is None or cached[0] != id(method.clip):
        groups = _stage_group(method), _stack_group(method)
        cached = method.__dict__["_batch_groups"] = (id(method.clip), *groups)
    return cached[1], cached[2]


def _stage_group(method: Method) -> tuple[int, Hashable]:
    """Methods with equal groups share their frozen stage, but for the affine part of a correction.

    A correction changes the feature alone, not the layers before it; heads that are left out change what
    the last layer gives, and what heads that are focused on contribute is corrected as the feature is.
    """
    clip, key = method.clip, (method.cut, method.class_token_at, method.focus)
    alone = bool(method.focus) or (method.cut in ("pooled", "feature") and bool(clip.visual.removed_heads))
    return id(clip) if alone else id(clip.plain), key


def _stage(methods: Sequence[Method], pixels: Tensor, run: Runner) -> Frozen:
    """The frozen stage of methods of one group, which may be recorded."""
    first = methods[0]
    clip = first.clip
    if first.cut == "pixels":
        return first.inference_stage(pixels)
    if first.cut == "feature" and not clip.visual.removed_heads and not first.focus:
        plain = clip.plain
        shared = ("stage", id(plain), plain.visual.positions.data_ptr(), "feature")
        (features,) = run(shared, lambda batch: (plain.encode_image(batch),), pixels)
        return Frozen(_corrected(methods, features))
    group, key = _stage_group(first)
    return run(("stage", group, clip.visual.positions.data_ptr(), key), first.inference_stage, pixels)


def _corrected(methods: Sequence[Method], features: Tensor) -> Tensor:
    """Plain features [B, E] as each method's backbone corrects them."""
    if all(method.clip.visual.correction is None for method in methods):
        return features
    clips = [method.clip for method in methods]
    return torch.stack(_in_groups(clips, lambda clip, rows: clip.visual.correct(features[rows]).unbind()))


def _answers(methods: Sequence[Method], frozen: Frozen, mode: str | None, run: Runner) -> list[Tensor]:
    """Logits of each image from the frozen stage, which all methods here share."""

    def compute(group: tuple[Hashable, ...], rows: list[int]) -> list[Tensor]:
        members = [methods[row] for row in rows]
        part = frozen if len(rows) == len(methods) else frozen.rows(rows)
        several = run is not run_eagerly or any(method is not members[0] for method in members)
        if group[0] is not None and several:  # a single adapter needs no stack unless it is to be recorded
            models = cast(list[DeAR], members)
            return stacked_logits(models, part, models[0].pick_mode(mode), run)
        return _in_groups(members, lambda method, places: _logits(method, part.rows(places), mode))

    return _in_groups([_groups(method)[1] for method in methods], compute)


def _logits(method: Method, frozen: Frozen, mode: str | None) -> tuple[Tensor, ...]:
    return method.logits_from_frozen(frozen)[method.pick_mode(mode)].unbind()


def _stack_group(method: Method) -> tuple[Hashable, ...]:
    """Methods with equal groups are computed in one pass where the first entry is not None."""
    visual = method.clip.visual
    key = stack_key(method) if isinstance(method, DeAR) else None
    return key, visual.removed_heads, visual.correction is None


def _in_groups(keys: Sequence[K], compute: Callable[[K, list[int]], Sequence[Tensor]]) -> list[Tensor]:
    """Results in the order of the keys; `compute` gets a key and all its places."""
    groups: dict[K, list[int]] = {}
    for place, key in enumerate(keys):
        groups.setdefault(key, []).append(place)
    results: dict[int, Tensor] = {}
    for key, places in groups.items():
        results.update(zip(places, compute(key, places), strict=True))
    return [results[place] for place in range(len(keys))]
