"""Cross-validation over training images and over classes: what a method says of images it did not see.

Images are held out in turn, each class in equal parts (`held_out`); classes are left out in turn, so that
their images stand for classes that come later or for images of no class at all (`left_out`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dear._io.memory import in_batches
from dear.data.images import ImageSet
from dear.methods.base import Method
from dear.train.evaluate import BATCH, logits_of
from dear.train.feed import stream
from dear.train.precision import in_precision
from dear.train.recipe import Recipe
from dear.train.run import train

Logits = dict[str, Tensor]  #: mode -> [n, C]


@dataclass(frozen=True)
class HeldOut:
    """Answers for images that were held out.

    Attributes:
        logits: mode -> [n, C], by the method that was trained without the image.
        labels: the truth, [n].
        rows: places of the images in the training set, [n].
    """

    logits: Logits
    labels: Tensor
    rows: Tensor


@dataclass(frozen=True)
class LeftOut:
    """Answers of a method that was trained on some of the classes.

    Attributes:
        trained: classes it was trained on.
        new: classes that were left out.
        logits: mode -> [n, C] of held-out images of trained classes and of all images of left-out ones; the
            columns are trained, then new classes; trained ones alone for methods that learn their classes.
        labels: the column of the truth, [n]; left-out classes count on after the trained ones.
        rows: places of the images in the training set, [n].
        gamma: distance ratio of each column, [C]; 1 for trained classes.
    """

    trained: tuple[str, ...]
    new: tuple[str, ...]
    logits: Logits
    labels: Tensor
    rows: Tensor
    gamma: Tensor


def image_folds(labels: Tensor, folds: int, seed: int) -> list[Tensor]:
    """Places of the images that are held out in each of `folds` turns, ascending.

    The images of each class are dealt out evenly in random order. The only image of a class is never held
    out: without it the class could not be trained.

    >>> [part.tolist() for part in image_folds(torch.tensor([0, 0, 1, 1, 2]), 2, seed=1)]
    [[0, 3], [1, 2]]
    """
    parts: list[list[int]] = [[] for _ in range(folds)]
    dealt = 0
    for label in labels.unique().tolist():
        own = (labels == label).nonzero()[:, 0]
        if len(own) < 2:
            continue
        order = own[torch.randperm(len(own), generator=stream(seed, "folds", label))]
        for row in order.tolist():
            parts[dealt % folds].append(row)
            dealt += 1
        dealt += int(len(own) % folds == 0)  # an even class does not give all first images to one part
    return [torch.tensor(sorted(part), dtype=torch.int64) for part in parts if part]


def class_folds(classes: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Labels that are trained and labels that are left out, in two turns that swap halves.

    A half of one class cannot be trained, so three classes give one turn and two give none.

    >>> [len(kept) for kept, _ in class_folds(3, 1)], len(class_folds(4, 1)), class_folds(2, 1)
    ([2], 2, [])
    """
    order = torch.randperm(classes, generator=stream(seed, "class folds", classes))
    half = (classes + 1) // 2
    first, second = order[:half].sort().values, order[half:].sort().values
    turns = [(first, second), (second, first)]
    return [(kept, left) for kept, left in turns if len(kept) >= 2 and len(left) >= 1]


def fresh(method: Method, classes: Sequence[str], rows: Tensor | None = None, seed: int = 1) -> Method:
    """An untrained method with the same options on some of the classes; `rows` are their labels."""
    ids = method.prompts.given
    if ids is not None and rows is not None:
        ids = ids[rows]
    return type(method)(
        method.clip,
        classes,
        template=method.template,
        roles=method.roles if method.uses_roles else None,
        allow_other_roles=True,  # they were accepted when `method` was built
        ids=ids,
        seed=seed,
        config=method.config,
    )


@torch.no_grad()
def answers_of(
    method: Method, images: ImageSet, precision: str = "auto", features: Tensor | None = None
) -> Logits:
    """Logits [n, C] in every mode on the CPU; known image features [n, E] spare the image tower."""
    method = in_precision(method, precision)
    found: dict[str, list[Tensor]] = {mode: [] for mode in method.modes}

    def some(rows: range) -> Logits:
        if features is not None:
            return method.logits_from_frozen((features[rows.start : rows.stop].to(method.clip.device),))
        return logits_of(method, images, list(rows))

    for _, answers in in_batches(some, len(images), BATCH):
        for mode, logits in answers.items():
            found[mode].append(logits.float().cpu())
    return {mode: torch.cat(parts) for mode, parts in found.items()}


