"""Exchange with other labeling tools: Label Studio tasks with predictions, and answers from its exports.

Formats: https://labelstud.io/guide/predictions and https://labelstud.io/guide/export (JSON, JSON-MIN, CSV).
Predictions are shown by a project with an `Image` named image and `Choices` named choice. In JSON-MIN and CSV
the answer has the name of the control, which other projects choose freely.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from dear.data.open import open_folder, open_with_splits
from dear.data.paths import read_list
from dear.errors import DataError
from dear.tasks.labeling.answers import Answer, AnswerFile, read_labels
from dear.tasks.labeling.next import NextLabels
from dear.utils.files import PathLike, read_json, write_json

#: fields of JSON-MIN and CSV that Label Studio adds to those of the task and the answer
FIELDS = {"id", "annotator", "annotation_id", "created_at", "updated_at", "lead_time", "image", "path"}
UPLOAD_PREFIX = re.compile("[0-9a-f]{8}-")  #: Label Studio puts it before the names of uploaded files
LOCAL_FILES = "/data/local-files/?d="  #: where Label Studio serves files of its own machine


def label_studio_tasks(chosen: NextLabels, prefix: str = LOCAL_FILES) -> list[dict[str, Any]]:
    """Label Studio tasks, the guess of the model as a prediction.

    Args:
        chosen: from `label_next`.
        prefix: put before each path to form the address of the image.

    Example:
        >>> from dear.tasks.labeling.next import Choice
        >>> tasks = label_studio_tasks(NextLabels((Choice("a.jpg", "cat", 0.5),), ("cat", "dog"), ()))
        >>> tasks[0]["predictions"][0]["result"][0]["value"]
        {'choices': ['cat']}
    """
    tasks = []
    for choice in chosen.choices:
        task: dict[str, Any] = {"data": {"image": prefix + choice.path, "path": choice.path}}
        if choice.guess:
            result = {
                "from_name": "choice",
                "to_name": "image",
                "type": "choices",
                "value": {"choices": [choice.guess]},
            }
            score = round(choice.confidence, 4)
            task["predictions"] = [{"model_version": "dear", "score": score, "result": [result]}]
        tasks.append(task)
    return tasks


def write_tasks(chosen: NextLabels, out: PathLike) -> None:
    """Write Label Studio tasks as JSON."""
    write_json(out, label_studio_tasks(chosen))


@dataclass(frozen=True)
class Imported:
    """What `add_labels` did."""

    added: int  #: labels of the source
    labels: dict[str, str]  #: class name by path of the table, those it had before included
    classes: tuple[str, ...]  #: in the order in which they appeared

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"added": self.added, "labels": len(self.labels), "classes": list(self.classes)}


def add_labels(source: PathLike, out: PathLike, *, images: PathLike | None = None) -> Imported:
    """Add the labels of another tool to a table of labels; those of class folders with their splits.

    Args:
        source: see `import_labels`.
        out: the table of labels, `.csv`; it is written if it is missing.
        images: see `import_labels`.

    Raises:
        DataError: the source or the table is malformed.
    """
    labels = import_labels(source, images)
    file = AnswerFile(out)
    file.add([Answer(path, "label", name) for path, name in labels.items()])
    if Path(source).is_dir() and images is None:
        every, splits = open_with_splits(source)
        if len(set(splits)) > 1:
            keys = [every.key(index) for index in range(len(every))]
            file.start_with({}, dict(zip(keys, splits, strict=True)))
    table = file.read()
    return Imported(len(labels), table.labels, table.classes)


def import_labels(source: PathLike, images: PathLike | None = None) -> dict[str, str]:
    """Class names by path from a Label Studio export, a table of labels, or class folders.

    Args:
        source: `.json` (JSON or JSON-MIN), `.csv` (Label Studio's, or one with the columns path and label),
            or a folder of class folders.
        images: the folder of the images; addresses of a tool that end like one of its files are read as that
            file. None: paths stay as they are.

    Raises:
        DataError: the source is malformed, an image has two labels, or there is no label.
    """
    path = Path(source)
    if path.is_dir():
        folder = open_folder(path, "all")
        names = [folder.classes[label] for label in folder.labels.tolist()]
        labels = dict(zip(folder.paths, names, strict=True))
    elif path.suffix.lower() == ".json":
        labels = _unique_labels(_json_labels(path), path)
    elif path.suffix.lower() == ".csv":
        header = next(csv.reader(io.StringIO(read_list(path, "table of labels"), newline="")), [])
        plain = "path" in header or "image" not in header
        labels = read_labels(path) if plain else _unique_labels(_csv_labels(path), path)
    else:
        raise DataError(f"{path}: is neither a folder nor a .json or .csv file")
    if not labels:
        raise DataError(f"{path}: holds no label")
    return labels if images is None else _match_files(labels, Path(images), path)


def _json_labels(path: Path) -> Iterable[tuple[str, str]]:
    tasks = read_json(path, "export of Label Studio")
    if not isinstance(tasks, list):
        raise DataError(f"{path}: an export of Label Studio is a list of tasks, got {type(tasks).__name__}")
    for number, task in enumerate(tasks):
        if not isinstance(task, dict):
            raise DataError(f"{path}: task {number} is not an object")
        if "annotations" not in task:  # JSON-MIN
            yield from _flat(task, f"{path}, task {number}")
            continue
        address = _address(task.get("data"), f"{path}, task {number}")
        for annotation in task["annotations"] or ():
            if annotation.get("was_cancelled"):
                continue
            for result in annotation.get("result", ()):
                choices = result.get("value", {}).get("choices") if result.get("type") == "choices" else None
                if choices:
                    yield address, str(choices[0])


def _csv_labels(path: Path) -> Iterable[tuple[str, str]]:
    reader = csv.DictReader(io.StringIO(read_list(path, "export of Label Studio"), newline=""))
    for row in reader:
        yield from _flat(row, f"{path}, row {reader.line_num}")


def _flat(row: Mapping[str, Any], where: str) -> Iterable[tuple[str, str]]:
    names = ["choice"] if "choice" in row else sorted(str(name) for name in row if name not in FIELDS)
    if len(names) > 1:
        raise DataError(f"{where}: one field must hold the answer, got {', '.join(names)}; name it choice")
    choice = row.get(names[0]) if names else None
    if choice is not None and not isinstance(choice, str):
        raise DataError(f"{where}: {names[0]} must be one class name, got {str(choice)[:80]}")
    if choice:
        yield _address(row, where), choice


def _address(data: Any, where: str) -> str:
    """The path of an image: `path` where the task has one, else what its address ends with."""
    if not isinstance(data, Mapping) or not isinstance(data.get("path", data.get("image")), str):
        raise DataError(f"{where}: has no image")
    if isinstance(data.get("path"), str):
        return str(data["path"])
    parts = urlsplit(data["image"])
    local = parse_qs(parts.query).get("d")
    return local[0] if local else unquote(parts.path).lstrip("/")


def _unique_labels(pairs: Iterable[tuple[str, str]], path: Path) -> dict[str, str]:
    """Labels by image.

    Raises:
        DataError: an image has two labels.
    """
    labels: dict[str, str] = {}
    for image, name in pairs:
        if labels.setdefault(image, name) != name:
            raise DataError(f"{path}: {image!r} is labeled {labels[image]!r} and {name!r}; keep one")
    return labels


def _match_files(labels: dict[str, str], images: Path, source: Path) -> dict[str, str]:
    """Labels by path relative to a folder: the longest end of each address that is a file there.

    Raises:
        DataError: an address is no file, or a file has two labels.
    """
    located: dict[str, str] = {}
    for address, name in labels.items():
        parts = address.replace(os.sep, "/").split("/")
        ends = ["/".join(parts[first:]) for first in range(len(parts))]
        ends.append(UPLOAD_PREFIX.sub("", parts[-1], count=1))
        path = next(
            (end for end in ends if end and ".." not in end.split("/") and (images / end).is_file()), None
        )
        if path is None:
            raise DataError(f"{source}: {address!r} is no file of {images}")
        if located.setdefault(path, name) != name:
            raise DataError(f"{source}: {path!r} is labeled {located[path]!r} and {name!r}; keep one")
    return located
