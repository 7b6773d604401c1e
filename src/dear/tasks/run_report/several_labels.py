"""The page about a model with several labels per image: average precision, F1, and labels that it misses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from dear.data.images import ImageSet
from dear.errors import DataError
from dear.methods.zeroshot import ZeroShot
from dear.report import figures
from dear.report.page import MODE_TERMS, Table, Thumbnail, iframe, percent, render, thumbnail
from dear.runs.model import Model
from dear.runs.several_labels import SeveralLabelsEvaluation
from dear.utils.files import PathLike, write_atomic
from dear.utils.progress import Progress

if TYPE_CHECKING:
    import pandas as pd

WORST, SHOWN = 8, 12  #: classes with the lowest average precision, and images of each kind of mistake
TERMS = {
    "average precision": "how well the images are ranked by the probability of one class: 100% where every "
    "image with the label comes before every image without it",
    "mAP": "the mean of the average precision over classes",
    "F1": "how well the answered labels match the true ones: the harmonic mean of the share of answered "
    "labels that are right and the share of true labels that are answered; micro: over all labels, macro: "
    "the mean over classes",
    "threshold": "the probability from which an image has the label, chosen by cross-validation",
    "interval": "90% of repeated draws of test images give a value inside it",
    "zero-shot": "the frozen backbone, before adaptation: it ranks images by a prompt for each class",
    **MODE_TERMS,
}


@dataclass(frozen=True, eq=False)
class SetFacts:
    """What a report about a model with several labels shows."""

    images: ImageSet
    adapted: SeveralLabelsEvaluation
    frozen: SeveralLabelsEvaluation  #: ranks only
    mode: str
    thresholds: Mapping[str, float]  #: by class; empty without a calibration
    method: str  #: title of the method
    backbone: str  #: name and fingerprint
    template: str
    parameters: int  #: how many were learned
    zero_shot: bool = False  #: nothing was adapted
    #: mAP of zero-shot and of the adapted model on classes that were not trained, and their names
    new: tuple[float, float, tuple[str, ...]] | None = None

    @cached_property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """90% intervals of the mAP ("") and of each class's average precision."""
        return self.adapted.intervals(self.mode)

    @cached_property
    def precision(self) -> dict[str, float]:
        """Average precision by class."""
        return self.adapted.per_class[self.mode]

    @property
    def worst(self) -> list[str]:
        """Classes with the lowest average precision, the lowest first."""
        return sorted(self.precision, key=self.precision.__getitem__)[:WORST]

    def counts(self) -> dict[str, tuple[int, int, int]]:
        """By class: images with the label, answered with it, and both."""
        truth, answers = self.adapted.labels, self.adapted.answers[self.mode]
        columns = (truth, answers, truth & answers)
        values = zip(*(column.sum(dim=0).tolist() for column in columns), strict=True)
        return dict(zip(self.adapted.classes, values, strict=True))

    def mistakes(self, missed: bool) -> list[tuple[int, int]]:
        """(image, class) of labels that are missed, or answered wrongly, the most confident mistake first."""
        if not self.adapted.calibrated:
            return []
        truth, answers = self.adapted.labels, self.adapted.answers[self.mode]
        wrong = truth & ~answers if missed else answers & ~truth
        scores = self.adapted.confidence[self.mode]
        places = wrong.nonzero()
        order = scores[wrong].argsort(descending=not missed, stable=True)
        return [(int(row), int(column)) for row, column in places[order].tolist()]

    def to_frame(self) -> pd.DataFrame:
        """One row per class: images, average precision of zero-shot and of every mode. Needs pandas."""
        frame = self.adapted.to_frame()
        frame.insert(1, "zero-shot", self.frozen.per_class["default"])
        return frame.reset_index()

    def write_page(
        self,
        path: PathLike,
        log: Sequence[Mapping[str, float | int]] = (),
        notes: Mapping[str, str] | None = None,
    ) -> None:
        """Write the page to a file, whole or not at all."""
        write_atomic(path, set_page(self, log, notes))

    def _repr_html_(self) -> str:
        return iframe(set_page(self))


def examine_sets(
    model: Model,
    images: ImageSet,
    other: ImageSet | None = None,
    mode: str | None = None,
    progress: Progress | None = None,
) -> SetFacts:
    """Measure a model with several labels per image, and the frozen one on the same images.

    Args:
        model: with several labels.
        images: labeled test images; those of none of the trained classes count as images without a label.
        other: images of classes that were not trained.
        mode: the mode to report on; None: the usual one.
        progress: called with ("images", images done, images in all).

    Raises:
        DataError: no class of the images was trained.
    """
    mode, trained = model.pick_mode(mode), set(model.classes)
    known = [name for name in images.classes if name in trained]
    if not known:
        raise DataError(
            f"{images.name}: has none of the classes the model was trained on "
            f"({', '.join(model.classes[:3])}…); name images of those classes",
            hint="report-data",
        )
    if len(known) < len(images.classes):
        images = images.select_classes(known)
    adapted, frozen = _evaluate(model, images, progress)
    new = None
    if other is not None and model.method.open_classes:
        after, before = _evaluate(model.with_classes(other.classes), other, progress)
        new = before.mean_precision["default"], after.mean_precision[mode], other.classes
    limits = [] if model.calibration is None else model.calibrator.label_thresholds(mode).tolist()
    return SetFacts(
        images=images,
        adapted=adapted,
        frozen=frozen,
        mode=mode,
        thresholds=dict(zip(model.classes, limits, strict=False)),
        method=model.method.title,
        backbone=f"{model.clip.name} ({model.clip.fingerprint[:19]}…)",
        template=model.template,
        parameters=model.method.learned_parameters,
        zero_shot=isinstance(model.method, ZeroShot),
        new=new,
    )


