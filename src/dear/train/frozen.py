"""Outputs of the frozen part of a backbone for training images, computed ahead of steps or only once.

The frozen stage of a step (crops, frozen layers, frozen features) waits for no learned tensor. With new views
in every epoch that of the next steps is run as one large batch, because a small one leaves a GPU half idle.
With a fixed number of views, or none, it is computed once per image and view (`FrozenViews`) and shared by
trainings on parts of the set. `StepFeed` hands out either, step by step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dear.data.batches import images_at_once
from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.methods.base import Method
from dear.methods.frozen import Batch, FeatureBatch, Frozen, encode_with_focus
from dear.runs.feature_cache import FeatureCache
from dear.runs.recipe import Recipe
from dear.train.feed import Feed
from dear.utils.progress import Progress

IMAGES_AT_ONCE = 256  #: they fill a GPU, and their activations take 160 MB on ViT-B/16
SHARED_VIEWS = 4  #: random views per image for trainings that share them
_LIMIT_BYTES = 4 << 30
_Stage = Literal["training", "inference", "feature"]
_Key = tuple[_Stage, int | None]  # the stage, and which random view; None: the evaluation view


class StepInputs(NamedTuple):
    """The inputs of the learned stage of a step."""

    frozen: Frozen
    labels: Tensor  #: [B]
    domains: Tensor | None = None  #: [B]


@dataclass
class _Memory:
    """Rows [images, ...] by stage and view, and the groups of images that are computed."""

    rows: dict[_Key, Frozen] = field(default_factory=dict)
    groups: set[tuple[_Key, int]] = field(default_factory=set)
    fits: bool | None = None  #: known from the first row


class FrozenViews:
    """The frozen stages of the images of a set, each computed when it is first needed and held in memory.

    A random view depends on the seed, its number and the image's place in the set alone; epochs take the
    views in turn. Stages are computed for fixed groups of images, so that a resumed run computes the same
    bits. Features of the evaluation view come from the cache on disk. Where all views would take more than
    `limit_bytes`, nothing is held: the views are the same, and their stages are computed at every step.

    Args:
        method: whose frozen stages are computed; its learned tensors do not matter.
        images: the set.
        recipe: settings of the views; without `augment` the evaluation view is the only one.
        views: random views per image; None: the recipe's number.
        limit_bytes: bytes that may be held on the device.
        progress: called with (stage, done, total) while features of the whole set are computed.
    """

    def __init__(
        self,
        method: Method,
        images: ImageSet,
        recipe: Recipe,
        views: int | None = None,
        limit_bytes: int = _LIMIT_BYTES,
        progress: Progress | None = None,
    ) -> None:
        self.method = method.in_precision(recipe.precision)
        self.feed = Feed(images, self.method.clip, recipe)
        self.views = max(1, recipe.views if views is None else views)
        self.limit_bytes, self.progress = limit_bytes, progress
        on_cpu = self.feed.device.type == "cpu"
        self.group = images_at_once(self.method.clip) if on_cpu else _at_once(self.feed.size)
        self.rows: Tensor | None = None  #: indices of this subset in the set, [m]; None: all
        self._memory = _Memory()

    def __len__(self) -> int:
        return len(self.feed.images) if self.rows is None else len(self.rows)

    def subset(self, rows: Tensor | Sequence[int]) -> FrozenViews:
        """The images at `rows`; computed stages are shared with this object."""
        other, rows = copy.copy(self), torch.as_tensor(rows, dtype=torch.int64)
        other.rows = rows if self.rows is None else self.rows[rows]
        return other

    def training(self, epoch: int, rows: Sequence[int]) -> Frozen:
        """`Method.frozen_stage` [b, ...] of the images at `rows` in an epoch (from 0)."""
        view = epoch % self.views if self.feed.recipe.augment else None
        return self._read(self._key("training", view), self._places(rows))

    def inference(self) -> Frozen | None:
        """`Method.inference_stage` [m, ...] of the evaluation view of every image; None: too much to hold."""
        key = self._key("inference", None)
        places = self._places(range(len(self)))
        return self._read(key, places) if self._ensure_computed(key, places[:1]) else None

    def features(self, view: int | None, rows: Sequence[int]) -> Frozen:
        """Frozen image features [b, E] of a view of the images at `rows`; None: the evaluation view."""
        return self._read(("feature", view), self._places(rows))

    def _places(self, rows: Sequence[int]) -> list[int]:
        return list(rows) if self.rows is None else self.rows[list(rows)].tolist()

    def _key(self, stage: _Stage, view: int | None) -> _Key:
        """The key of a stage; equal stages of several kinds share one."""
        if stage == "training" and not self.method.reads_frozen:
            stage = "inference"
        return "feature" if stage == "inference" and self.method.cut == "feature" else stage, view

    def _read(self, key: _Key, places: list[int]) -> Frozen:
        if not self._ensure_computed(key, places):
            return self._compute(key, places)
        at = torch.tensor(places).to(self.feed.device, non_blocking=True)
        return self._memory.rows[key].rows(at)

    def _ensure_computed(self, key: _Key, places: list[int]) -> bool:
        """Compute the groups of some images if needed; False if they cannot be held."""
        memory = self._memory
        if key == ("feature", None):
            if key not in memory.rows:
                method, images = self.method, self.feed.images
                known = FeatureCache().frozen(method.clip, images, method.focus, self.progress)
                memory.rows[key] = known.map(lambda part: part.to(self.feed.device))
            return True
        groups = sorted({place // self.group for place in places})
        return all((key, group) in memory.groups or self._compute_group(key, group) for group in groups)

    def _compute_group(self, key: _Key, group: int) -> bool:
        """Compute a group of images; False if its rows cannot be held. Features are always held."""
        images, memory, limited = len(self.feed.images), self._memory, key[0] != "feature"
        if limited and memory.fits is False:
            return False
        places = range(group * self.group, min((group + 1) * self.group, images))
        stage = self._compute(key, places)
        if limited and memory.fits is None:
            each = sum(part[0].numel() * part.element_size() for part in stage if part is not None)
            memory.fits = each * images * (1 + self.views) <= self.limit_bytes
            if not memory.fits:
                return False
        if key not in memory.rows:
            memory.rows[key] = stage.map(lambda part: part.new_empty(images, *part.shape[1:]))
        for rows, part in zip(memory.rows[key], stage, strict=True):
            if rows is not None and part is not None:
                rows[places.start : places.stop] = part
        memory.groups.add((key, group))
        return True

    @torch.no_grad()
    def _compute(self, key: _Key, places: Sequence[int]) -> Frozen:
        stage, view = key
        pixels = self.feed.views(places, view).pixels
        if stage == "feature":
            return encode_with_focus(self.method.clip, pixels, self.method.focus).map(Tensor.float)
        if stage == "training":
            return self.method.frozen_stage(pixels)
        return self.method.inference_stage(pixels)


def _at_once(size: int) -> int:
    """Images that a GPU takes at once; larger ones take more memory, so fewer of them."""
    return max(1, min(IMAGES_AT_ONCE, IMAGES_AT_ONCE * 224**2 // size**2))


def steps_at_once(size: int, batch: int) -> int:
    """How many steps' images run at once.

    >>> steps_at_once(224, 16), steps_at_once(448, 16), steps_at_once(224, 1000)
    (16, 4, 1)
    """
    return max(1, _at_once(size) // batch)


def reads_features(method: Method, recipe: Recipe) -> bool:
    """Whether a training reads only the frozen feature of each image's evaluation view."""
    return method.cut == "feature" and not recipe.augment


