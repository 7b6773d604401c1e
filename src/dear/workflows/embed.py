"""Image features and answers of folders or tables of any size, as Parquet: `dear embed`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dear._io.image_file import normalize, read_views
from dear._io.progress import Progress, silent
from dear.clip.factory import load
from dear.clip.model import Clip, cast_backbone, matrix_dtype
from dear.methods.base import Method, in_precision
from dear.runs.folder import load_run
from dear.workflows.shards import Compute, ShardJob, list_images, run_shards

if TYPE_CHECKING:
    import pyarrow as pa

_AT_ONCE = 64  # images in one pass of the backbone


def _batches(clip: Clip, paths: Sequence[str]) -> list[tuple[list[int], Tensor, dict[int, str]]]:
    """Rows, normalized pixels and errors, batch by batch."""
    found = []
    for start in range(0, len(paths), _AT_ONCE):
        part = paths[start : start + _AT_ONCE]
        errors: dict[int, str] = {}
        raw = read_views(part, clip.config.view, errors)
        good = [place for place in range(len(part)) if place not in errors]
        problems = {start + place: sentence for place, sentence in errors.items()}
        found.append(([start + place for place in good], raw[good], problems))
    return found


def embedder(backbone: str, device: str) -> Compute:
    """From paths to a table `path, embedding, error`; unit length, null where an image cannot be read."""
    clip = load(backbone, device=device)
    clip = cast_backbone(clip, matrix_dtype("auto", clip.device))

    @torch.inference_mode()
    def compute(paths: Sequence[str]) -> pa.Table:
        import pyarrow as pa

        features: list[list[float] | None] = [None] * len(paths)
        problems: list[str | None] = [None] * len(paths)
        for rows, raw, errors in _batches(clip, paths):
            if rows:
                pixels = normalize(raw.to(clip.device), clip.config.mean, clip.config.std)
                units = torch.nn.functional.normalize(clip.encode_image(pixels).float(), dim=-1).cpu()
                for row, unit in zip(rows, units.tolist(), strict=True):
                    features[row] = unit
            for row, sentence in errors.items():
                problems[row] = sentence
        kind = pa.list_(pa.float32(), clip.config.embed_dim)
        columns = {"path": pa.array(paths), "embedding": pa.array(features, kind)}
        return pa.table({**columns, "error": pa.array(problems, pa.string())})

    return compute


def answerer(run: str, backbone: str | None, device: str) -> Compute:
    """From paths to a table `path, class, probability, error` of a run's likeliest class."""
    method: Method = in_precision(load_run(run, backbone, device), "auto")

    @torch.inference_mode()
    def compute(paths: Sequence[str]) -> pa.Table:
        import pyarrow as pa

        names: list[str | None] = [None] * len(paths)
        values: list[float | None] = [None] * len(paths)
        problems: list[str | None] = [None] * len(paths)
        config = method.clip.config
        for rows, raw, errors in _batches(method.clip, paths):
            if rows:
                pixels = normalize(raw.to(method.clip.device), config.mean, config.std)
                best = method.logits(pixels).softmax(-1).max(-1)
                for row, value, number in zip(rows, best.values.tolist(), best.indices.tolist(), strict=True):
                    names[row], values[row] = method.classes[number], value
            for row, sentence in errors.items():
                problems[row] = sentence
        columns = {"path": pa.array(paths), "class": pa.array(names, pa.string())}
        columns["probability"] = pa.array(values, pa.float32())
        return pa.table({**columns, "error": pa.array(problems, pa.string())})

    return compute


def embed(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
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
        progress: told after every shard.

    Returns:
        How many images were computed now.
    """
    images = list_images(source)
    name = backbone if backbone is not None or run is not None else "mini"
    asked = {"what": "features" if run is None else "answers"}
    asked |= {"run": os.path.abspath(run)} if run is not None else {}
    asked |= {"backbone": name} if name is not None else {}
    job = ShardJob(images, Path(out), asked, shard_images, engine, workers)
    if run is None:
        return run_shards(job, lambda: embedder(name or "mini", device), progress)
    return run_shards(job, lambda: answerer(run, backbone, device), progress)
