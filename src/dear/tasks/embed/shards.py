"""Processes any number of images in shards: constant memory, resumable, on this machine or on a Ray cluster.

The result is a folder of Parquet files, one per shard, that pandas and pyarrow read as one table. A shard's
file is written whole or not at all, so what is there is finished: after a kill only the missing shards are
computed. `_shards.json` names what the shards were computed from; another question in the same folder is
refused.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from dear.data.batches import unlabeled
from dear.data.images import ListedImages, readable
from dear.data.open import SPLITS
from dear.data.read_ahead import read_ahead
from dear.errors import DataError, InputError, RunError, UsageError
from dear.images.names import find_images
from dear.utils.cluster import map_items
from dear.utils.digest import of_parts
from dear.utils.extras import missing_extra
from dear.utils.files import read_text, write_atomic, write_json
from dear.utils.progress import Progress, silent
from dear.utils.text import decode

if TYPE_CHECKING:
    import pyarrow as pa

ENGINES = ("local", "ray")
#: from all images and the places of a shard's to columns by name; features are an array [b, E]
Compute = Callable[[ListedImages, range], dict[str, Any]]
#: columns of a table that are kept next to the features, and their names in the result
KEPT = {"label": "label", "classname": "label", "split": "split", "domain": "domain", "group": "group"}


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`_shards.json`: what the folder's shards were computed from."""

    question: dict[str, str]
    images: int
    digest: str
    shard_images: int


