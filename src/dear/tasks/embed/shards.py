"""Processes any number of images in shards: constant memory, resumable, on this machine or on a Ray cluster.

The result is a folder of Parquet files, one per shard, that pandas and pyarrow read as one table. A shard's
file is written whole or not at all, so what is there is finished: after a kill only the missing shards are
computed. `_shards.json` names what the shards were computed from; another question in the same folder is
rejected.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from dear.data.images import ImageSet
from dear.data.read_ahead import read_ahead
from dear.errors import RunError, UsageError
from dear.tasks.embed.sources import Source, need_pyarrow
from dear.utils.cluster import map_items
from dear.utils.files import read_text, write_atomic, write_json
from dear.utils.progress import Progress, silent
from dear.utils.schema import decode

if TYPE_CHECKING:
    import pyarrow as pa

ENGINES = ("local", "ray")
#: from all images and the places of a shard's to columns by name; features are an array [b, E]
Compute = Callable[[ImageSet, range], dict[str, Any]]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`_shards.json`: what the folder's shards were computed from."""

    question: dict[str, str]
    images: int
    digest: str
    shard_images: int


@dataclass(frozen=True)
class ShardJob:
    """Images to work on and where the results go."""

    source: Source  #: images, in the order of the result
    out: Path  #: folder of the result
    question: Mapping[str, str]  #: what is computed, by name; the same folder only answers the same question
    shard_images: int = 1024  #: images per shard
    engine: str = "local"  #: "local" or "ray"
    workers: int = 2  #: processes of the Ray engine

    def __post_init__(self) -> None:
        for name, value in (("shard", self.shard_images), ("workers", self.workers)):
            if value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if self.engine not in ENGINES:
            raise UsageError(f"engine must be {' or '.join(ENGINES)}, got {self.engine!r}")

    @property
    def shards(self) -> int:
        """How many there are."""
        return -(-len(self.source.names) // self.shard_images)

    def part(self, shard: int) -> Path:
        """The file of a shard."""
        return self.out / f"part-{shard:06d}.parquet"

    def rows(self, shard: int) -> range:
        """Places of the images of a shard."""
        first = shard * self.shard_images
        return range(first, min(first + self.shard_images, len(self.source.names)))

    def write(self, shard: int, computed: Mapping[str, Any]) -> int:
        """Write a shard's file; returns its number of images."""
        import pyarrow.parquet

        rows, content = self.rows(shard), io.BytesIO()
        columns = {"path": pa_texts(self.source.names[rows.start : rows.stop])}
        for name, values in self.source.columns.items():
            columns[name] = pa_texts(values[rows.start : rows.stop])
        columns |= {name: pa_array(values) for name, values in computed.items()}
        pyarrow.parquet.write_table(pyarrow.table(columns), content)
        write_atomic(self.part(shard), content.getvalue())
        return len(rows)


def pa_texts(values: Sequence[str | None]) -> pa.Array:
    """A column of texts, null where there is none."""
    import pyarrow as pa

    return pa.array(list(values), pa.string())


def pa_array(values: Any) -> pa.Array:
    """A column of texts, of images, of numbers, or of features [b, E]; rows of NaN become null."""
    import pyarrow as pa

    if not isinstance(values, np.ndarray):
        if any(isinstance(value, dict) for value in values):
            return pa.array(values, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
        return pa_texts(values)
    if values.ndim == 1:
        return pa.array(values, from_pandas=True)  # NaN becomes null
    kind = pa.list_(pa.float32(), values.shape[1])
    missing = pa.array(np.isnan(values).any(axis=1))
    flat = pa.array(np.ascontiguousarray(values, dtype=np.float32).ravel())
    return pa.FixedSizeListArray.from_arrays(flat, type=kind, mask=missing)


def run_shards(
    job: ShardJob,
    make_compute: Callable[[], Compute],
    progress: Progress = silent,
    device: torch.device | None = None,
) -> int:
    """Compute the missing shards; returns how many images they held.

    Args:
        job: what to do.
        make_compute: returns the function that does it; called once per process.
        progress: called with ("shards", done, total).
        device: where it is done on this machine; images are read to it ahead.

    Raises:
        RunError: the folder holds something else.
    """
    need_pyarrow()
    _claim(job)
    missing = [shard for shard in range(job.shards) if not job.part(shard).exists()]
    finished = job.shards - len(missing)
    progress("shards", finished, job.shards)
    images = 0
    if job.engine == "ray":
        counts = map_items(partial(_on_worker, job, make_compute), missing, job.workers)
    else:
        counts = _on_this_machine(job, make_compute(), missing, device)
    for done, count in enumerate(counts, finished + 1):
        images += count
        progress("shards", done, job.shards)
    return images


def _claim(job: ShardJob) -> None:
    """Create the folder, or check that it was created for the same images and options."""
    new = Manifest(dict(job.question), len(job.source.names), job.source.digest, job.shard_images)
    place = job.out / "_shards.json"
    if job.out.exists() and not job.out.is_dir():
        raise RunError(f"{job.out}: is a file; the result is a folder, choose another name")
    job.out.mkdir(parents=True, exist_ok=True)
    if not place.is_file():  # new, empty, or left by a process that was killed before it wrote the list
        other = next((path.name for path in job.out.iterdir() if not path.name.startswith(".")), None)
        if other is not None:
            raise RunError(
                f"{job.out}: contains {other!r}, which is not a result of embed; choose another folder"
            )
        write_json(place, msgspec.to_builtins(new))
        return
    old = decode(read_text(place, "list of shards"), Manifest, str(place), "list of shards")
    if old != new:
        parts = ("images", "digest", "shard_images")
        changed = [name for name in parts if getattr(new, name) != getattr(old, name)]
        both = {**new.question, **old.question}
        changed += [name for name in both if new.question.get(name) != old.question.get(name)]
        raise RunError(
            f"{job.out}: contains results of other settings ({', '.join(changed)}); choose another folder"
        )


def _on_this_machine(
    job: ShardJob, compute: Compute, shards: Sequence[int], device: torch.device | None
) -> Iterator[int]:
    """Shards in order: while one is computed, the last one is written and the next one's images are read."""
    with read_ahead(job.source.images, device) as images, ThreadPoolExecutor(1) as writer:
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
    compute, images = make_compute(), job.source.images
    return lambda shard: job.write(shard, compute(images, job.rows(shard)))
