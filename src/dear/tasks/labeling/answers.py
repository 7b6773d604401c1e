"""Answers of people about images, kept on disk: a journal that only grows, and the table that it amounts to.

Every answer is one line of the journal (`labels.csv.journal`), on disk before `AnswerFile.add` returns. Under
the same lock the table (`labels.csv`, columns path and label) is written anew, whole or not at all; it is
what `--data` takes. Processes and browser tabs that answer at the same time never overwrite each other.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import filelock

from dear.data.names import readable
from dear.data.paths import read_list
from dear.errors import DataError, DiskError, InputError
from dear.utils.files import PathLike, write_atomic

#: "label": the image shows the class; "skip": no answer; "none": it shows none of the classes; "checked": the
#: label is right although it looks wrong; "undo": the answer before does not count; "class": a new class
Kind = Literal["label", "skip", "none", "checked", "undo", "class"]
COLUMNS = ("path", "kind", "label")


@dataclass(frozen=True)
class Answer:
    """One line of the journal."""

    path: str  #: of the image, relative to the folder of the images; "" for a new class
    kind: Kind
    label: str = ""  #: class name of "label" and "class"


@dataclass(frozen=True)
class Answers:
    """What the journal amounts to."""

    labels: dict[str, str]  #: class name by path
    none: frozenset[str]  #: paths of images that show none of the classes
    skipped: frozenset[str]  #: paths of images without an answer
    checked: frozenset[str]  #: paths whose label is right although it looks wrong
    classes: tuple[str, ...]  #: in the order in which they appeared


def replay(journal: Sequence[Answer]) -> Answers:
    """What a journal amounts to; the last answer about an image counts, and "undo" removes it.

    >>> replay([Answer("a", "label", "cat"), Answer("a", "label", "dog"), Answer("a", "undo")]).labels
    {'a': 'cat'}
    """
    standing: dict[str, list[Answer]] = {}
    classes: dict[str, None] = {}
    for answer in journal:
        if answer.label:
            classes.setdefault(answer.label)
        if answer.kind == "undo":
            if standing.get(answer.path):
                standing[answer.path].pop()
        elif answer.kind != "class":
            standing.setdefault(answer.path, []).append(answer)
    labels: dict[str, str] = {}
    checked: set[str] = set()
    by_kind: dict[str, set[str]] = {"none": set(), "skip": set()}
    for path, answers in standing.items():
        about = [answer for answer in answers if answer.kind != "checked"]
        if about and about[-1].kind == "label":
            labels[path] = about[-1].label
        elif about:
            by_kind[about[-1].kind].add(path)
        if answers and answers[-1].kind == "checked":
            checked.add(path)
    none, skipped = (frozenset(by_kind[kind]) for kind in ("none", "skip"))
    return Answers(labels, none, skipped, frozenset(checked), tuple(classes))


class AnswerFile:
    """A table of labels and its journal.

    Rows of the table that the journal does not know (written by hand or by `dear label import`) are added to
    the journal when the file is opened. Labels that the table lacks, because a process was killed between
    both writes, are added to the table.

    Args:
        path: the table, ending in `.csv`.

    Raises:
        DataError: the table or the journal is damaged.
        InputError: the name does not end in `.csv`.

    Example:
        >>> import tempfile
        >>> file = AnswerFile(Path(tempfile.mkdtemp()) / "labels.csv")
        >>> file.add([Answer("a.jpg", "label", "cat")])
        >>> AnswerFile(file.path).read().labels
        {'a.jpg': 'cat'}
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        if self.path.suffix.lower() != ".csv":
            raise InputError(f"the table of labels must end in .csv, got {self.path.name!r}")
        self.journal = self.path.with_name(f"{self.path.name}.journal")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = filelock.FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=30)
        with self._lock:
            known = replay(self._entries()).labels
            rows = read_labels(self.path) if self.path.exists() else {}
            self._splits = read_splits(self.path) if self.path.exists() else {}
            new = [Answer(path, "label", name) for path, name in rows.items() if known.get(path) != name]
            if new:
                self._append(new)
            if known.keys() - rows.keys():
                self._write_table()

    def add(self, answers: Sequence[Answer]) -> None:
        """Append answers; they are on disk when this returns.

        Raises:
            InputError: a kind is unknown, or a label has no name.
            DiskError: the disk is full or read-only.
        """
        for answer in answers:
            if answer.kind not in get_args(Kind):
                raise InputError(f"kind must be one of {', '.join(get_args(Kind))}, got {answer.kind!r}")
            if answer.kind in ("label", "class"):
                readable(answer.label)  # raises InputError
        with self._lock:
            self._append(answers)
            self._write_table()

    def start_with(self, labels: Mapping[str, str], splits: Mapping[str, str]) -> None:
        """Add labels of images without an answer, and remember the split of images: a column of the table."""
        with self._lock:
            answers = replay(self._entries())
            known = {*answers.labels, *answers.none, *answers.skipped}
            self._append([Answer(path, "label", name) for path, name in labels.items() if path not in known])
            self._splits = {**splits, **self._splits}
            self._write_table()

    def read(self) -> Answers:
        """All answers so far, those of other processes included."""
        with self._lock:
            return replay(self._entries())

    def _write_table(self) -> None:
        write_atomic(self.path, table_text(replay(self._entries()).labels, self._splits))

    def _append(self, answers: Sequence[Answer]) -> None:
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        if not self.journal.exists():
            table.writerow(COLUMNS)
        table.writerows((answer.path, answer.kind, answer.label) for answer in answers)
        try:
            with open(self.journal, "a", encoding="utf-8", newline="") as file:
                file.write(text.getvalue())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DiskError(f"{self.journal}: cannot be written ({error.strerror or error})") from error

    def _entries(self) -> list[Answer]:
        if not self.journal.exists():
            return []
        text = read_list(self.journal, "journal of labels")
        complete = text[: text.rfind("\n") + 1]  # a process killed while writing leaves half a line
        if len(complete) < len(text):
            write_atomic(self.journal, complete)
        rows = list(csv.reader(io.StringIO(complete, newline="")))
        if rows and tuple(rows[0]) != COLUMNS:
            raise DataError(
                f"{self.journal}: its columns must be {','.join(COLUMNS)}, got {','.join(rows[0])}"
            )
        entries = []
        for number, cells in enumerate(rows[1:], 2):
            if len(cells) != len(COLUMNS) or cells[1] not in get_args(Kind):
                raise DataError(f"{self.journal}, row {number}: is not an answer: {','.join(cells)[:80]!r}")
            entries.append(Answer(cells[0], cells[1], cells[2]))  # type: ignore[arg-type]
        return entries


