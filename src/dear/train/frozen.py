"""The frozen stage of training steps, computed for several of them at once, or once and kept.

A small batch leaves a GPU half idle. The frozen stage of a step (crops, frozen layers, frozen features) waits
for no learned tensor, so that of the next steps is run as one large batch (`Prefetcher`), equal up to
rounding. With a fixed number of views it is computed when a view is first seen (`CachedViews`). Where several
trainings see parts of one set it is computed once for all of them (`Stages`); methods that read the frozen
feature alone then need no images at all (`FeatureTable`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dear._io.progress import Progress
from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.methods.base import FeatureBatch, Frozen, Method, in_precision
from dear.runs.batches import pixels_for
from dear.runs.feature_cache import frozen_features
from dear.train.feed import Feed

if TYPE_CHECKING:
    from dear.runs.recipe import Recipe

IMAGES_AT_ONCE = 256  #: they fill a GPU, and their activations take 160 MB on ViT-B/16
_BATCH = 64  # images whose stage is computed at once
_LIMIT_BYTES = 2 << 30  # of all stages together


class StepInputs(NamedTuple):
    """What the learned stage of a step is computed from."""

    frozen: Frozen  #: tensors [B, ...]
    labels: Tensor  #: [B]
    domains: Tensor | None = None  #: [B]


def steps_at_once(size: int, batch: int) -> int:
    """How many steps' images run at once; larger images take more memory, so fewer of them.

    >>> steps_at_once(224, 16), steps_at_once(448, 16), steps_at_once(224, 1000)
    (16, 4, 1)
    """
    return max(1, min(IMAGES_AT_ONCE, IMAGES_AT_ONCE * 224**2 // size**2) // batch)


class Prefetcher:
    """The frozen stage of every step of a run. Groups of steps do not depend on where a run resumed.

    Args:
        method: whose frozen stage is computed.
        feed: the batches.
        steps: how many steps the run has.
    """

    def __init__(self, method: Method, feed: Feed, steps: int) -> None:
        self.method, self.feed, self.steps = method, feed, steps
        self.span = steps_at_once(feed.size, feed.recipe.batch)
        self._group, self._parts = -1, list[StepInputs]()

    def at(self, step: int) -> StepInputs:
        """The inputs of a training step (from 0)."""
        group, place = divmod(step, self.span)
        if group != self._group:
            self._parts = []  # its memory is free for the next
            self._parts = self._compute(group * self.span)
            self._group = group
        return self._parts[place]

    def _compute(self, first: int) -> list[StepInputs]:
        """The inputs of the steps from `first` on, as many as run at once."""
        batch, counts = self.feed.span(first, min(first + self.span, self.steps))
        with torch.no_grad():
            frozen = self.method.frozen_stage(batch.pixels)
        stages = zip(*(tensor.split(counts) for tensor in frozen), strict=True)
        labels = batch.labels.split(counts)
        domains = [None] * len(counts) if batch.domains is None else batch.domains.split(counts)
        return [StepInputs(*parts) for parts in zip(stages, labels, domains, strict=True)]


class CachedViews:
    """The frozen stage of a fixed number of random views per image (`Recipe.views`), computed once and kept.

    View number `epoch % views` of every image is used in an epoch. The stage is computed for fixed groups of
    images, so that a resumed run computes the same bits. Where all of it would take more than `limit_bytes`,
    nothing is kept: the views are the same, and their frozen stage is computed again at every step.

    Args:
        method: whose frozen stage is kept.
        feed: the images and the recipe.
        limit_bytes: how much may be kept, on the device.
    """

    def __init__(self, method: Method, feed: Feed, limit_bytes: int = 4 << 30) -> None:
        self.method, self.feed, self.limit_bytes = method, feed, limit_bytes
        self.group = max(1, min(IMAGES_AT_ONCE, IMAGES_AT_ONCE * 224**2 // feed.size**2))
        self._kept: dict[int, Frozen] = {}  # view -> tensors [images, ...]; rows of groups that are there
        self._there: set[tuple[int, int]] = set()
        self._fits: bool | None = None

    def at(self, step: int) -> StepInputs:
        """The inputs of a training step (from 0)."""
        rows = self.feed.indices(step)
        view = step // self.feed.steps_per_epoch % self.feed.recipe.views
        if self._fits is not False:
            for group in sorted({row // self.group for row in rows}):
                self._fill(view, group)
        if not self._fits:
            return self._compute(rows, view)
        at = torch.tensor(rows).to(self.feed.device, non_blocking=True)
        domains = None if self.feed.domains is None else self.feed.domains[at]
        frozen = tuple(tensor[at] for tensor in self._kept[view])
        return StepInputs(frozen, self.feed.labels[at], domains)

    def _compute(self, rows: Sequence[int], view: int) -> StepInputs:
        """The inputs of some images."""
        batch = self.feed.views(rows, view)
        with torch.no_grad():
            return StepInputs(self.method.frozen_stage(batch.pixels), batch.labels, batch.domains)

    def _fill(self, view: int, group: int) -> None:
        """Compute the frozen stage of a view of a group of images, unless it is there."""
        if self._fits is False or (view, group) in self._there:
            return
        images = len(self.feed.images)
        rows = range(group * self.group, min((group + 1) * self.group, images))
        frozen = self._compute(rows, view).frozen
        if self._fits is None:
            each = sum(tensor[0].numel() * tensor.element_size() for tensor in frozen)
            self._fits = each * images * self.feed.recipe.views <= self.limit_bytes
            if not self._fits:
                return
        if view not in self._kept:
            self._kept[view] = tuple(tensor.new_empty(images, *tensor.shape[1:]) for tensor in frozen)
        for kept, tensor in zip(self._kept[view], frozen, strict=True):
            kept[rows.start : rows.stop] = tensor
        self._there.add((view, group))


@dataclass(frozen=True)
class Stages:
    """Frozen-stage outputs of every image of a set, for several trainings on parts of it."""

    #: `Method.frozen_stage` of each view, tensors [n, ...]; epochs take the views in turn
    views: tuple[Frozen, ...]
    own: Frozen  #: `Method.inference_stage` of CLIP's own view, tensors [n, ...]
    random: bool = False  #: whether the views are random crops, as a recipe with `augment` wants them
    rows: Tensor | None = None  #: the images that are meant, [m]; None: all
    #: frozen features [n, E] of random views, for `Method.prepare` of methods that average views
    walks: tuple[Tensor, ...] = ()

    @classmethod
    def of_features(cls, features: Tensor, walks: Sequence[Tensor] = ()) -> Stages:
        """For methods that read the frozen image feature [n, E] alone."""
        return cls(((features,),), (features,), walks=tuple(walks))

    def __len__(self) -> int:
        return len(self.own[0]) if self.rows is None else len(self.rows)

    def subset(self, rows: Tensor | Sequence[int]) -> Stages:
        """The stages of the images at `rows`; nothing is copied."""
        rows = torch.as_tensor(rows, dtype=torch.int64).to(self.own[0].device)
        return replace(self, rows=rows if self.rows is None else self.rows[rows])

    def to(self, device: torch.device) -> Stages:
        """The same on a device; nothing is copied where it is there already."""
        views = tuple(tuple(tensor.to(device) for tensor in view) for view in self.views)
        rows = None if self.rows is None else self.rows.to(device)
        own, walks = (tuple(tensor.to(device) for tensor in part) for part in (self.own, self.walks))
        return replace(self, views=views, own=own, rows=rows, walks=walks)

    def view(self, number: int, rows: Tensor) -> Frozen:
        """The stage [b, ...] of view `number` of the images at `rows`; views come again in turn."""
        at = rows if self.rows is None else self.rows[rows]
        return tuple(tensor[at] for tensor in self.views[number % len(self.views)])

    def walk(self, number: int | None, rows: Tensor) -> Tensor:
        """Features [b, E] of random view `number` of the images at `rows`; None: of CLIP's own view."""
        at = rows if self.rows is None else self.rows[rows]
        return (self.own[0] if number is None else self.walks[number % len(self.walks)])[at]

    def answered(self) -> Frozen:
        """What `logits_from_frozen` reads of each image, [m, ...]."""
        return self.own if self.rows is None else tuple(tensor[self.rows] for tensor in self.own)


