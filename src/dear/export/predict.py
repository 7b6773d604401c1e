"""Answers of an exported model, without PyTorch: `dear predict --onnx`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dear.errors import UsageError
from dear.export.runtime import OnnxModel
from dear.tasks.predict import check_exported, predict

if TYPE_CHECKING:
    from dear.runs.predictions import Predictions


def predict_exported(
    onnx: str | os.PathLike[str],
    images: Sequence[str],
    *,
    classes: Any = None,
    device: str = "auto",
    template: str | None = None,
    backbone: Any = None,
    **settings: Any,
) -> Predictions:
    """Answers of an ONNX file for image files.

    Args:
        onnx: the file.
        images: files, folders and patterns.
        classes: must be None: the classes of the file are fixed.
        device: "auto" or "cpu".
        template: must be None: the prompts of the file are fixed.
        backbone: must be None: the file contains what it needs of the backbone.
        settings: the other parameters of `dear.predict`.

    Raises:
        UsageError: a setting has no effect on an exported model.
    """
    if device not in ("auto", "cpu"):
        raise UsageError(f"device must be cpu for an exported model, got {device}")
    names = ("top", "unreadable")
    chosen = {name: settings[name] for name in names if name in settings}
    check_exported(classes=classes, template=template, backbone=backbone, **chosen)
    return predict(OnnxModel(onnx), images, **settings)
