"""An adapted model as one ONNX file, or folded into a plain CLIP: `dear export`, `dear.export_run`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dear.clip.checkpoint import save_hf
from dear.clip.model import Clip
from dear.data.images import ImageSet, even_subset
from dear.data.open import open_data
from dear.errors import UsageError
from dear.export.onnx import MAX_LOSS, ExportResult, check_precision, export_onnx
from dear.runs.class_lists import resolve_classes, split_class_list
from dear.runs.images import run_images
from dear.runs.model import Model, Run
from dear.tasks.load import load_model
from dear.utils.files import PathLike, check_output
from dear.utils.progress import Progress

_MEASURED = 1000  # images that the loss of accuracy is measured on at most


def export_run(
    run: Run,
    *,
    onnx: PathLike | None = None,
    merged: PathLike | None = None,
    encoder_only: bool = False,
    classes: str | Sequence[str] | None = None,
    backbone: PathLike | Clip | None = None,
    precision: str = "float32",
    max_loss: float = MAX_LOSS,
    data: Any = None,
    data_root: PathLike | None = None,
    progress: Progress | None = None,
) -> ExportResult:
    """Write an adapted model as one ONNX file, or folded into a plain CLIP.

    Args:
        run: run folder, archive, `hf://owner/name`, method or model.
        onnx: the file to write; it is compared with PyTorch first.
        merged: folder to write a plain CLIP to, for methods that can be merged (purify, clip-lora, zeroshot
            with a concept removed).
        encoder_only: write the adapted image encoder alone: features, not scores.
        classes: other classes than the trained ones, as names or a text with commas; a `+` before any name
            adds all of them to the trained ones.
        backbone: for a run whose backbone moved.
        precision: of the ONNX file: "float32", "float16" (half the size), or "int8" (a quarter, and
            faster on a CPU). The loss of accuracy is measured and stored.
        max_loss: points of accuracy that a file in float16 or int8 may lose; it is not written if it loses
            more.
        data: labeled images to measure the loss on, as in `open_data` (their test split, at most 1,000);
            None: held-out images of the run's dataset.
        data_root: see `open_data`.
        progress: called with ("comparing", images done, images in all).

    Raises:
        UsageError: neither or both of `onnx` and `merged` are named, or a setting has no effect.
        DearError: the file loses more than `max_loss`.

    Example:
        >>> export_run("run", onnx="model.onnx").difference < 1e-4    # doctest: +SKIP
        True
    """
    if (onnx is None) == (merged is None):
        raise UsageError("export writes a file (onnx) or a folder (merged): name one of the two")
    if merged is not None and (classes is not None or encoder_only):
        raise UsageError("a plain CLIP has no classes: leave out classes and encoder_only")
    if merged is not None and precision != "float32":
        raise UsageError(f"precision {precision}: is for ONNX files; a plain CLIP keeps its precision")
    if precision == "float32" and data is not None:
        raise UsageError("data: a file in float32 loses no accuracy, so nothing is measured; leave it out")
    check_precision(precision, encoder_only, max_loss)
    check_output(onnx)
    check_output(merged, folder=True)
    names = split_class_list(classes) if isinstance(classes, str) else classes
    model = load_model(run, backbone, "cpu")
    if merged is not None:
        plain = model.method.merge()
        save_hf(plain, Path(merged))
        count = sum(parameter.numel() for parameter in plain.parameters())
        return ExportResult(Path(merged), parameters=count, template=model.template)
    if names is not None:
        model = model.with_classes(resolve_classes(names, model.classes))
    assert onnx is not None
    images = None if precision == "float32" else _images_for_loss(model, data, data_root)
    return export_onnx(
        model,
        os.fspath(onnx),
        encoder_only=encoder_only,
        precision=precision,
        images=images,
        max_loss=max_loss,
        progress=progress,
    )


def _images_for_loss(model: Model, data: Any, root: PathLike | None) -> ImageSet:
    """Held-out images to measure the loss of accuracy on."""
    if data is not None:
        images = open_data(data, "test", root=root)
    elif model.spec is not None:
        images = run_images(model.spec)
    else:
        raise UsageError("data: a model that was not trained has no images; name labeled ones")
    return even_subset(images, _MEASURED)