def views_for(
    method: Method, images: ImageSet, recipe: Recipe, progress: Progress | None = None
) -> FrozenViews | None:
    """The frozen stages that a training reads; None where every epoch has new views."""
    if not recipe.views and not reads_features(method, recipe):
        return None
    return FrozenViews(method, images, recipe, progress=progress)


def shared_views(method: Method, images: ImageSet, recipe: Recipe) -> FrozenViews | None:
    """Frozen stages for trainings on parts of a set; None where a GPU records steps, which is faster."""
    views = views_for(method, images, recipe)
    if views is not None or (not method.dynamic and not method.quick and method.clip.device.type == "cuda"):
        return views
    return FrozenViews(method, images, recipe, SHARED_VIEWS)


class StepFeed:
    """The inputs of every step of a training.

    Args:
        method: bound to the backbone that it trains with.
        feed: determines the images of each step.
        steps: number of steps of the run.
        views: frozen stages of the feed's images; None: every epoch has new views.
        ahead: compute the frozen stage of several steps at once. Groups of steps do not depend on where a run
            resumed.
    """

    def __init__(
        self, method: Method, feed: Feed, steps: int, views: FrozenViews | None = None, ahead: bool = False
    ) -> None:
        if views is not None and len(views) != len(feed.images):
            raise UsageError(f"views must be for the {len(feed.images)} training images, got {len(views)}")
        if views is not None and feed.recipe.augment and not views.feed.recipe.augment:
            raise UsageError("features computed in advance need augment = False in the recipe")
        self.method, self.feed, self.steps, self.views = method, feed, steps, views
        self.span = steps_at_once(feed.size, feed.recipe.batch) if ahead else 1
        self._group, self._parts = -1, list[StepInputs]()
        self._passes = 0  # with random views

    def at(self, step: int) -> StepInputs:
        """The inputs of a training step (from 0)."""
        if self.views is not None:
            rows = self.feed.indices(step)
            frozen = self.views.training(step // self.feed.steps_per_epoch, rows)
            return StepInputs(frozen, *self.feed.labels_and_domains(rows))
        group, number = divmod(step, self.span)
        if group != self._group:
            self._parts = []  # its memory is free for the next
            self._parts = self._compute(group * self.span)
            self._group = group
        return self._parts[number]

    def _compute(self, first: int) -> list[StepInputs]:
        """The inputs of the steps from `first` on, as many as run at once."""
        batch, counts = self.feed.span(first, min(first + self.span, self.steps))
        with torch.no_grad():
            frozen = self.method.frozen_stage(batch.pixels)
        stages = frozen.split(counts)
        labels = batch.labels.split(counts)
        domains = [None] * len(counts) if batch.domains is None else batch.domains.split(counts)
        return [StepInputs(*parts) for parts in zip(stages, labels, domains, strict=True)]

    def batches(self, augment: bool = False) -> Iterator[Batch | FeatureBatch]:
        """Iterate over the set once in order, for `Method.prepare`; `augment` draws new views each time.

        A method that reads frozen features reads those of the shared views, which are computed once.
        """
        if self.views is None or not (self.method.reads_frozen or self.method.cut == "feature"):
            yield from self.feed.batches(augment)
            return
        view = self._passes if augment else None
        self._passes += augment
        for rows in torch.arange(len(self.views)).split(256):
            places = rows.tolist()
            stage = self.views.features(view, places)
            yield FeatureBatch(
                stage.x, *self.feed.labels_and_domains(places), stage.focus, self.feed.units_of(places)
            )
