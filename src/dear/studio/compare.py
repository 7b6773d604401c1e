"""The Compare tab: two models on the same images, and result files of a grid as tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dear.bench.cells import Cell
from dear.bench.outputs import figures_of, page_table
from dear.bench.plan import PROTOCOLS
from dear.bench.store import read_cell
from dear.bench.tables import Result, Sheet
from dear.data import open_data
from dear.data.images import ImageSet, even_subset
from dear.errors import DataError, DearError, UsageError
from dear.methods.zeroshot import ZeroShot
from dear.report.page import Table, percent, render
from dear.runs.evaluate import Evaluation
from dear.runs.model import Model
from dear.studio.state import StudioState, check_folder
from dear.tasks.run_report.facts import Compared
from dear.tasks.run_report.page import changed_classes, gallery, spread_rows
from dear.utils.progress import Progress, silent

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST = 5000
FROZEN = "zero-shot CLIP"
_TESTED = 600  # most images, so that an answer comes in seconds


@dataclass(frozen=True)
class Shown:
    """The results of one protocol: a table as HTML, and figures with their headings."""

    table: str
    figures: tuple[tuple[str, go.Figure], ...]
    cells: int


def result_files(state: StudioState, uploads: Sequence[str], folder: str) -> list[Path]:
    """The files to read: uploads, or those of a grid's folder on this computer."""
    if folder.strip():
        root = check_folder(state, folder.strip())
        inside = root / "cells" if (root / "cells").is_dir() else root
        files = [path for path in sorted(inside.glob("*.json")) if not path.name.endswith(".error.json")]
    else:
        files = [Path(path) for path in uploads]
    if not files:
        raise UsageError("choose result files first: the .json files in the cells folder of `dear bench`")
    if len(files) > MOST:
        raise UsageError(f"{len(files):,} files are too many; the studio compares up to {MOST:,}")
    return files


def compare(files: Sequence[Path]) -> dict[str, Shown]:
    """Tables and figures of result files, by protocol."""
    groups: dict[str, dict[str, tuple[Cell, Result]]] = {}
    for path in files:
        try:
            cell, result = read_cell(path)
        except DearError as error:
            raise DearError(str(error).replace(str(path), path.name)) from None
        groups.setdefault(cell.protocol, {})[cell.key] = (cell, result)
    shown = {}
    for protocol, cells in groups.items():
        if protocol not in PROTOCOLS:
            raise DearError(f"results of the protocol {protocol!r} cannot be shown by this version")
        results = list(cells.values())
        try:
            found = PROTOCOLS[protocol]
            sheet = found.table(found.gather(results))
            plots = figures_of(results)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DearError(f"the {protocol} results are damaged ({error})") from None
        shown[protocol] = Shown(
            sheet_html(sheet), tuple((head, figure) for head, _, figure in plots), len(cells)
        )
    return shown


def sheet_html(sheet: Sheet) -> str:
    """A table of results; published rows are marked."""
    return render("studio/sheet.html", title=sheet.title, table=page_table(sheet), notes=sheet.notes)


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
    found: list[Evaluation] = []
    for name, model in zip((first, second), models, strict=True):
        fitting = _with_classes(model, images.classes, name)

        def progress(stage: str, done: int, total: int | None, name: str = name) -> None:
            report(f"asking {name}", done, total)

        found.append(fitting.evaluate(images, progress=progress))
    modes = [model.pick_mode(None) for model in models]
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
        fixed=gallery(compared, spread_rows(groups["fixed"]), before=True),
        broken=gallery(compared, spread_rows(groups["broken"]), before=True),
    )


def _images(state: StudioState, data: str) -> ImageSet:
    name = data.strip()
    if not name:
        images = state.images
    else:
        images = open_data(name if name.startswith("world:") else str(check_folder(state, name)), "test")
    if len(images.classes) < 2:
        raise DataError(f"{images.name}: comparing needs labeled images of at least two classes")
    return even_subset(images, _TESTED)


def _model(state: StudioState, name: str, images: ImageSet) -> Model:
    if name in state.models:
        return state.models[name]
    if name == FROZEN:
        return Model(ZeroShot(state.clip, images.classes, template=images.template))
    return Model.load(check_folder(state, name))


def _with_classes(model: Model, classes: Sequence[str], name: str) -> Model:
    """The model on these classes, in this order: both models must choose among the same."""
    if tuple(classes) == model.classes:
        return model
    if not model.method.open_classes:
        raise UsageError(f"{name}: {model.method.title} can only name the classes it was trained on")
    return model.with_classes(classes)


def _table(names: Sequence[str], found: Sequence[Evaluation], modes: Sequence[str]) -> Table:
    rows, marks = [], []
    for name, evaluation, used in zip(names, found, modes, strict=True):
        for mode, accuracy in evaluation.accuracy.items():
            shown = name if mode == "default" else f"{name}, {mode}"
            rows.append((f"{shown} (compared)" if mode == used else shown, percent(accuracy)))
            marks.append("best" if mode == used else "")
    return Table(("model", "accuracy"), tuple(rows), classes=tuple(marks))