def _evaluate(
    model: Model, images: ImageSet, progress: Progress | None
) -> tuple[SeveralLabelsEvaluation, SeveralLabelsEvaluation]:
    adapted = model.evaluate(images, progress=progress)
    frozen = model.zero_shot().evaluate(images, progress=progress)
    assert isinstance(adapted, SeveralLabelsEvaluation)
    assert isinstance(frozen, SeveralLabelsEvaluation)
    return adapted, frozen


def set_page(
    facts: SetFacts, log: Sequence[Mapping[str, float | int]] = (), notes: Mapping[str, str] | None = None
) -> str:
    """The page as one HTML text that needs nothing else; `log` and `notes` as for `run_page`."""
    before, after = facts.frozen.per_class["default"], facts.precision
    figure = figures.class_accuracy(before, None if facts.zero_shot else after)
    missed, wrong = facts.mistakes(missed=True), facts.mistakes(missed=False)
    return render(
        "run_sets.html",
        title=f"{facts.method} on {facts.images.name}",
        facts=facts,
        tiles=_tiles(facts),
        terms={
            word: text
            for word, text in TERMS.items()
            if word in facts.adapted.answers or word not in MODE_TERMS
        },
        modes=_modes(facts),
        figure=figure,
        worst=_class_table(facts, facts.worst),
        classes=_class_table(facts, sorted(after, key=str.casefold)),
        missed=_gallery(facts, missed[:SHOWN]),
        wrong=_gallery(facts, wrong[:SHOWN]),
        numbers=(len(missed), len(wrong)),
        curve=figures.training_curve(log) if log else None,
        notes={
            "method": facts.method,
            "backbone": facts.backbone,
            "prompt": facts.template,
            "learned parameters": f"{facts.parameters:,}",
            **(notes or {}),
        },
    )


def _tiles(facts: SetFacts) -> list[tuple[str, str]]:
    """The key figures."""
    mean, before = facts.adapted.mean_precision[facts.mode], facts.frozen.mean_precision["default"]
    low, high = facts.intervals[""]
    tiles = [(percent(mean), f"mAP ({percent(low)} to {percent(high)})")]
    if not facts.zero_shot:
        tiles.append((f"{100 * (mean - before):+.1f}", f"points compared with zero-shot’s {percent(before)}"))
    if facts.adapted.calibrated:
        f1 = facts.adapted.f1(facts.mode)
        tiles += [
            (percent(f1["micro_f1"]), "micro F1"),
            (percent(f1["macro_f1"]), "macro F1"),
            (percent(facts.adapted.accuracy[facts.mode]), "images with exactly the right labels"),
        ]
    if facts.new is not None:
        tiles.append(
            (
                percent(facts.new[1]),
                f"mAP of {len(facts.new[2])} new classes (zero-shot {percent(facts.new[0])})",
            )
        )
    return tiles


def _modes(facts: SetFacts) -> Table:
    """Figures of zero-shot and every mode; that of the page is marked."""
    rows: list[tuple[str, ...]] = [("zero-shot", percent(facts.frozen.mean_precision["default"]), "", "")]
    for mode, mean in facts.adapted.mean_precision.items() if not facts.zero_shot else ():
        f1 = facts.adapted.f1(mode).values() if facts.adapted.calibrated else ()
        rows.append((mode, percent(mean), *([percent(value) for value in f1] or ["", ""])))
    marks = tuple("best" if row[0] == facts.mode else "" for row in rows)
    return Table(("mode", "mAP", "micro F1", "macro F1"), tuple(rows), classes=marks)


def _class_table(facts: SetFacts, names: Sequence[str]) -> Table:
    """Average precision with its interval, threshold, and counts of some classes."""
    before, counts, rows = facts.frozen.per_class["default"], facts.counts(), []
    for name in names:
        images, answered, both = counts[name]
        low, high = facts.intervals.get(name, (float("nan"), float("nan")))
        row = [name, str(images), percent(before[name])]
        if not facts.zero_shot:
            row += [percent(facts.precision[name])]
        row.append(f"{percent(low)} to {percent(high)}")
        if facts.thresholds:
            row += [f"{facts.thresholds[name]:.2f}", f"{both} of {answered}", f"{both} of {images}"]
        rows.append(tuple(row))
    columns = ["class", "images", "zero-shot"]
    columns += [] if facts.zero_shot else ["average precision"]
    columns += ["interval"]
    columns += ["threshold", "answers right", "labels answered"] if facts.thresholds else []
    return Table(tuple(columns), tuple(rows))


def _gallery(facts: SetFacts, mistakes: Sequence[tuple[int, int]]) -> list[Thumbnail]:
    """Images with the label in question, the true labels, and the answered ones."""
    names, values = facts.adapted.classes, facts.adapted.confidence[facts.mode]
    truth, answers = facts.adapted.labels, facts.adapted.answers[facts.mode]
    items = []
    for row, column in mistakes:
        labels = [_label_names(names, rows[row]) for rows in (truth, answers)]
        lines = (
            ("wrong", f"{names[column]} ({percent(float(values[row, column]))})"),
            ("soft", f"labels: {labels[0]}"),
            ("soft", f"answered: {labels[1]}"),
        )
        text = f"labels {labels[0]}, answered {labels[1]}"
        items.append(Thumbnail(thumbnail(facts.images.image(row)), text, lines))
    return items


def _label_names(names: Sequence[str], row: Tensor) -> str:
    return ", ".join(name for name, has in zip(names, row.tolist(), strict=True) if has) or "none"
