"""Answers of a run for images: `dear predict`."""

from __future__ import annotations

from typing import Any

from dear._io.files import PathLike
from dear._io.progress import Progress
from dear.clip.model import Clip
from dear.runs.answer import Answer
from dear.runs.batches import Images
from dear.runs.model import Model, Run


def predict_run(
    run: Run,
    images: Images,
    *,
    backbone: PathLike | Clip | None = None,
    device: str = "auto",
    progress: Progress | None = None,
    **options: Any,
) -> list[Answer]:
    """Answers for images, among the run's classes or others.

    Args:
        run: run folder, method or model.
        images: files or Pillow images; `dear._io.image_file.find_images` finds those of folders.
        backbone: for a run folder whose backbone moved.
        device: "auto", "cpu", "cuda", ...
        progress: called with ("images", images done, images in all).
        options: of `Model.answers`, such as `top=3` or `classes=["red fox"]`.

    Raises:
        DearError: anything a user can correct, in one sentence.
    """
    return Model.of(run, backbone, device).answers(images, progress=progress, **options)