@dataclass(frozen=True)
class Trials:
    """How the trainings of a cross-validation are done: always the same way, on parts of one set.

    Attributes:
        images: the training set, every image once.
        recipe: how to train, each time.
        features: frozen image features [n, E] of all images, for a method that learns from those alone.
        repeated: which of some images, given their labels, an epoch shows how often; None: each once.
        progress: told ("steps", steps done, steps in all) of the training that runs.
        stop: asked after every step; True ends everything with `Paused`.
    """

    images: ImageSet
    recipe: Recipe
    features: Tensor | None = None
    repeated: Callable[[Tensor], list[int]] | None = None
    progress: Callable[[int, int], None] | None = None
    stop: Callable[[], bool] | None = None

    def teach(self, method: Method, rows: Tensor, place: Tensor | None = None) -> None:
        """Train a fresh method on the images at `rows`; `place` translates the set's labels to its own."""
        if self.repeated is not None:
            rows = rows[torch.tensor(self.repeated(self.images.labels[rows]), dtype=torch.int64)]
        lessons: ImageSet = self.images.subset(rows.tolist())
        if place is not None:
            lessons = Relabeled(lessons, place, method.classes)

        def told(step: int, steps: int, line: Mapping[str, float | int]) -> None:
            if self.progress is not None:
                self.progress(step, steps)

        features = None if self.features is None else self.features[rows]
        train(method, lessons, self.recipe, progress=told, stop=self.stop, features=features)

    def answers(self, method: Method, rows: Tensor) -> Logits:
        """Logits in every mode of the images at `rows`."""
        features = None if self.features is None else self.features[rows]
        return answers_of(method, self.images.subset(rows.tolist()), self.recipe.precision, features)


def held_out(method: Method, trials: Trials, folds: int) -> HeldOut | None:
    """Answers for every image by a method trained without it; None where no class has two images.

    Args:
        method: says what is trained: its kind, options, classes and backbone; it is not changed.
        trials: on what and how it is trained.
        folds: how many parts are held out in turn; each costs (folds - 1) / folds of a training.
    """
    images, seed = trials.images, trials.recipe.seed
    parts = image_folds(images.labels, folds, seed)
    if not parts:
        return None
    found: list[Logits] = []
    for part in parts:
        other = fresh(method, method.classes, None, seed)
        trials.teach(other, others(len(images), part))
        found.append(trials.answers(other, part))
    rows = torch.cat(parts)
    logits = {mode: torch.cat([own[mode] for own in found]) for mode in method.modes}
    return HeldOut(logits, images.labels[rows], rows)


def left_out(method: Method, trials: Trials) -> Iterator[LeftOut]:
    """Answers of methods trained on half of the classes, with half of their images; see `LeftOut`."""
    images, seed = trials.images, trials.recipe.seed
    parts = image_folds(images.labels, 2, seed)
    if not parts:
        return
    for kept, left in class_folds(len(method.classes), seed):
        known = torch.isin(images.labels, kept)
        spared = torch.zeros(len(images), dtype=torch.bool)
        spared[parts[0]] = True
        names = tuple(method.classes[i] for i in kept.tolist())
        new = tuple(method.classes[i] for i in left.tolist())
        place = torch.full((len(method.classes),), -1)
        place[kept], place[left] = torch.arange(len(kept)), len(kept) + torch.arange(len(left))
        other = fresh(method, names, kept, seed)
        trials.teach(other, (known & ~spared).nonzero()[:, 0], place)
        gamma = torch.ones(len(names))
        if method.open_classes:
            given = method.prompts.given
            ids = None if given is None else given[torch.cat([kept, left])]
            other = other.with_classes((*names, *new), ids=ids)
            with torch.no_grad():
                ratio = torch.ones(len(method.classes)) if given is not None else other.distance_ratio()
            gamma = torch.cat([gamma, ratio[len(names) :]])
        rows = (spared | ~known).nonzero()[:, 0]
        yield LeftOut(names, new, trials.answers(other, rows), place[images.labels[rows]], rows, gamma)


class Relabeled:
    """An image set whose labels count into other class names."""

    def __init__(self, images: ImageSet, place: Tensor, names: tuple[str, ...]) -> None:
        self._images, self._place, self.classes = images, place, names
        self.name, self.template, self.domains = images.name, images.template, images.domains
        self.labels = place[images.labels]
        self.pixels, self.image, self.key = images.pixels, images.image, images.key

    def __len__(self) -> int:
        return len(self._images)

    def subset(self, indices: Sequence[int]) -> Relabeled:
        """The images at `indices`, with the same classes."""
        return Relabeled(self._images.subset(indices), self._place, self.classes)

    def select_classes(self, names: Sequence[str]) -> ImageSet:
        """Not needed where sets are only trained on."""
        raise NotImplementedError


def others(count: int, part: Tensor) -> Tensor:
    """The places below `count` that are not in `part`."""
    keep = torch.ones(count, dtype=torch.bool)
    keep[part] = False
    return keep.nonzero()[:, 0]
