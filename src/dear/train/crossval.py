"""Cross-validation over training images and over classes: predictions for images that were not trained on.

`predict_held_out` holds out images, each class in equal folds; `predict_held_out_classes` holds out classes,
whose images represent classes that are added later, or images of no class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from dear.data.duplicates import Duplicates, find_duplicates
from dear.data.folds import assign_folds
from dear.data.images import ImageSet
from dear.data.stored import BoxedImages
from dear.data.unlabeled import Relabeled
from dear.methods.base import Method
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.runs.spec import Spec
from dear.train.frozen import FrozenViews
from dear.train.run import train
from dear.train.teacher import Teacher, repeat_labeled
from dear.utils.digest import of_parts

Logits = dict[str, Tensor]  #: mode -> [n, C]


@dataclass(frozen=True)
class HeldOut:
    """Predictions for held-out images."""

    logits: Logits  #: mode -> [n, C], by the method that was trained without the image
    labels: Tensor  #: the truth, [n]
    rows: Tensor  #: indices of the images in the training set, [n]


H = TypeVar("H", bound=HeldOut)


@dataclass(frozen=True)
class HeldOutClasses(HeldOut):
    """Predictions of a method that was trained on some of the classes, also for images of the others.

    Columns of logits are the trained classes, then the new ones; only the trained ones for methods that
    cannot name new classes. Labels of new classes follow those of the trained ones.
    """

    trained: tuple[str, ...]  #: classes it was trained on
    new: tuple[str, ...]  #: classes that were held out

    def of_trained(self) -> HeldOut:
        """Predictions for held-out images of trained classes, among the trained classes."""
        count = len(self.trained)
        known = self.labels < count
        logits = {mode: z[known, :count] for mode, z in self.logits.items()}
        return HeldOut(logits, self.labels[known], self.rows[known])


def image_folds(labels: Tensor, folds: int, seed: int, duplicates: Duplicates | None = None) -> list[Tensor]:
    """Indices of the images that are held out in each of `folds` folds, ascending.

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


def class_order(names: Sequence[str], seed: int) -> Tensor:
    """Labels [C] in random order, which depends on the names and the seed, not on the order of the names."""
    return torch.tensor(sorted(range(len(names)), key=lambda label: of_parts(f"{seed} ", names[label])))


def class_folds(names: Sequence[str], seed: int) -> list[tuple[Tensor, Tensor]]:
    """Labels that are trained and labels that are held out, in two splits that swap halves.

    A half of one class cannot be trained, so three classes have one split and two have none.

    >>> [len(trained) for trained, _ in class_folds("abc", 1)], len(class_folds("abcd", 1))
    ([2], 2)
    >>> class_folds("ab", 1)
    []
    """
    order = class_order(names, seed)
    half = (len(names) + 1) // 2
    first, second = order[:half].sort().values, order[half:].sort().values
    halves = [(first, second), (second, first)]
    return [(trained, new) for trained, new in halves if len(trained) >= 2 and len(new) >= 1]


def untrained_copy(
    method: Method, classes: Sequence[str], rows: Tensor | None = None, seed: int = 1
) -> Method:
    """An untrained method with the same options on some of the classes; `rows` are their labels."""
    ids = method.prompts.token_ids
    if ids is not None and rows is not None:
        ids = ids[rows]
    return method.untrained_copy(classes=classes, ids=ids, seed=seed, config=method.settled_config())


@dataclass(frozen=True)
class Trials:
    """Settings that all trainings of a cross-validation share."""

    images: ImageSet  #: the training set, every image once
    recipe: Recipe  #: of every training
    #: frozen stages of all images, if they are computed once for all trainings
    views: FrozenViews | None = None
    #: from labels [n] to the indices that an epoch shows, with repetitions; None: each once
    repeated: Callable[[Tensor], list[int]] | None = None
    #: called with (steps done, steps in all) of the current training
    progress: Callable[[int, int], None] | None = None
    stop: Callable[[], bool] | None = None  #: called after every step; True ends everything with `Paused`
    duplicates: Duplicates | None = None  #: copies among the images; None: searched when needed
    #: labels unlabeled images from the labels of each part; in `views` they follow the labeled ones
    teacher: Teacher | None = None

    @cached_property
    def copies(self) -> Duplicates:
        """Copies among the images."""
        return find_duplicates(self.images) if self.duplicates is None else self.duplicates

    def folds(self, count: int) -> list[Tensor]:
        """Indices of the images of each of `count` folds; boxes of one photo are held out together."""
        copies = self.copies
        if isinstance(self.images, BoxedImages):
            copies = copies.join(self.images.files)
        return image_folds(self.images.labels, count, self.recipe.seed, copies)

    def distinct(self, rows: Tensor) -> Tensor:
        """One index of `rows` [n] per unit and class, ascending: copies add no information about a method.

        Which copy is used depends only on the contents of the images.
        """
        chosen = self.copies.subset(rows.tolist()).distinct(self.images.labels[rows].tolist())
        return rows[chosen]

    def fit_subset(self, method: Method, rows: Tensor, columns: Tensor | None = None) -> None:
        """Train a method on the images at `rows`; `columns` maps labels of the set to those of the method."""
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
            subset = Relabeled(subset, columns[subset.labels], method.classes)

        def report(step: int, steps: int, line: Mapping[str, float | int]) -> None:
            if self.progress is not None:
                self.progress(step, steps)

        views = None if self.views is None else self.views.subset(rows)
        units = self.copies.units_of(rows.tolist())
        train(
            method,
            subset,
            self.recipe,
            progress=report,
            stop=self.stop,
            spec=Spec(),
            views=views,
            units=units,
        )

    def answers(self, method: Method, rows: Tensor) -> Logits:
        """Logits in every mode of the images at `rows`."""
        frozen = None if self.views is None else self.views.subset(rows).inference()
        model = Model(method, precision=self.recipe.precision)
        return model.logits(self.images.subset(rows.tolist()), frozen=frozen)