@dataclass(frozen=True)
class ShardJob:
    """Images to work on and where the results go."""

    images: Sequence[str]  #: paths, in the order of the result
    out: Path  #: folder of the result
    question: Mapping[str, str]  #: what is computed, by name; the same folder only answers the same question
    shard_images: int = 1024  #: images per shard
    engine: str = "local"  #: "local" or "ray"
    workers: int = 2  #: processes of the Ray engine
    #: what is known of the images, one text or None per image: label, split, …
    columns: Mapping[str, Sequence[str | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("shard", self.shard_images), ("workers", self.workers)):
            if value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if self.engine not in ENGINES:
            raise UsageError(f"engine must be {' or '.join(ENGINES)}, got {self.engine!r}")

    @property
    def shards(self) -> int:
        """How many there are."""
        return -(-len(self.images) // self.shard_images)

    def part(self, shard: int) -> Path:
        """The file of a shard."""
        return self.out / f"part-{shard:06d}.parquet"

    def rows(self, shard: int) -> range:
        """Places of the images of a shard."""
        first = shard * self.shard_images
        return range(first, min(first + self.shard_images, len(self.images)))

    def write(self, shard: int, computed: Mapping[str, Any]) -> int:
        """Write a shard's file; returns its number of images."""
        import pyarrow.parquet

        rows, content = self.rows(shard), io.BytesIO()
        columns = {"path": pa_texts(computed["path"])}
        for name, values in self.columns.items():
            columns[name] = pa_texts(values[rows.start : rows.stop])
        columns |= {name: pa_array(values) for name, values in computed.items() if name != "path"}
        pyarrow.parquet.write_table(pyarrow.table(columns), content)
        write_atomic(self.part(shard), content.getvalue())
        return len(rows)


def pa_texts(values: Sequence[str | None]) -> pa.Array:
    """A column of texts, null where there is none."""
    import pyarrow as pa

    return pa.array(list(values), pa.string())


def pa_array(values: Any) -> pa.Array:
    """A column of texts, of numbers, or of features [b, E]; rows of NaN become null."""
    import pyarrow as pa

    if not isinstance(values, np.ndarray):
        return pa_texts(values)
    if values.ndim == 1:
        return pa.array(values, from_pandas=True)  # NaN becomes null
    kind = pa.list_(pa.float32(), values.shape[1])
    missing = pa.array(np.isnan(values).any(axis=1))
    flat = pa.array(np.ascontiguousarray(values, dtype=np.float32).ravel())
    return pa.FixedSizeListArray.from_arrays(flat, type=kind, mask=missing)


def known_columns(source: str | os.PathLike[str], images: Sequence[str]) -> dict[str, list[str | None]]:
    """Label, split, domain and group of the images of a folder or table, where they are known.

    In a table they are columns; in a folder the class folders are labels, and `train/`, `test/` and `val/`
    above them are splits.
    """
    path = Path(source)
    if not path.is_dir():
        table = _read_table(path)
        found = {new: table.column(old).to_pylist() for old, new in KEPT.items() if old in table.column_names}
        return {name: [None if v is None else str(v) for v in values] for name, values in found.items()}
    split_names = {name: split for split, names in SPLITS.items() for name in names}
    labels: list[str | None] = []
    splits: list[str | None] = []
    for image in images:
        folders = list(Path(image).relative_to(path).parts[:-1])
        splits.append(split_names.get(folders[0].lower()) if folders else None)
        if splits[-1] is not None:
            folders.pop(0)
        labels.append(readable(folders[0]) if folders else None)
    columns = {"label": labels, "split": splits}
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def list_images(source: str | os.PathLike[str]) -> list[str]:
    """Paths of the images under a folder, or in the column `path` of a CSV or Parquet table."""
    path = Path(source)
    if path.is_dir():
        try:
            found = find_images([str(path)])
        except InputError as error:
            raise DataError(str(error)) from None
    elif path.suffix in (".csv", ".parquet"):
        found = _table_paths(path)
    else:
        raise DataError(f"{path}: name a folder of images, or a .csv or .parquet table with a column path")
    if not found:
        raise DataError(f"{path}: holds no images")
    return found


def _table_paths(path: Path) -> list[str]:
    """The column `path` of a table; relative paths start at the table's folder."""
    table = _read_table(path)
    if "path" not in table.column_names:
        raise DataError(f"{path}: has no column path; it has {', '.join(table.column_names)}")
    return [os.path.join(path.parent, str(value)) for value in table.column("path").to_pylist()]


def _read_table(path: Path) -> pa.Table:
    _need_pyarrow()
    import pyarrow.csv
    import pyarrow.parquet

    try:
        return pyarrow.csv.read_csv(path) if path.suffix == ".csv" else pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as a table ({error})") from error


def run_shards(
    job: ShardJob,
    make_compute: Callable[[], Compute],
    progress: Progress = silent,
    device: torch.device | None = None,
) -> int:
    """Compute the missing shards; returns how many images they held.

    Args:
        job: what to do.
        make_compute: makes the function that does it, once per process.
        progress: called with ("shards", done, total).
        device: where it is done on this machine; images are read to it ahead.

    Raises:
        RunError: the folder holds something else.
    """
    _need_pyarrow()
    _claim(job)
    missing = [shard for shard in range(job.shards) if not job.part(shard).exists()]
    there = job.shards - len(missing)
    progress("shards", there, job.shards)
    images = 0
    if job.engine == "ray":
        counts = map_items(partial(_on_worker, job, make_compute), missing, job.workers)
    else:
        counts = _here(job, make_compute(), missing, device)
    for done, count in enumerate(counts, there + 1):
        images += count
        progress("shards", done, job.shards)
    return images


def _claim(job: ShardJob) -> None:
    """Create the folder, or check that it was created for the same images and options."""
    own = Manifest(dict(job.question), len(job.images), _digest(job.images), job.shard_images)
    place = job.out / "_shards.json"
    if job.out.exists() and not job.out.is_dir():
        raise RunError(f"{job.out}: is a file; the result is a folder, choose another name")
    job.out.mkdir(parents=True, exist_ok=True)
    if not place.is_file():  # new, empty, or left by a process that was killed before it wrote the list
        other = next((path.name for path in job.out.iterdir() if not path.name.startswith(".")), None)
        if other is not None:
            raise RunError(f"{job.out}: contains {other!r}, no result of embed; choose another folder")
        write_json(place, msgspec.to_builtins(own))
        return
    old = decode(read_text(place, "list of shards"), Manifest, str(place), "list of shards")
    if old != own:
        parts = ("images", "digest", "shard_images")
        changed = [name for name in parts if getattr(own, name) != getattr(old, name)]
        both = {**own.question, **old.question}
        changed += [name for name in both if own.question.get(name) != old.question.get(name)]
        raise RunError(
            f"{job.out}: contains results of other settings ({', '.join(changed)}); choose another folder"
        )


def _digest(images: Sequence[str]) -> str:
    """Hash of the images' paths, sizes and times: a changed file is another image."""
    lines = []
    for image in images:
        try:
            state = os.stat(image)
            stamp = f"{state.st_size} {state.st_mtime_ns}"
        except OSError:
            stamp = "missing"
        lines.append(f"{image}\n{stamp}\n")
    return of_parts(*lines).hex()


def _here(
    job: ShardJob, compute: Compute, shards: Sequence[int], device: torch.device | None
) -> Iterator[int]:
    """Shards in order: while one is computed, the last one is written and the next one's images are read."""
    with read_ahead(unlabeled(job.images), device) as images, ThreadPoolExecutor(1) as writer:
        written: Future[int] | None = None
        for shard in shards:
            table = compute(images, job.rows(shard))
            if written is not None:
                yield written.result()
            written = writer.submit(job.write, shard, table)
        if written is not None:
            yield written.result()


def _on_worker(job: ShardJob, make_compute: Callable[[], Compute]) -> Callable[[int], int]:
    """What computes and writes a shard, by its number; made once per process."""
    compute, images = make_compute(), unlabeled(job.images)
    return lambda shard: job.write(shard, compute(images, job.rows(shard)))


def _need_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise missing_extra("Parquet", "parquet") from None
