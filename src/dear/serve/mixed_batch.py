"""Answers of several adapters of one backbone for one batch of images, each image with its own adapter.

What the adapters share is computed once for the whole batch: the layers before the first change, or the whole
image tower for methods that read the frozen image feature. An image's answer is that of its adapter alone,
whatever else is in the batch, but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import cached_property
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


class Member:
    """A method in mixed batches, and what every batch asks about it; it does not see later changes."""

    def __init__(self, method: Method) -> None:
        self.method = method

    @cached_property
    def stage_group(self) -> tuple[int, Hashable]:
        """Members with equal groups share their frozen stage, but for the affine part of a correction.

        A correction changes the feature alone, not the layers before it; heads that are left out change what
        the last layer gives, and what heads that are focused on contribute is corrected as the feature is.
        """
        method, clip = self.method, self.method.clip
        alone = method.focus or (method.cut in ("pooled", "feature") and clip.visual.removed_heads)
        return id(clip) if alone else id(clip.plain), (method.cut, method.class_token_at, method.focus)

    @cached_property
    def stack_key(self) -> Hashable:
        """Of DeAR: what members agree on that are computed in one pass; None: computed by itself."""
        return stack_key(self.method) if isinstance(self.method, DeAR) else None

    @cached_property
    def stack_group(self) -> tuple[Hashable, ...]:
        """Members with equal groups are computed in one pass where they have a `stack_key`."""
        visual = self.method.clip.visual
        return self.stack_key, visual.removed_heads, visual.correction is None

    @cached_property
    def class_weights(self) -> Tensor:
        """Of DeAR: class weights [C, E]."""
        return cast(DeAR, self.method).cached_weights()


@torch.no_grad()
def logits(methods: Sequence[Method], pixels: Tensor, run: Runner = run_eagerly) -> list[Tensor]:
    """Logits [C_i] of each image [B, 3, S, S] under its method, of `methods` [B], in the default mode.

    Args:
        methods: the adapter of each image; what is shared is shared among those on one backbone object,
            whichever corrections of the image feature they have.
        pixels: normalized.
        run: runs what can be recorded: the shared stage, and adapters computed in one pass.
    """
    members = {id(method): Member(method) for method in methods}
    return logits_and_features([members[id(method)] for method in methods], pixels, (), run)[0]


@torch.no_grad()
def logits_and_features(
    members: Sequence[Member],
    pixels: Tensor,
    wanted: Collection[int],
    run: Runner = run_eagerly,
) -> tuple[list[Tensor], dict[int, Tensor]]:
    """`logits` of each image under its member, and the frozen features [E] of images at the `wanted` indices.

    An image that wants both goes through the frozen part of the tower once.
    """
    pixels = pixels.to(members[0].method.clip.device)
    features: dict[int, Tensor] = {}
    groups = [(member.stage_group, _feature_clip(member.method) if row in wanted else None)
              for row, member in enumerate(members)]  # fmt: skip

    def compute(group: tuple[Hashable, Clip | None], rows: list[int]) -> list[Tensor]:
        some, clip = [members[row] for row in rows], group[1]
        part = pixels if len(rows) == len(members) else pixels[rows]
        if clip is None:
            return _answers(some, _stage(some, part, run), run)
        stage, more = _stage_and_feature(some, clip, part, run)
        features.update(zip(rows, more, strict=True))
        return _answers(some, stage, run)

    return _in_groups(groups, compute), features


def _feature_clip(method: Method) -> Clip:
    """The backbone whose feature is the method's, but for the affine part of a correction."""
    return method.clip if method.clip.visual.removed_heads else method.clip.plain


def _stage_and_feature(
    members: Sequence[Member], clip: Clip, pixels: Tensor, run: Runner
) -> tuple[Frozen, Tensor]:
    """The frozen stage of members of one group, and their features [B, E] on one `_feature_clip`."""
    first = members[0].method
    if first.cut == "feature":
        stage = _stage(members, pixels, run)
        return stage, stage.x
    key = ("stage and feature", id(clip), clip.visual.positions.data_ptr(), members[0].stage_group)
    stage = run(key, lambda batch: first.inference_stage(batch, feature_of=clip), pixels)
    assert stage.feature is not None
    features = stage.feature if clip.visual.removed_heads else _correct(members, stage.feature)
    return stage._replace(feature=None), features


def _stage(members: Sequence[Member], pixels: Tensor, run: Runner) -> Frozen:
    """The frozen stage of members of one group, which may be recorded."""
    first = members[0].method
    clip = first.clip
    if first.cut == "pixels":
        return first.inference_stage(pixels)
    if first.cut == "feature" and not clip.visual.removed_heads and not first.focus:
        plain = clip.plain
        shared = ("stage", id(plain), plain.visual.positions.data_ptr(), "feature")
        (features,) = run(shared, lambda batch: (plain.encode_image(batch),), pixels)
        return Frozen(_correct(members, features))
    key = ("stage", members[0].stage_group, clip.visual.positions.data_ptr())
    return run(key, first.inference_stage, pixels)


def _correct(members: Sequence[Member], features: Tensor) -> Tensor:
    """Plain features [B, E] as each member's backbone corrects them."""
    clips = [member.method.clip for member in members]
    if all(clip.visual.correction is None for clip in clips):
        return features
    return torch.stack(_in_groups(clips, lambda clip, rows: clip.visual.correct(features[rows]).unbind()))


def _answers(members: Sequence[Member], frozen: Frozen, run: Runner) -> list[Tensor]:
    """Logits of each image from the frozen stage, which all members here share."""

    def compute(group: tuple[Hashable, ...], rows: list[int]) -> list[Tensor]:
        some = [members[row] for row in rows]
        part = frozen if len(rows) == len(members) else frozen.rows(rows)
        several = run is not run_eagerly or any(member is not some[0] for member in some)
        if group[0] is not None and several:  # a single adapter needs no stack unless it is to be recorded
            models = [cast(DeAR, member.method) for member in some]
            weights = [member.class_weights for member in some]
            return stacked_logits(models, group[0], weights, part, run)
        return _in_groups(some, lambda member, indices: _logits(member.method, part.rows(indices)))

    return _in_groups([member.stack_group for member in members], compute)


def _logits(method: Method, frozen: Frozen) -> tuple[Tensor, ...]:
    return method.logits_from_frozen(frozen)[method.modes[0]].unbind()


def _in_groups(keys: Sequence[K], compute: Callable[[K, list[int]], Sequence[Tensor]]) -> list[Tensor]:
    """Results in the order of the keys; `compute` gets a key and all its indices."""
    groups: dict[K, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    results: dict[int, Tensor] = {}
    for key, indices in groups.items():
        results.update(zip(indices, compute(key, indices), strict=True))
    return [results[index] for index in range(len(keys))]
