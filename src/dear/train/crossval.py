"""Cross-validation over training images and over classes: what a method says of images it did not see.

Images are held out in turn, each class in equal parts (`held_out`); classes are held out in turn, so that
their images stand for classes that come later or for images of no class at all (`classes_held_out`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from dear.data.duplicates import Duplicates, find_duplicates
from dear.data.folds import assign_folds
from dear.data.images import ImageSet
from dear.methods.base import Method
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.runs.spec import Spec
from dear.train.feed import stream
from dear.train.frozen import FrozenViews
from dear.train.run import train
from dear.train.teacher import Teacher, repeat_labeled
from dear.utils.digest import of_parts

Logits = dict[str, Tensor]  #: mode -> [n, C]


@dataclass(frozen=True)
class HeldOut:
    """Answers for images that were held out."""

    logits: Logits  #: mode -> [n, C], by the method that was trained without the image
    labels: Tensor  #: the truth, [n]
    rows: Tensor  #: places of the images in the training set, [n]


H = TypeVar("H", bound=HeldOut)


@dataclass(frozen=True)
class HeldOutClasses(HeldOut):
    """Answers of a method that was trained on some of the classes, also for images of the others.

    Columns of logits are the trained classes, then the new ones; the trained ones alone for methods that
    learn their classes. Labels count on into the new classes.
    """

    trained: tuple[str, ...]  #: classes it was trained on
    new: tuple[str, ...]  #: classes that were held out

    def of_trained(self) -> HeldOut:
        """Answers for held-out images of trained classes, among those."""
        first = len(self.trained)
        own = self.labels < first
        logits = {mode: z[own, :first] for mode, z in self.logits.items()}
        return HeldOut(logits, self.labels[own], self.rows[own])


def image_folds(labels: Tensor, folds: int, seed: int, duplicates: Duplicates | None = None) -> list[Tensor]:
    """Places of the images that are held out in each of `folds` turns, ascending.

    Classes are spread evenly, copies of an image are held out together, and a class whose images are all
    copies of one is never held out. The order depends on the seed and the contents of the images alone;
    without `duplicates`, on their places.

    >>> [part.tolist() for part in image_folds(torch.tensor([0, 0, 1, 1, 2]), 2, seed=1)]
    [[1, 3], [0, 2]]
    """
    contents = [str(place).encode() for place in range(len(labels))]
    units = None
    if duplicates is not None:
        contents, units = list(duplicates.contents), duplicates.units
    keys = [of_parts(f"folds {seed} ", content) for content in contents]
    fold = torch.from_numpy(assign_folds(labels.cpu().numpy(), folds, keys, units))
    parts = [(fold == number).nonzero()[:, 0] for number in range(folds)]
    return [part for part in parts if len(part)]


def class_folds(classes: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Labels that are trained and labels that are held out, in two turns that swap halves.

    A half of one class cannot be trained, so three classes give one turn and two give none.

    >>> [len(trained) for trained, _ in class_folds(3, 1)], len(class_folds(4, 1)), class_folds(2, 1)
    ([2], 2, [])
    """
    order = torch.randperm(classes, generator=stream(seed, "class folds", classes))
    half = (classes + 1) // 2
    first, second = order[:half].sort().values, order[half:].sort().values
    turns = [(first, second), (second, first)]
    return [(trained, held) for trained, held in turns if len(trained) >= 2 and len(held) >= 1]


def fresh(method: Method, classes: Sequence[str], rows: Tensor | None = None, seed: int = 1) -> Method:
    """An untrained method with the same options on some of the classes; `rows` are their labels."""
    ids = method.prompts.given
    if ids is not None and rows is not None:
        ids = ids[rows]
    return method.untrained(classes=classes, ids=ids, seed=seed, config=method.settled_config())


@dataclass(frozen=True)
class Trials:
    """How the trainings of a cross-validation are done: always the same way, on parts of one set."""

    images: ImageSet  #: the training set, every image once
    recipe: Recipe  #: how to train, each time
    #: what the frozen backbone makes of all images, where that is computed once for all trainings
    views: FrozenViews | None = None
    #: which of some images, given their labels, an epoch shows how often; None: each once
    repeated: Callable[[Tensor], list[int]] | None = None
    #: called with (steps done, steps in all) of the training that runs
    progress: Callable[[int, int], None] | None = None
    stop: Callable[[], bool] | None = None  #: called after every step; True ends everything with `Paused`
    duplicates: Duplicates | None = None  #: copies among the images; None: they are searched when needed
    #: labels unlabeled images from the labels of each part; in `views` they are behind the labeled ones
    teacher: Teacher | None = None

    def folds(self, count: int) -> list[Tensor]:
        """Places of the images that are held out in each of `count` turns."""
        known = find_duplicates(self.images) if self.duplicates is None else self.duplicates
        return image_folds(self.images.labels, count, self.recipe.seed, known)

    def fit_subset(self, method: Method, rows: Tensor, columns: Tensor | None = None) -> None:
        """Train a fresh method on the images at `rows`; `columns` translates the set's labels to its own."""
        images: ImageSet = self.images
        if self.teacher is not None:
            labeled = len(rows)
            rows, labels = self.teacher.extend(self.images.labels, rows)
            images = self.teacher.join(self.images, rows, labels)
            balance, weight = self.repeated is not None, self.teacher.weight
            rows = rows[torch.tensor(repeat_labeled(labels, labeled, weight, balance), dtype=torch.int64)]
        elif self.repeated is not None:
            rows = rows[torch.tensor(self.repeated(self.images.labels[rows]), dtype=torch.int64)]
        subset: ImageSet = images.subset(rows.tolist())
        if columns is not None:
            subset = Relabeled(subset, columns, method.classes)

        def report(step: int, steps: int, line: Mapping[str, float | int]) -> None:
            if self.progress is not None:
                self.progress(step, steps)

        views = None if self.views is None else self.views.subset(rows)
        train(method, subset, self.recipe, progress=report, stop=self.stop, spec=Spec(), views=views)

    def answers(self, method: Method, rows: Tensor) -> Logits:
        """Logits in every mode of the images at `rows`."""
        known = None if self.views is None else self.views.subset(rows).inference()
        model = Model(method, precision=self.recipe.precision)
        return model.logits(self.images.subset(rows.tolist()), frozen=known)


