"""Image features and answers of any number of images: `dear embed`, `dear.embed`."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dear.clip.factory import pick_device
from dear.clip.gpu import Recorder
from dear.clip.model import Clip
from dear.clip.variant import matrix_dtype
from dear.data.batches import Images, over_batches, pixels_for
from dear.data.images import ImageSet, ImageSetWrapper, ListedImages
from dear.errors import Interrupted, UsageError
from dear.methods.tensors import unit
from dear.runs.feature_cache import FeatureCache
from dear.runs.model import Model
from dear.runs.predictions import answer_label
from dear.tasks.embed.shards import Compute, ShardJob, run_shards
from dear.tasks.embed.sources import open_source
from dear.tasks.load import load_backbone, load_model
from dear.utils.files import PathLike
from dear.utils.progress import Progress, silent

if TYPE_CHECKING:
    import pandas as pd

_THUMBNAIL = 128  # pixels of the longer side
_GPU_BATCH = 256  # a part of a shard, so that reading ahead goes on from one shard to the next


class Embeddings:
    """Features and answers of images, by column; those in a folder of Parquet files are read on first use."""

    def __init__(
        self, columns: Mapping[str, Any] | None = None, path: Path | None = None, computed: int = 0
    ) -> None:
        self.path = path  #: the folder; None: in memory
        self.computed = computed  #: images computed by this call; the others were there already
        self._columns = columns

    @cached_property
    def columns(self) -> Mapping[str, Any]:
        """`path`, known `label` and `split`, `embedding` [n, E], `error`, and what else was computed."""
        if self._columns is not None:
            return self._columns
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(self.path)
        columns = {name: table.column(name).to_pylist() for name in table.column_names}
        width = table.schema.field("embedding").type.list_size
        missing = [float("nan")] * width
        rows = [missing if row is None else row for row in columns["embedding"]]
        columns["embedding"] = np.array(rows, dtype=np.float32).reshape(-1, width)
        return columns

    @property
    def features(self) -> NDArray[np.float32]:
        """Features [n, E] of unit length; rows of NaN where an image could not be read."""
        features: NDArray[np.float32] = self.columns["embedding"]
        return features

    def __len__(self) -> int:
        return len(self.columns["path"])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self.features, dtype=dtype)

    def to_frame(self) -> pd.DataFrame:
        """One row per image, as a pandas table."""
        import pandas as pd

        return pd.DataFrame({name: list(values) for name, values in self.columns.items()})

    def __repr__(self) -> str:
        where = "in memory" if self.path is None else f"in {self.path}"
        return f"<Embeddings: {len(self)} images {where}, columns {', '.join(self.columns)}>"

    def _repr_html_(self) -> str:
        return str(self.to_frame().head(20).to_html())


def embedder(clip: Clip) -> Compute:
    """From images to columns `embedding, error`; unit length, NaN where an image cannot be read.

    On a CPU features of image files come from the user's cache where they are known. A GPU computes faster
    than the cache is read.
    """
    tower = clip.cast(matrix_dtype("auto", clip.device))
    on_cpu = clip.device.type == "cpu"
    run, cache = Recorder(), FeatureCache()

    def encode(images: ImageSet, rows: list[int]) -> Tensor:
        if on_cpu:
            return unit(cache.features(tower, images, rows))
        (features,) = run("features", features_of, pixels_for(tower, images, rows))
        return features

    def features_of(pixels: Tensor) -> tuple[Tensor]:
        return (unit(tower.encode_image(pixels).float()),)

    def compute(images: ImageSet, rows: range) -> dict[str, Any]:
        batch = None if on_cpu else _GPU_BATCH
        parts, problems = over_batches(images, encode, tower, unreadable="skip", batch=batch, rows=rows)
        features = torch.cat(
            [torch.empty(0, tower.config.embed_dim), *(part.cpu() for part in parts)]
        ).numpy()
        errors = [problems.get(place) for place in rows]
        features[[error is not None for error in errors]] = np.nan
        return {"embedding": features, "error": errors}

    return compute


def answerer(model: Model) -> Compute:
    """From images to the columns of `embedder` and a run's `answer, probability, margin`.

    Of several labels, `answer` has `;` between them, and a margin to the second class would mean nothing.
    """
    embed_images = embedder(model.clip)

    def compute(images: ImageSet, rows: range) -> dict[str, Any]:
        columns = embed_images(images, rows)
        while isinstance(images, ImageSetWrapper):
            images = images.images
        some: Images = images.subset(rows)
        if isinstance(images, ListedImages):
            some = images.items[rows.start : rows.stop]
        answers = model.answers(some, top=2, unreadable="skip")
        values = np.full((len(answers), 2), np.nan, dtype=np.float32)  # of the two likeliest classes
        for row, answer in zip(values, answers, strict=True):
            row[: len(answer.classes)] = [value for _, value in answer.classes]
        nodes = [answer.node for answer in answers]  # of a run with a tree
        probability = [row[0] if node is None else node[1] for row, node in zip(values, nodes, strict=True)]
        margin = {} if model.method.several else {"margin": values[:, 0] - values[:, 1]}
        return {
            "embedding": columns["embedding"],
            "answer": [answer_label(answer) for answer in answers],
            "probability": np.array(probability, dtype=np.float32),
            **margin,
            "error": columns["error"],
        }

    return compute


def with_thumbnails(compute: Compute) -> Compute:
    """The columns of `compute`, and `image`: a JPEG of at most 128 pixels a side, as the hub stores it."""

    def both(images: ImageSet, rows: range) -> dict[str, Any]:
        columns = compute(images, rows)
        readable = [error is None for error in columns["error"]]
        small = [
            _thumbnail(images.image(row)) if ok else None for row, ok in zip(rows, readable, strict=True)
        ]
        return {**columns, "image": small}

    return both


def _thumbnail(image: Image.Image) -> dict[str, Any]:
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    content = io.BytesIO()
    image.convert("RGB").save(content, "JPEG", quality=80)
    return {"bytes": content.getvalue(), "path": None}


def embed(
    data: PathLike | Sequence[Any] | ImageSet,
    out: PathLike | None = None,
    *,
    run: PathLike | Model | None = None,
    backbone: PathLike | Clip | None = None,
    thumbnails: bool = False,
    data_root: PathLike | None = None,
    shard: int = 1024,
    engine: str = "local",
    workers: int = 2,
    device: str = "auto",
    progress: Progress = silent,
) -> Embeddings:
    """Features of images and, with `run`, a run's answers for them.

    With `out`, the result is a folder of Parquet files that pandas reads as one table: memory stays constant,
    and after an interruption the same call computes only what is missing.

    Args:
        data: a folder or table of images, labeled or not; a WebDataset tar or a folder of them; anything else
            that `open_data` takes; without `out` also an image, a list of images, or an image set.
        out: folder of the result; None: keep it in memory.
        run: run folder, archive, `hf://owner/name` or model whose answers are computed as well.
        backbone: what `load` takes, or a loaded backbone; None: the run's, or `mini`.
        thumbnails: also a column `image` with a small JPEG of each image.
        data_root: the folder that paths of a table start from, or that holds the benchmarks.
        shard: images per Parquet file.
        engine: "local", or "ray" for a cluster.
        workers: processes of the Ray engine.
        device: "auto", "cpu", "cuda", …
        progress: called after every shard, or in memory after every batch.

    Returns:
        Paths, labels and splits where they are known, features of unit length, errors, and with `run` the
        answer, its probability, and the margin to the second class.

    Raises:
        DataError: the folder or table contains no images.
        RunError: `out` contains something else.
        Interrupted: Ctrl-C was pressed; finished shards are kept.

    Example:
        >>> from PIL import Image
        >>> embed([Image.new("RGB", (64, 64))]).features.shape
        (1, 128)
    """
    device = pick_device(device)

    def make() -> tuple[dict[str, str], Compute]:  # also called in every process of the Ray engine
        if run is None:
            clip = load_backbone(backbone, device)
            question, compute = {"what": "features", "backbone": clip.identity}, embedder(clip)
        else:
            model = load_model(run, backbone, device)
            question, compute = {"what": "answers", "model": model.identity}, answerer(model)
        if thumbnails:
            question["thumbnails"] = "yes"
        return question, with_thumbnails(compute) if thumbnails else compute

    if out is None and engine != "local":
        raise UsageError(f"engine {engine!r} writes Parquet files; name a folder for them with out")
    if out is not None and not isinstance(data, str | os.PathLike):
        raise UsageError("out needs a folder or a table of images; leave it out for images in memory")
    source = open_source(data, data_root)
    question, compute = make()
    if out is None:
        computed = compute(source.images, range(len(source.names)))
        columns = {"path": source.names, **source.columns, **computed}
        return Embeddings(columns, computed=len(source.names))
    question["columns"] = ",".join(source.columns)
    job = ShardJob(source, Path(out), question, shard, engine, workers)
    make_compute = (lambda: make()[1]) if engine == "ray" else (lambda: compute)
    try:
        done = run_shards(job, make_compute, progress, torch.device(device))
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the same command computes the remaining shards") from None
    return Embeddings(path=Path(out), computed=done)
