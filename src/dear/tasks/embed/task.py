"""Image features and answers of folders or tables of any size, as Parquet: `dear embed`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dear.clip.factory import load
from dear.clip.gpu import Recorder
from dear.clip.model import Clip
from dear.clip.variant import matrix_dtype
from dear.data.batches import name_of, over_batches, pixels_for
from dear.data.images import ImageSet, ListedImages
from dear.methods.base import unit
from dear.runs.model import Model
from dear.tasks.embed.shards import Compute, ShardJob, list_images, run_shards
from dear.utils.files import PathLike
from dear.utils.progress import Progress, silent

if TYPE_CHECKING:
    import pyarrow as pa

_GPU_BATCH = 256  # a part of a shard, so that reading ahead goes on from one shard to the next


def embedder(clip: Clip) -> Compute:
    """From paths to a table `path, embedding, error`; unit length, null where an image cannot be read."""
    tower = clip.cast(matrix_dtype("auto", clip.device))
    batch = None if clip.device.type == "cpu" else _GPU_BATCH
    run = Recorder()  # the interpreter is left to those who read images

    def encode(images: ImageSet, rows: list[int]) -> Tensor:
        (features,) = run("features", features_of, pixels_for(tower, images, rows))
        return features

    def features_of(pixels: Tensor) -> tuple[Tensor]:
        return (unit(tower.encode_image(pixels).float()),)

    def compute(images: ListedImages, rows: range) -> pa.Table:
        import pyarrow as pa

        parts, problems = over_batches(images, encode, tower, unreadable="skip", batch=batch, rows=rows)
        errors = [problems.get(place) for place in rows]
        bad = pa.array([error is not None for error in errors])
        values = pa.array(torch.cat(parts).flatten().cpu().numpy())
        kind = pa.list_(pa.float32(), tower.config.embed_dim)
        columns = {
            "path": pa.array(_paths(images, rows)),
            "embedding": pa.FixedSizeListArray.from_arrays(values, type=kind, mask=bad),
            "error": pa.array(errors, pa.string()),
        }
        return pa.table(columns)

    return compute


def answerer(model: Model) -> Compute:
    """From paths to a table `path, class, probability, error` of a run's likeliest class."""

    def compute(images: ListedImages, rows: range) -> pa.Table:
        import pyarrow as pa

        paths = _paths(images, rows)
        answers = model.answers(paths, top=1, unreadable="skip")
        best = [answer.classes[0] if answer.classes else (None, None) for answer in answers]
        columns = {
            "path": pa.array(paths),
            "class": pa.array([name for name, _ in best], pa.string()),
            "probability": pa.array([value for _, value in best], pa.float32()),
            "error": pa.array([answer.error for answer in answers], pa.string()),
        }
        return pa.table(columns)

    return compute


def _paths(images: ListedImages, rows: range) -> list[str]:
    return [name_of(item) for item in images.items[rows.start : rows.stop]]


def embed(
    source: PathLike,
    out: PathLike,
    *,
    run: str | None = None,
    backbone: str | None = None,
    device: str = "cpu",
    shard_images: int = 1024,
    engine: str = "local",
    workers: int = 2,
    progress: Progress = silent,
) -> int:
    """Features (or, with `run`, answers) of all images under a folder or in a table, as a folder of Parquet.

    Args:
        source: a folder, or a CSV or Parquet table with a column `path`.
        out: folder of the result; what it already holds is not computed again.
        run: a run folder whose answers are wanted instead of features.
        backbone: what `dear.load` takes; None: the run's own, or `mini`.
        device: where to compute.
        shard_images: images per Parquet file.
        engine: "local" or "ray".
        workers: processes of the Ray engine.
        progress: called after every shard.

    Returns:
        How many images were computed now.
    """

    def make() -> tuple[dict[str, str], Compute]:  # also called in every process of the Ray engine
        if run is None:
            clip = load(backbone or "mini", device=device)
            return {"what": "features", "backbone": clip.identity}, embedder(clip)
        model = Model.load(run, backbone, device)
        return {"what": "answers", "model": model.identity}, answerer(model)

    images = list_images(source)
    question, here = make()
    job = ShardJob(images, Path(out), question, shard_images, engine, workers)
    made = (lambda: make()[1]) if engine == "ray" else (lambda: here)
    return run_shards(job, made, progress, torch.device(device))
