"""Datasets of Hugging Face with columns `image` and `label`: on the hub, or in a folder of `save_to_disk`.

A dataset whose only split is `train` is treated as data without splits: a fifth of each class is held out for
testing. Rows without a label are unlabeled images.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dear.data.images import TEMPLATE, UNLABELED, DataSource
from dear.data.names import SPLITS, check_classes, check_template, natural_key, readable
from dear.data.shots import pick_split
from dear.data.stored import CellImages, DatasetCells
from dear.errors import DataError, reason_of
from dear.utils.extras import missing_extra

HUB = "hf://datasets/"


def is_dataset(spec: str) -> bool:
    """Whether a name is that of a dataset on the hub, or of a folder that `datasets` saved."""
    folder = Path(spec).expanduser()
    saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    return spec.startswith(HUB) or saved


def open_dataset(spec: str, split: str, template: str | None = None, name: str | None = None) -> CellImages:
    """The labeled images of a split: "train", "test", "val", or "all"; classes are those of all splits."""
    parts = _load(spec)
    unsplit = len(parts) == 1 and next(iter(parts)) in ("all", *SPLITS["train"])
    selected = list(parts) if split == "all" or unsplit else [_find_split(parts, split, spec)]
    _require_columns(parts, selected, ("image", "label"), spec)
    raw, labels = _labels(parts)
    rows = [row for row in _rows(parts, selected) if labels[row] != UNLABELED]
    if not rows:
        raise DataError(f"{spec}: no row has a label; a dataset needs some")
    if unsplit and split != "all":
        indices = pick_split([f"row {row}" for row in rows], [labels[row] for row in rows], split, spec)
        rows = [rows[index] for index in indices]
    return CellImages(
        name=name or Path(spec.removeprefix(HUB)).name,
        classes=check_classes(raw, [readable(label) for label in raw], spec),
        template=check_template(TEMPLATE if template is None else template),
        reader=DatasetCells(parts.values(), "image", spec),
        rows=tuple(rows),
        labels=torch.tensor([labels[row] for row in rows], dtype=torch.int64),
        source=DataSource(spec if spec.startswith(HUB) else os.path.abspath(Path(spec).expanduser())),
    )


def open_unlabeled_dataset(spec: str) -> CellImages:
    """The training images of a dataset, or all where it has no training split; labels are not read."""
    parts = _load(spec)
    selected = [name for name in SPLITS["train"] if name in parts] or list(parts)
    _require_columns(parts, selected, ("image",), spec)
    rows = _rows(parts, selected)
    labels = torch.full((len(rows),), UNLABELED, dtype=torch.int64)
    reader = DatasetCells(parts.values(), "image", spec)
    return CellImages(Path(spec.removeprefix(HUB)).name, (), TEMPLATE, reader, tuple(rows), labels)


def _load(spec: str) -> dict[str, Any]:
    """The splits of a dataset; a saved `Dataset` without splits is "all"."""
    try:
        import datasets
    except ModuleNotFoundError:
        raise missing_extra("a Hugging Face dataset", "datasets") from None
    try:
        if spec.startswith(HUB):
            loaded: Any = datasets.load_dataset(spec.removeprefix(HUB))
        else:
            loaded = datasets.load_from_disk(Path(spec).expanduser())
    except Exception as error:  # network, missing files, scripts that are not executed
        raise DataError(f"{spec}: cannot be loaded ({reason_of(error)})") from None
    return dict(loaded) if hasattr(loaded, "keys") else {"all": loaded}


def _find_split(parts: dict[str, Any], split: str, spec: str) -> str:
    """The dataset's name of a split; validation images are for testing where there are no test images."""
    names = (split, *SPLITS.get(split, ()), *(SPLITS["val"] if split == "test" else ()))
    for name in names:
        if name in parts:
            return name
    raise DataError(f"{spec}: has no split {split!r}; it has {', '.join(parts)}")


def _require_columns(
    parts: dict[str, Any], selected: Sequence[str], columns: Sequence[str], spec: str
) -> None:
    for name in selected:
        for column in columns:
            if column not in parts[name].column_names:
                raise DataError(
                    f"{spec}: has no column {column!r}; it has {', '.join(parts[name].column_names)}"
                )


def _rows(parts: dict[str, Any], selected: Sequence[str]) -> list[int]:
    """Row numbers of some splits; rows are counted through all splits, so that their names are unique."""
    rows: list[int] = []
    start = 0
    for name, table in parts.items():
        if name in selected:
            rows += range(start, start + len(table))
        start += len(table)
    return rows


def _labels(parts: dict[str, Any]) -> tuple[list[str], list[int]]:
    """The classes of all splits as they are written, and the label of each row; `UNLABELED` for none."""
    texts: list[str] = []
    names: dict[str, None] = {}  # in the order of the dataset's own class list, if it has one
    listed = True
    for table in parts.values():
        if "label" not in table.column_names:
            texts += [""] * len(table)
            continue
        feature, values = table.features["label"], table["label"][:]
        if hasattr(feature, "names"):
            names |= dict.fromkeys(feature.names)
            texts += ["" if value is None or value < 0 else feature.names[value] for value in values]
        else:
            listed = False
            texts += ["" if value is None else str(value) for value in values]
    raw = list(names) if listed else sorted({text for text in texts if text}, key=natural_key)
    label_of = {text: label for label, text in enumerate(raw)}
    return raw, [label_of.get(text, UNLABELED) for text in texts]
