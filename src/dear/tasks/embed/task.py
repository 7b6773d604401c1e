"""Image features and answers of any number of images: `dear embed`, `dear.embed`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dear.clip.factory import load, pick_device
from dear.clip.gpu import Recorder
from dear.clip.model import Clip
from dear.clip.variant import matrix_dtype
from dear.data.batches import image_set, name_of, over_batches, pixels_for
from dear.data.images import ImageSet, ListedImages
from dear.data.inputs import as_images
from dear.errors import UsageError
from dear.images.names import find_images
from dear.methods.base import unit
from dear.runs.feature_cache import FeatureCache
from dear.runs.model import Model
from dear.tasks.embed.shards import Compute, ShardJob, known_columns, list_images, run_shards
from dear.tasks.load import load_model
from dear.utils.files import PathLike
from dear.utils.progress import Progress, silent

if TYPE_CHECKING:
    import pandas as pd

_GPU_BATCH = 256  # a part of a shard, so that reading ahead goes on from one shard to the next


class Embeddings:
    """Features or answers of images, by column; those in a folder of Parquet files are read on first use."""

    def __init__(
        self, columns: Mapping[str, Any] | None = None, path: Path | None = None, computed: int = 0
    ) -> None:
        self.path = path  #: the folder; None: in memory
        self.computed = computed  #: images computed by this call; the others were there already
        self._columns = columns

    @cached_property
    def columns(self) -> Mapping[str, Any]:
        """`path`, known `label` and `split`, `embedding` [n, E] or `class` and `probability`, `error`."""
        if self._columns is not None:
            return self._columns
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(self.path)
        columns = {name: table.column(name).to_pylist() for name in table.column_names}
        if "embedding" in columns:
            width = table.schema.field("embedding").type.list_size
            missing = [float("nan")] * width
            rows = [missing if row is None else row for row in columns["embedding"]]
            columns["embedding"] = np.array(rows, dtype=np.float32).reshape(-1, width)
        return columns

    @property
    def features(self) -> NDArray[np.float32]:
        """Features [n, E] of unit length; rows of NaN where an image could not be read.

        Raises:
            UsageError: these are the answers of a run.
        """
        if "embedding" not in self.columns:
            raise UsageError("these are answers of a run, not features; leave out run to compute features")
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
    """From images to columns `path, embedding, error`; unit length, NaN where an image cannot be read.

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

    def compute(images: ListedImages, rows: range) -> dict[str, Any]:
        batch = None if on_cpu else _GPU_BATCH
        parts, problems = over_batches(images, encode, tower, unreadable="skip", batch=batch, rows=rows)
        features = torch.cat(
            [torch.empty(0, tower.config.embed_dim), *(part.cpu() for part in parts)]
        ).numpy()
        errors = [problems.get(place) for place in rows]
        features[[error is not None for error in errors]] = np.nan
        return {"path": _names(images, rows), "embedding": features, "error": errors}

    return compute


def answerer(model: Model) -> Compute:
    """From images to columns `path, class, probability, error` of a run's likeliest class."""

    def compute(images: ListedImages, rows: range) -> dict[str, Any]:
        answers = model.answers(images.items[rows.start : rows.stop], top=1, unreadable="skip")
        best = [answer.classes[0] if answer.classes else (None, float("nan")) for answer in answers]
        return {
            "path": _names(images, rows),
            "class": [name for name, _ in best],
            "probability": np.array([value for _, value in best], dtype=np.float32),
            "error": [answer.error for answer in answers],
        }

    return compute


def _names(images: ListedImages, rows: range) -> list[str]:
    return [name_of(item) for item in images.items[rows.start : rows.stop]]


def embed(
    data: PathLike | Sequence[Any] | ImageSet,
    out: PathLike | None = None,
    *,
    run: PathLike | Model | None = None,
    backbone: PathLike | Clip | None = None,
    shard: int = 1024,
    engine: str = "local",
    workers: int = 2,
    device: str = "auto",
    progress: Progress = silent,
) -> Embeddings:
    """Features of images or, with `run`, a run's answers for them.

    With `out`, the result is a folder of Parquet files that pandas reads as one table: memory stays constant,
    and after an interruption the same call computes only what is missing.

    Args:
        data: a folder, or a CSV or Parquet table with a column `path`; without `out` also an image, a list of
            images, or an image set.
        out: folder of the result; None: keep it in memory.
        run: run folder, archive, `hf://owner/name` or model whose answers are computed instead of features.
        backbone: what `load` takes, or a loaded backbone; None: the run's, or `mini`.
        shard: images per Parquet file.
        engine: "local", or "ray" for a cluster.
        workers: processes of the Ray engine.
        device: "auto", "cpu", "cuda", …
        progress: called after every shard, or in memory after every batch.

    Returns:
        Paths, labels and splits where they are known, features of unit length, and errors.

    Raises:
        DataError: the folder or table contains no images.
        RunError: `out` contains something else.

    Example:
        >>> from PIL import Image
        >>> embed([Image.new("RGB", (64, 64))]).features.shape
        (1, 128)
    """
    device = pick_device(device)

    def make() -> tuple[dict[str, str], Compute]:  # also called in every process of the Ray engine
        if run is None:
            source = "mini" if backbone is None else backbone
            clip = source if isinstance(source, Clip) else load(source, device=device)
            return {"what": "features", "backbone": clip.identity}, embedder(clip)
        model = load_model(run, backbone, device)
        return {"what": "answers", "model": model.identity}, answerer(model)

    if out is None:
        if engine != "local":
            raise UsageError(f"engine {engine!r} writes Parquet files; name a folder for them with out")
        images, columns = _in_memory(data)
        _, compute = make()
        computed = compute(images, range(len(images)))
        first = {"path": computed.pop("path")}
        return Embeddings({**first, **columns, **computed}, computed=len(images))
    if not isinstance(data, str | os.PathLike):
        raise UsageError("out needs a folder or a table of images; leave it out for images in memory")
    files = list_images(data)
    columns = known_columns(data, files)
    question, here = make()
    question["columns"] = ",".join(columns)
    job = ShardJob(files, Path(out), question, shard, engine, workers, columns)
    made = (lambda: make()[1]) if engine == "ray" else (lambda: here)
    done = run_shards(job, made, progress, torch.device(device))
    return Embeddings(path=Path(out), computed=done)


def _in_memory(data: Any) -> tuple[ListedImages, dict[str, Any]]:
    """Images to compute at once, and what is known of them."""
    if isinstance(data, ImageSet):
        labels = [data.classes[label] for label in data.labels.tolist()]
        items = data.items if isinstance(data, ListedImages) else [_item(data, i) for i in range(len(data))]
        return _listed(items), {"label": labels}
    if isinstance(data, str | os.PathLike):
        if os.path.isfile(data) and Path(data).suffix not in (".csv", ".parquet"):
            return _listed([os.fspath(data)]), {}
        files = list_images(data)
        return _listed(files), known_columns(data, files)
    items = as_images(data)
    if all(isinstance(item, str | os.PathLike) for item in items):
        items = tuple(find_images([os.fspath(item) for item in items]))  # type: ignore[arg-type]
    return _listed(items), {}


def _item(images: ImageSet, index: int) -> Any:
    """The file of an image where it has one, so that its feature is cached; else the image."""
    path = getattr(images, "path", None)
    return path(index) if callable(path) else images.image(index)


def _listed(items: Sequence[Any]) -> ListedImages:
    images = image_set(tuple(items))
    assert isinstance(images, ListedImages)
    return images
