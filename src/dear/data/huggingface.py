"""Datasets of Hugging Face with columns `image` and `label`: on the hub, or in a folder of `save_to_disk`.

A dataset with one split, `train`, is treated as data without splits: a fifth of each class is held out for
testing. Rows without a label are unlabeled images.
"""

from __future__ import annotations

import os
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
    """The labeled images of a split: "train", "test", "val", or "all"."""
    parts = _load(spec)
    unsplit = len(parts) == 1 and next(iter(parts)) in ("all", *SPLITS["train"])
    table = _merge(parts, spec) if split == "all" or unsplit else _part(parts, split, spec)
    if "label" not in table.column_names:
        raise DataError(f"{spec}: has no column 'label'; it has {', '.join(table.column_names)}")
    raw, labels = _labels(table)
    rows = [row for row, label in enumerate(labels) if label != UNLABELED]
    if not rows:
        raise DataError(f"{spec}: no row has a label; a dataset needs some")
    if unsplit and split != "all":
        indices = pick_split([f"row {row}" for row in rows], [labels[row] for row in rows], split, spec)
        rows = [rows[index] for index in indices]
    return CellImages(
        name=name or Path(spec.removeprefix(HUB)).name,
        classes=check_classes(raw, [readable(label) for label in raw], spec),
        template=check_template(TEMPLATE if template is None else template),
        reader=_cells(table, spec),
        rows=tuple(rows),
        labels=torch.tensor([labels[row] for row in rows], dtype=torch.int64),
        source=DataSource(spec if spec.startswith(HUB) else os.path.abspath(Path(spec).expanduser())),
    )


def open_unlabeled_dataset(spec: str) -> CellImages:
    """The training images of a dataset, or all where it has no training split; labels are not read."""
    parts = _load(spec)
    table = _part(parts, "train", spec) if set(SPLITS["train"]) & set(parts) else _merge(parts, spec)
    count = len(table)
    labels = torch.full((count,), UNLABELED, dtype=torch.int64)
    name = Path(spec.removeprefix(HUB)).name
    return CellImages(name, (), TEMPLATE, _cells(table, spec), tuple(range(count)), labels)


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


def _part(parts: dict[str, Any], split: str, spec: str) -> Any:
    """The table of a split; validation images are for testing where there are no test images."""
    names = (split, *SPLITS.get(split, ()), *(SPLITS["val"] if split == "test" else ()))
    table = next((parts[name] for name in names if name in parts), None)
    if table is None:
        raise DataError(f"{spec}: has no split {split!r}; it has {', '.join(parts)}")
    return table


def _merge(parts: dict[str, Any], spec: str) -> Any:
    """The rows of all splits as one table."""
    import datasets

    try:
        return datasets.concatenate_datasets(list(parts.values()))
    except ValueError as error:
        raise DataError(f"{spec}: its splits have different columns ({reason_of(error)})") from None


def _cells(table: Any, spec: str) -> DatasetCells:
    """The reader of the column `image`."""
    import datasets

    if "image" not in table.column_names:
        raise DataError(f"{spec}: has no column 'image'; it has {', '.join(table.column_names)}")
    return DatasetCells(table.cast_column("image", datasets.Image(decode=False)), "image", spec)


def _labels(table: Any) -> tuple[list[str], list[int]]:
    """The classes as they are written, and the label of each row; `UNLABELED` where there is none."""
    feature, values = table.features["label"], table["label"][:]
    if hasattr(feature, "names"):
        return list(feature.names), [UNLABELED if value is None else int(value) for value in values]
    texts = ["" if value is None else str(value) for value in values]
    raw = sorted({text for text in texts if text}, key=natural_key)
    label_of = {text: label for label, text in enumerate(raw)}
    return raw, [label_of.get(text, UNLABELED) for text in texts]
