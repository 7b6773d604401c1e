"""`open_data` opens every kind of data: a folder, a table, a benchmark, or a task of the attribute world."""

from __future__ import annotations

import difflib
import os
from dataclasses import replace
from pathlib import Path

from dear.data.benchmarks import BENCHMARKS, find_benchmark, open_benchmark
from dear.data.folder import open_folder
from dear.data.images import ImageSet, Source
from dear.data.names import check_template
from dear.data.table import open_table
from dear.errors import DataError, UsageError

WORLD = "world:"
TABLES = (".csv", ".jsonl", ".ndjson")


def open_data(
    spec: str | os.PathLike[str],
    split: str = "test",
    root: str | os.PathLike[str] | None = None,
    template: str | None = None,
    name: str | None = None,
) -> ImageSet:
    """Open one split of a dataset.

    Args:
        spec: a folder of class folders; a `.csv` or `.jsonl` table; a benchmark's name (with `root`); or
            `world:NAME`.
        split: "train", "test", "val" where there is one, or "all".
        root: the folder that holds the benchmarks; for a table, the folder its paths start from.
        template: prompt with `{}`, instead of the dataset's own.
        name: of the dataset, instead of its own (few-shot draws depend on it).

    Raises:
        DataError: the data is missing or malformed.
        UsageError: a benchmark without `root`.
    """
    check_data(spec, root)
    text = os.fspath(spec)
    if text.startswith(WORLD):
        return _open_world(text, split, template)
    path = Path(text).expanduser()
    benchmark = find_benchmark(text)
    if benchmark is not None and root is not None:
        found = open_benchmark(benchmark.name, split, root, template=template)
        return replace(found, source=Source(benchmark.name, os.path.abspath(root)))
    if os.path.isdir(path):
        found = open_folder(path, split, template=template, name=name)
    else:
        found = open_table(path, split, template=template, name=name, root=root)
    base = None if root is None else os.path.abspath(root)
    return replace(found, source=Source(os.path.abspath(path), base))


def check_data(spec: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> None:
    """Refuse what is no dataset at all; nothing is read.

    Raises:
        DataError: there is no such folder, table, benchmark or task.
        UsageError: a benchmark without `root`.
    """
    text = os.fspath(spec)
    if text.startswith(WORLD):
        from dear.world.served import check_task_name

        check_task_name(text.removeprefix(WORLD))
        return
    path = Path(text).expanduser()
    benchmark = find_benchmark(text)
    if (benchmark is not None and root is not None) or os.path.isdir(path) or path.suffix.lower() in TABLES:
        return
    if benchmark is not None:
        raise UsageError(
            f"{benchmark.name}: is a benchmark; root must name the folder that holds {benchmark.folder}/",
            hint="data-root",
        )
    if os.path.exists(path):
        raise DataError(f"{path}: is neither a folder nor a .csv or .jsonl table")
    near = difflib.get_close_matches(text.casefold(), [known.casefold() for known in BENCHMARKS], 1)
    hint = next(
        (f"; did you mean {known}?" for known in BENCHMARKS if near and known.casefold() == near[0]), ""
    )
    raise DataError(f"{text[:200]}: no such folder, table or dataset{hint}")


def _open_world(spec: str, split: str, template: str | None) -> ImageSet:
    """A task of the attribute world, with its own template unless another is asked for."""
    from dear import world

    task = world.task(spec.removeprefix(WORLD), split)
    return task if template is None else replace(task, template=check_template(template))


def list_datasets() -> tuple[str, ...]:
    """Names of all datasets that are known by name: the benchmarks, and the tasks of the attribute world."""
    from dear import world

    return (*BENCHMARKS, *(f"{WORLD}{name}" for name in (*world.list_tasks(), *world.list_shortcuts())))