def table_text(labels: Mapping[str, str], splits: Mapping[str, str] | None = None) -> str:
    """A table of paths, class names and, where they are known, splits as CSV text.

    >>> table_text({"a.jpg": "cat"}, {"a.jpg": "test"}).splitlines()
    ['path,label,split', 'a.jpg,cat,test']
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("path", "label", "split") if splits else ("path", "label"))
    for path, name in labels.items():
        table.writerow((path, name, splits.get(path, "train")) if splits else (path, name))
    return text.getvalue()


def read_splits(path: PathLike) -> dict[str, str]:
    """The split of each image of a table; empty where it has no column split."""
    reader = csv.DictReader(io.StringIO(read_list(Path(path), "table of labels"), newline=""))
    if "split" not in (reader.fieldnames or ()):
        return {}
    return {row["path"] or "": row["split"] or "train" for row in reader}


def read_labels(path: PathLike) -> dict[str, str]:
    """Class names by path from a table with the columns path and label; rows without a label are left out.

    Raises:
        DataError: a column is missing, or an image has two labels.
    """
    reader = csv.DictReader(io.StringIO(read_list(Path(path), "table of labels"), newline=""))
    columns = reader.fieldnames or []
    for column in ("path", "label"):
        if column not in columns:
            raise DataError(f"{path}: has no column {column}; its columns are {', '.join(columns) or 'none'}")
    labels: dict[str, str] = {}
    for row in reader:
        name, image = (row["label"] or "").strip(), row["path"] or ""
        if not name:
            continue
        if labels.setdefault(image, name) != name:
            raise DataError(f"{path}, row {reader.line_num}: {image!r} is labeled {labels[image]!r} above")
    return labels