def predict_held_out(method: Method, trials: Trials, folds: int) -> HeldOut | None:
    """Predictions for every image by a method trained without it; None if no class has two images.

    Of several copies of an image, one is predicted. `method` is not changed; each fold costs
    (folds - 1) / folds of a training.
    """
    parts = list(iter_folds(method, trials, folds))
    return concat_folds(parts) if parts else None


def iter_folds(method: Method, trials: Trials, folds: int) -> Iterator[HeldOut]:
    """The predictions of `predict_held_out`, fold by fold."""
    images, seed = trials.images, trials.recipe.seed
    for fold in trials.folds(folds):
        copy = untrained_copy(method, method.classes, None, seed)
        trials.fit_subset(copy, (~_mask_of(fold, len(images))).nonzero()[:, 0])
        rows = trials.distinct(fold)
        yield HeldOut(trials.answers(copy, rows), images.labels[rows], rows)


def concat_folds(parts: Sequence[H]) -> H:
    """The predictions of several folds as one."""
    logits = {mode: torch.cat([part.logits[mode] for part in parts]) for mode in parts[0].logits}
    labels, rows = (torch.cat([getattr(part, name) for part in parts]) for name in ("labels", "rows"))
    return replace(parts[0], logits=logits, labels=labels, rows=rows)


def predict_held_out_classes(
    method: Method, trials: Trials, folds: int = 2, rotate: bool = False
) -> Iterator[HeldOutClasses]:
    """Predictions of methods trained on each half of the classes and without a fold of the images.

    With `rotate` every fold is held out, so that every image is predicted once per half; otherwise only the
    first fold, and all images of held-out classes are predicted.
    """
    image_parts = trials.folds(folds)
    for labels, others in class_folds(method.classes, trials.recipe.seed) if image_parts else ():
        if rotate:
            yield concat_folds(
                [_predict_without(method, trials, labels, others, fold, fold) for fold in image_parts]
            )
        else:
            yield _predict_without(method, trials, labels, others, image_parts[0])


def predict_some_held_out_classes(method: Method, trials: Trials) -> HeldOutClasses:
    """Predictions of one method trained without a third of the images and without a quarter of the classes.

    At least two of four or more classes are held out, and none of two. It costs about half a training.
    """
    count, order = len(method.classes), class_order(method.classes, trials.recipe.seed)
    new = min(max(2, count // 4), count - 2)
    labels, others = order[new:].sort().values, order[:new].sort().values
    return _predict_without(method, trials, labels, others, trials.folds(3)[0])


def _predict_without(
    method: Method, trials: Trials, labels: Tensor, others: Tensor, fold: Tensor, rows: Tensor | None = None
) -> HeldOutClasses:
    """Predictions of a method trained on the classes `labels` without the images of `fold`.

    They are for the images at `rows`; None: those of `fold` and all of the classes `others`.
    """
    images, seed, token_ids = trials.images, trials.recipe.seed, method.prompts.token_ids
    of_trained = torch.isin(images.labels, labels)
    in_fold = _mask_of(fold, len(images))
    names, new = (tuple(method.classes[i] for i in part.tolist()) for part in (labels, others))
    column = torch.full((len(method.classes),), -1)
    column[labels], column[others] = torch.arange(len(labels)), len(labels) + torch.arange(len(others))
    copy = untrained_copy(method, names, labels, seed)
    trials.fit_subset(copy, (of_trained & ~in_fold).nonzero()[:, 0], column)
    if method.open_classes and new:
        ids = None if token_ids is None else token_ids[torch.cat([labels, others])]
        copy = copy.with_classes((*names, *new), ids=ids)
    rows = trials.distinct((in_fold | ~of_trained).nonzero()[:, 0] if rows is None else rows)
    return HeldOutClasses(trials.answers(copy, rows), column[images.labels[rows]], rows, names, new)


def _mask_of(indices: Tensor, count: int) -> Tensor:
    """A boolean mask [count] that is true at `indices`."""
    mask = torch.zeros(count, dtype=torch.bool)
    mask[indices] = True
    return mask
