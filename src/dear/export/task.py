"""An adapted model as one ONNX file, or folded into a plain CLIP: `dear export`, `dear.export_run`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dear.clip.checkpoint import save_hf
from dear.clip.model import Clip
from dear.errors import UsageError
from dear.export.onnx import export_onnx
from dear.runs.class_lists import resolve_classes, split_class_list
from dear.runs.model import Run
from dear.tasks.load import load_model
from dear.utils.files import PathLike


@dataclass(frozen=True)
class ExportResult:
    """What was written."""

    path: Path
    outputs: tuple[str, ...] = ()  #: of an ONNX file
    bytes: int = 0  #: size of an ONNX file
    difference: float | None = None  #: largest difference of its scores from PyTorch
    parameters: int = 0  #: of a plain CLIP
    template: str = ""  #: prompt that a plain CLIP was adapted with
    rejects: bool = False  #: whether the run can reject images, which a file cannot

    def report(self) -> dict[str, Any]:
        """Plain values for JSON."""
        if self.parameters:
            return {"path": str(self.path), "numbers": self.parameters, "template": self.template}
        return {
            "path": str(self.path),
            "outputs": list(self.outputs),
            "bytes": self.bytes,
            "difference": self.difference,
        }


def export_run(
    run: Run,
    *,
    onnx: PathLike | None = None,
    merged: PathLike | None = None,
    encoder_only: bool = False,
    classes: str | Sequence[str] | None = None,
    backbone: PathLike | Clip | None = None,
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

    Raises:
        UsageError: neither or both of `onnx` and `merged` are named, or a setting has no effect.

    Example:
        >>> export_run("run", onnx="model.onnx").difference < 1e-4    # doctest: +SKIP
        True
    """
    if (onnx is None) == (merged is None):
        raise UsageError("name what to write: onnx (a file) or merged (a folder)")
    if merged is not None and (classes is not None or encoder_only):
        raise UsageError("a plain CLIP has no classes: leave out classes and encoder_only")
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
    written = export_onnx(model, os.fspath(onnx), encoder_only=encoder_only)
    rejects = model.reference is not None and not encoder_only
    return ExportResult(
        Path(written.path), tuple(written.outputs), written.size, written.difference, rejects=rejects
    )
