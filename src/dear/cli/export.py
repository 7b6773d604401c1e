"""`dear export`: an adapted model as one ONNX file."""

from __future__ import annotations

from typing import Annotated

import typer

from dear.cli.common import Json, console, print_json


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("export")(export)


def export(
    run: Annotated[str, typer.Argument(help="The run folder.", show_default=False)],
    onnx: Annotated[str, typer.Option("--onnx", help="The ONNX file to write.", show_default=False)],
    encoder_only: Annotated[
        bool, typer.Option("--encoder-only", help="The adapted image encoder alone: features, not scores.")
    ] = False,
    classes: Annotated[
        str | None,
        typer.Option("--classes", help="Put the adapter on other classes: names with commas between."),
    ] = None,
    backbone: Annotated[
        str | None, typer.Option("--backbone", "-b", help="The backbone, if it moved since training.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write an adapted model as one ONNX file: image in, class scores out.

    Tokens, masks, projections, fusion and class weights are inside; its metadata hold classes and
    preprocessing. The file is compared with PyTorch before it is written.

    Example: `dear export run --onnx model.onnx`, then `dear predict --onnx model.onnx photo.jpg`
    """
    from dear.errors import UsageError
    from dear.export.onnx import export_onnx
    from dear.train import load_run

    method = load_run(run, backbone=backbone)
    if classes is not None:
        names = [name.strip() for name in classes.split(",") if name.strip()]
        if not names:
            raise UsageError("--classes names no class; give names with commas between")
        method = method.with_classes(names)
    written = export_onnx(method, onnx, encoder_only=encoder_only)
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
