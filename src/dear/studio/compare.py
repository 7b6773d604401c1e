"""The Compare tab: two models on the same images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dear.data import open_data
from dear.data.images import ImageSet, even_subset, require_one_label
from dear.errors import DataError, UsageError
from dear.methods.zeroshot import ZeroShot
from dear.report.page import Table, percent, render
from dear.runs.evaluation import Evaluation
from dear.runs.model import Model
from dear.studio.state import StudioState, check_folder
from dear.tasks.run_report.facts import Compared
from dear.tasks.run_report.page import changed_classes, gallery, spread_rows
from dear.utils.progress import Progress, silent

FROZEN = "frozen backbone"
_TESTED = 600  # images at most


def model_names(state: StudioState) -> list[str]:
    """Models that can be chosen by name."""
    return [FROZEN, *state.models]


def compare_models(
    state: StudioState, first: str, second: str, data: str, progress: Progress | None = None
) -> str:
    """The comparison as HTML.

    Models are names or run folders on this computer; `data` is as for `open_data`, or empty for the images of
    the studio.
    """
    if not first or not second or first == second:
        raise UsageError("choose two different models to compare")
    images = _images(state, data)
    models = [_model(state, name, images) for name in (first, second)]
    report = progress or silent

    def evaluate(name: str, model: Model) -> Evaluation:
        return _with_classes(model, images.classes, name).evaluate(
            images, progress=lambda stage, done, total: report(f"evaluating {name}", done, total)
        )

    evaluations = [evaluate(name, model) for name, model in zip((first, second), models, strict=True)]
    modes = [model.pick_mode(None) for model in models]
    before = replace(
        evaluations[0],
        answers={"default": evaluations[0].answers[modes[0]]},
        confidence={"default": evaluations[0].confidence[modes[0]]},
    )
    compared = Compared(images, evaluations[1], before, modes[1])
    groups = compared.changes()
    return render(
        "studio/runs.html",
        first=first,
        second=second,
        images=len(images),
        dataset=images.name,
        classes=len(images.classes),
        changes={name: len(rows) for name, rows in groups.items()},
        table=_table((first, second), evaluations, modes),
        gained=changed_classes(compared, True, ("first model", "second model")),
        lost=changed_classes(compared, False, ("first model", "second model")),
        fixed=gallery(compared, spread_rows(groups["fixed"]), "first model"),
        broken=gallery(compared, spread_rows(groups["broken"]), "first model"),
    )


def _images(state: StudioState, data: str) -> ImageSet:
    name = data.strip()
    if not name:
        images = state.images
    else:
        images = open_data(name if name.startswith("world:") else str(check_folder(state, name)), "test")
    require_one_label(images, "a comparison")
    if len(images.classes) < 2:
        raise DataError(
            f"{images.name}: a comparison needs images of at least two classes, got {len(images.classes)}"
        )
    return even_subset(images, _TESTED)


def _model(state: StudioState, name: str, images: ImageSet) -> Model:
    if name == FROZEN:
        return Model(ZeroShot(state.clip, images.classes, template=images.template))
    model = state.models[name] if name in state.models else Model.load(check_folder(state, name))
    model.require_one_label("a comparison")
    return model


def _with_classes(model: Model, classes: Sequence[str], name: str) -> Model:
    """The model on these classes, in this order: both models must choose among the same."""
    if tuple(classes) == model.classes:
        return model
    if not model.method.open_classes:
        raise UsageError(f"{name}: {model.method.title} can only name the classes it was trained on")
    return model.with_classes(classes)


def _table(names: Sequence[str], evaluations: Sequence[Evaluation], modes: Sequence[str]) -> Table:
    rows, marks = [], []
    for name, evaluation, used in zip(names, evaluations, modes, strict=True):
        for mode, accuracy in evaluation.accuracy.items():
            shown = name if mode == "default" else f"{name}, {mode}"
            compared = mode == used and len(evaluation.accuracy) > 1
            rows.append((f"{shown} (compared)" if compared else shown, percent(accuracy)))
            marks.append("best" if compared else "")
    return Table(("model", "accuracy"), tuple(rows), classes=tuple(marks))