def held_out(method: Method, trials: Trials, folds: int) -> HeldOut | None:
    """Answers for every image by a method trained without it; None where no class has two images.

    `method`, which is not changed, says what is trained; each part costs (folds - 1) / folds of a training.
    """
    found = list(held_parts(method, trials, folds))
    return joined(found) if found else None


def held_parts(method: Method, trials: Trials, folds: int) -> Iterator[HeldOut]:
    """What `held_out` joins, part by part."""
    images, seed = trials.images, trials.recipe.seed
    for part in trials.folds(folds):
        other = fresh(method, method.classes, None, seed)
        trials.fit_subset(other, (~_marked(part, len(images))).nonzero()[:, 0])
        yield HeldOut(trials.answers(other, part), images.labels[part], part)


def joined(found: Sequence[H]) -> H:
    """The answers of several parts as one."""
    logits = {mode: torch.cat([one.logits[mode] for one in found]) for mode in found[0].logits}
    labels, rows = (torch.cat([getattr(one, name) for one in found]) for name in ("labels", "rows"))
    return replace(found[0], logits=logits, labels=labels, rows=rows)


def classes_held_out(
    method: Method, trials: Trials, folds: int = 2, rotate: bool = False
) -> Iterator[HeldOutClasses]:
    """Answers of methods trained on half of the classes and without a part of the images, each half in turn.

    With `rotate` every part of the images is held out in turn, so that every image is answered once in each
    turn; else the first part alone, and all images of held-out classes are answered.
    """
    parts = trials.folds(folds)
    for labels, others in class_folds(len(method.classes), trials.recipe.seed) if parts else ():
        if rotate:
            turns = [_without(method, trials, labels, others, part, part) for part in parts]
            yield joined(turns)
        else:
            yield _without(method, trials, labels, others, parts[0])


def some_classes_held_out(method: Method, trials: Trials) -> HeldOutClasses:
    """Answers of one method trained without a third of the images and without a quarter of the classes.

    At least two classes are held out where there are four, and none of two. It costs about half a training.
    """
    count, seed = len(method.classes), trials.recipe.seed
    order = torch.randperm(count, generator=stream(seed, "class folds", count))
    few = min(max(2, count // 4), count - 2)
    labels, others = order[few:].sort().values, order[:few].sort().values
    return _without(method, trials, labels, others, trials.folds(3)[0])


def _without(
    method: Method, trials: Trials, labels: Tensor, others: Tensor, part: Tensor, rows: Tensor | None = None
) -> HeldOutClasses:
    """Answers of a method trained on the classes `labels` without the images at `part`.

    They are those for the images at `rows`; None: those of `part` and all of the classes `others`.
    """
    images, seed, given = trials.images, trials.recipe.seed, method.prompts.given
    of_trained = torch.isin(images.labels, labels)
    in_part = _marked(part, len(images))
    names, new = (tuple(method.classes[i] for i in some.tolist()) for some in (labels, others))
    column = torch.full((len(method.classes),), -1)
    column[labels], column[others] = torch.arange(len(labels)), len(labels) + torch.arange(len(others))
    other = fresh(method, names, labels, seed)
    trials.fit_subset(other, (of_trained & ~in_part).nonzero()[:, 0], column)
    if method.open_classes and new:
        ids = None if given is None else given[torch.cat([labels, others])]
        other = other.with_classes((*names, *new), ids=ids)
    rows = (in_part | ~of_trained).nonzero()[:, 0] if rows is None else rows
    return HeldOutClasses(trials.answers(other, rows), column[images.labels[rows]], rows, names, new)


class Relabeled:
    """An image set whose labels count into other class names."""

    def __init__(self, images: ImageSet, columns: Tensor, names: tuple[str, ...]) -> None:
        self._images, self._columns, self.classes = images, columns, names
        self.name, self.template, self.domains = images.name, images.template, images.domains
        self.labels = columns[images.labels]
        self.pixels, self.image, self.key = images.pixels, images.image, images.key

    def __len__(self) -> int:
        return len(self._images)

    def subset(self, indices: Sequence[int]) -> Relabeled:
        """The images at `indices`, with the same classes."""
        return Relabeled(self._images.subset(indices), self._columns, self.classes)

    def select_classes(self, names: Sequence[str]) -> ImageSet:
        """Not needed where sets are only trained on."""
        raise NotImplementedError


def _marked(part: Tensor, count: int) -> Tensor:
    """Whether each place below `count` is in `part`, [count]."""
    marks = torch.zeros(count, dtype=torch.bool)
    marks[part] = True
    return marks
