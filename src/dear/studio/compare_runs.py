"""Two adapted models on the same images: which is better, in which classes, and on which images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dear.data import open_data
from dear.data.images import ImageSet
from dear.errors import DataError, UsageError
from dear.methods.base import Method
from dear.methods.zeroshot import ZeroShot
from dear.report.page import Table, percent, render
from dear.report.run_facts import Compared
from dear.report.run_page import changed_classes, gallery, some
from dear.studio.desk import Desk, Tell
from dear.studio.search import check_folder
from dear.train import Evaluation, evaluate, load_run
from dear.workflows.examine import recommended_modes

FROZEN = "zero-shot CLIP"
_TESTED = 600  # most images, so that an answer comes in seconds


def model_names(desk: Desk) -> list[str]:
    """Models that can be chosen by name."""
    return [FROZEN, *desk.models]


def compare_models(desk: Desk, first: str, second: str, data: str, tell: Tell | None = None) -> str:
    """The comparison as HTML.

    Args:
        desk: the studio's desk.
        first: name of a model, or a run folder on this computer.
        second: the same.
        data: labeled images, as for `open_data`; empty: the images on the desk.
        tell: called with what is being done.

    Raises:
        DearError: a run or the data cannot be opened, or a model cannot name the classes of the data.
    """
    if not first or not second or first == second:
        raise UsageError("choose two different models to compare")
    images = _images(desk, data)
    models = [_model(desk, name, images) for name in (first, second)]
    told = tell or (lambda stage, done, total: None)
    found: list[Evaluation] = []
    for name, model in zip((first, second), models, strict=True):
        fitting = _with_classes(model, images.classes, name)

        def progress(stage: str, done: int, total: int | None, name: str = name) -> None:
            told(f"asking {name}", done, total)

        found.append(evaluate(fitting, images, progress=progress))
    modes = [_mode(model, images.classes) for model in models]
    before = replace(
        found[0],
        answers={"default": found[0].answers[modes[0]]},
        confidence={"default": found[0].confidence[modes[0]]},
    )
    compared = Compared(images, found[1], before, modes[1])
    groups = compared.changes()
    return render(
        "studio/runs.html",
        first=first,
        second=second,
        images=len(images),
        dataset=images.name,
        classes=len(images.classes),
        changes={name: len(rows) for name, rows in groups.items()},
        table=_table((first, second), found, modes),
        gained=changed_classes(compared, better=True),
        lost=changed_classes(compared, better=False),
        fixed=gallery(compared, some(groups["fixed"]), before=True),
        broken=gallery(compared, some(groups["broken"]), before=True),
    )


def _images(desk: Desk, data: str) -> ImageSet:
    name = data.strip()
    if not name:
        images = desk.images
    else:
        images = open_data(name if name.startswith("world:") else str(check_folder(desk, name)), "test")
    if len(images.classes) < 2:
        raise DataError(f"{images.name}: comparing needs labeled images of at least two classes")
    step = -(-len(images) // _TESTED)
    return images.subset(range(0, len(images), step)) if step > 1 else images


def _model(desk: Desk, name: str, images: ImageSet) -> Method:
    if name in desk.models:
        return desk.models[name]
    if name == FROZEN:
        return ZeroShot(desk.clip, images.classes, template=images.template)
    return load_run(Path(check_folder(desk, name)))


def _with_classes(model: Method, classes: Sequence[str], name: str) -> Method:
    """The model on these classes, in this order: both models must choose among the same."""
    if tuple(classes) == model.classes:
        return model
    if not model.open_classes:
        raise UsageError(f"{name}: {model.title} can only name the classes it was trained on")
    return model.with_classes(classes)


def _mode(model: Method, classes: Sequence[str]) -> str:
    trained, new = recommended_modes(model)
    return trained if set(classes) <= set(model.classes) else new


def _table(names: Sequence[str], found: Sequence[Evaluation], modes: Sequence[str]) -> Table:
    rows, marks = [], []
    for name, evaluation, used in zip(names, found, modes, strict=True):
        for mode, accuracy in evaluation.accuracy.items():
            shown = name if mode == "default" else f"{name}, {mode}"
            rows.append((f"{shown} (compared)" if mode == used else shown, percent(accuracy)))
            marks.append("best" if mode == used else "")
    return Table(("model", "accuracy"), tuple(rows), classes=tuple(marks))
