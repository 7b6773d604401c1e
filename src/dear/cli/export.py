"""`dear export`: an adapted model as one ONNX file, or folded into a plain CLIP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dear.cli.common import Json, OwnBackbone, Run, class_names, console, print_json, say

if TYPE_CHECKING:
    from dear.methods import Method


def export(
    run: Run,
    onnx: Annotated[str | None, typer.Option("--onnx", help="The ONNX file to write.")] = None,
    merged: Annotated[
        str | None,
        typer.Option(
            "--merged", help="The folder to write a plain CLIP to (purify, clip-lora, zeroshot --without)."
        ),
    ] = None,
    encoder_only: Annotated[
        bool, typer.Option("--encoder-only", help="The adapted image encoder alone: features, not scores.")
    ] = False,
    classes: Annotated[
        str | None,
        typer.Option("--classes", help="Put the adapter on other classes: names with commas between."),
    ] = None,
    classes_file: Annotated[
        Path | None, typer.Option("--classes-file", help="Other classes from a text file, one per line.")
    ] = None,
    backbone: OwnBackbone = None,
    as_json: Json = False,
) -> None:
    """Write an adapted model as one ONNX file, or folded into a plain CLIP.

    The ONNX file takes an image and gives class scores: tokens, masks, projections, fusion and class weights
    are inside; its metadata hold classes and preprocessing. It is compared with PyTorch before it is written.

    A plain CLIP has the frozen model's size and cost, and is a backbone like any other.

    Example: `dear export run --onnx model.onnx`, then `dear predict --onnx model.onnx photo.jpg`

    Example: `dear export run --merged folder`, then `dear zeroshot --backbone folder --data photos`
    """
    from dear.errors import UsageError
    from dear.runs.model import Model

    if (onnx is None) == (merged is None):
        raise UsageError("say what to write: --onnx FILE or --merged FOLDER")
    model = Model.load(run, backbone)
    if merged is not None:
        if classes is not None or classes_file is not None or encoder_only:
            raise UsageError(
                "a plain CLIP has no classes: leave out --classes, --classes-file and --encoder-only"
            )
        _write_merged(model.method, merged, as_json)
        return
    assert onnx is not None
    from dear.export.onnx import export_onnx

    names = class_names(classes, classes_file)
    written = export_onnx(model.with_classes(names), onnx, encoder_only=encoder_only)
    if as_json:
        print_json(
            {
                "path": str(written.path),
                "outputs": list(written.outputs),
                "bytes": written.size,
                "difference": written.difference,
            }
        )
        return
    outputs = ", ".join(written.outputs)
    console().print(
        f"{written.path}: {written.size / 1e6:.1f} MB, input pixels, outputs {outputs}; "
        f"largest difference from PyTorch {written.difference:.1g}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    if model.reference is not None and not encoder_only:
        say("notice: the file cannot tell images of no class; for `dear predict --reject` use the run folder")


def _write_merged(method: Method, folder: str, as_json: bool) -> None:
    """Fold the adapter into its backbone and write that as a folder."""
    from dear.clip.checkpoint import save_hf

    plain = method.merge()
    save_hf(plain, folder)
    numbers = sum(p.numel() for p in plain.parameters())
    if as_json:
        print_json({"path": folder, "numbers": numbers, "template": method.template})
        return
    console().print(
        f"{folder}: a plain CLIP of {numbers:,} parameters, as many as the frozen one; prompts are "
        f'"{method.template}"',
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