def reads_features(method: Method, recipe: Recipe) -> bool:
    """Whether a training needs nothing of an image but the frozen feature of CLIP's own view."""
    return method.cut == "feature" and not recipe.augment


@torch.no_grad()
def feature_stages(
    method: Method, images: ImageSet, recipe: Recipe, progress: Progress | None = None
) -> Stages | None:
    """The frozen features of a set, for a method that learns from nothing else under this recipe; else None.

    Where the method averages random views of each image (its option `views`), their features are there too.
    """
    if not reads_features(method, recipe):
        return None
    walks = []
    clip = in_precision(method, recipe.precision).clip
    feed = Feed(images, clip, replace(recipe, augment=True))
    for view in range(getattr(method.config, "views", 0)):
        parts = [
            clip.encode_image(feed.views(rows.tolist(), view).pixels).float().cpu()
            for rows in torch.arange(len(images)).split(_BATCH)
        ]
        walks.append(torch.cat(parts))
    return Stages.of_features(frozen_features(method, images, recipe.precision, progress), walks)


@torch.no_grad()
def stages_of(
    method: Method, images: ImageSet, recipe: Recipe, views: int, limit_bytes: int = _LIMIT_BYTES
) -> Stages | None:
    """The frozen stages of some random views of every image, and of CLIP's own view.

    Args:
        method: its learned tensors do not matter.
        images: the set.
        recipe: says how views are made; without `augment` CLIP's own view is the only one.
        views: how many; fewer where more would not fit.
        limit_bytes: how much all of them may take.

    Returns:
        None where the method's loss has no frozen stage, where not even one view fits, and where a GPU can
        record whole steps, which is faster.
    """
    known = feature_stages(method, images, recipe)
    if known is not None:
        return known
    recorded = not method.dynamic and not method.quick and method.clip.device.type == "cuda"
    if type(method).loss is not Method.loss or recorded:
        return None
    work = in_precision(method, recipe.precision)
    feed = Feed(images, work.clip, recipe)
    groups = torch.arange(len(images)).split(_BATCH)
    own = [work.inference_stage(pixels_for(work.clip, images, groups[0].tolist()))]
    first = work.frozen_stage(feed.views(groups[0].tolist(), 0).pixels)
    each = sum(tensor[0].numel() * tensor.element_size() for tensor in first)
    kept = sum(tensor[0].numel() * tensor.element_size() for tensor in own[0])
    views = min(views if recipe.augment else 1, (limit_bytes // len(images) - kept) // each)
    if views < 1:
        return None
    own += [work.inference_stage(pixels_for(work.clip, images, rows.tolist())) for rows in groups[1:]]
    found = []
    for view in range(views):
        parts = [first] if view == 0 else [work.frozen_stage(feed.views(groups[0].tolist(), view).pixels)]
        parts += [work.frozen_stage(feed.views(rows.tolist(), view).pixels) for rows in groups[1:]]
        found.append(_joined(parts))
    return Stages(tuple(found), _joined(own), random=recipe.augment)


def _joined(parts: list[Frozen]) -> Frozen:
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


class FeatureTable:
    """The frozen stages of a training set, handed out in the order of a feed's steps.

    Args:
        stages: one row per image of the feed.
        feed: says which images belong to a step.

    Raises:
        UsageError: another number of rows than images, or a recipe that asks for random views of images
            whose own view alone is known.
    """

    def __init__(self, stages: Stages, feed: Feed) -> None:
        if len(stages) != len(feed.images):
            raise UsageError(f"{len(stages)} features for {len(feed.images)} images")
        if feed.recipe.augment and not stages.random:
            raise UsageError("features can be known beforehand only with augment = False in the recipe")
        self.stages, self.feed = stages.to(feed.device), feed
        self._walks = 0  # of random views

    def at(self, step: int) -> StepInputs:
        """The inputs of a training step (from 0)."""
        rows = torch.tensor(self.feed.indices(step), device=self.feed.device)
        frozen = self.stages.view(step // self.feed.steps_per_epoch, rows)
        domains = None if self.feed.domains is None else self.feed.domains[rows]
        return StepInputs(frozen, self.feed.labels[rows], domains)

    def walk(self, augment: bool = False) -> Iterator[FeatureBatch]:
        """Walk the set once in order, for `Method.prepare`; each walk with `augment` meets the next views."""
        view = self._walks if augment and self.stages.walks else None
        self._walks += view is not None
        for rows in torch.arange(len(self.stages), device=self.feed.device).split(256):
            features = self.stages.walk(view, rows)
            domains = None if self.feed.domains is None else self.feed.domains[rows]
            yield FeatureBatch(features, self.feed.labels[rows], domains)
