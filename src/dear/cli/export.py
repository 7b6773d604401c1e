"""`dear export`: an adapted model as one ONNX file, or folded into a plain CLIP."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from dear.cli import options as opt
from dear.cli.printing import print_json, say, stages
from dear.utils.text import format_bytes


def export(
    run: opt.Run,
    onnx: Annotated[str | None, Option(help="ONNX file to write.")] = None,
    merged: Annotated[
        str | None,
        Option(help="Folder to write a plain CLIP to (purify, clip-lora, zeroshot --without)."),
    ] = None,
    encoder_only: Annotated[
        bool, Option("--encoder-only", help="Write the adapted image encoder alone: features, not scores.")
    ] = False,
    classes: opt.Classes = None,
    classes_file: opt.ClassesFile = None,
    precision: Annotated[
        str,
        Option(help="Precision of the file: float32, float16 (half the size) or int8 (faster on a CPU)."),
    ] = "float32",
    max_loss: Annotated[
        float, Option(help="Points of accuracy that float16 or int8 may lose; else nothing is written.")
    ] = 1.0,
    data: Annotated[
        str | None,
        Option(
            "--data", "-d", help="Labeled images to measure the loss on (default: held-out ones of the run)."
        ),
    ] = None,
    data_root: opt.DataRoot = None,
    backbone: opt.RunBackbone = None,
    threads: opt.Threads = None,
    as_json: opt.Json = False,
) -> None:
    """Write an adapted model as one ONNX file, or folded into a plain CLIP.

    The ONNX file maps an image to class scores and contains tokens, masks, projections, fusion and class
    weights; its metadata contain classes, preprocessing, and what “none of these” needs. It is compared with
    PyTorch before it is written. In float16 or int8 the loss of accuracy is measured, printed, and stored.
    A plain CLIP has the size and cost of the frozen model and can be used as any other backbone.

    Examples:

    `dear export run --onnx model.onnx`, then `dear predict --onnx model.onnx photo.jpg`

    `dear export run --onnx small.onnx --precision int8`

    `dear export run --merged folder`, then `dear zeroshot --backbone folder --data photos`
    """
    from dear.export.task import export_run

    names = opt.read_class_list(classes, classes_file)
    with stages() as progress:
        result = export_run(
            run,
            onnx=onnx,
            merged=merged,
            encoder_only=encoder_only,
            classes=names,
            backbone=backbone,
            precision=precision,
            max_loss=max_loss,
            data=data,
            data_root=data_root,
            progress=progress,
        )
    if as_json:
        print_json(result.to_dict())
        return
    if merged is not None:
        size = f"a plain CLIP of {result.parameters:,} parameters, as many as the frozen one"
        say(f'{result.path}: {size}; prompts are "{result.template}"')
        return
    outputs = ", ".join(result.outputs)
    size = f"{format_bytes(result.bytes)}, input pixels, outputs {outputs}"
    difference = (
        "" if result.difference is None else f"; largest difference from PyTorch {result.difference:.1g}"
    )
    say(f"{result.path}: {size}{difference}")
    if result.loss is not None:
        loss = result.loss
        say(
            f"{precision}: loses {loss.points:.2f} points of accuracy ({loss.float32:.2%} to "
            f"{loss.reduced:.2%}) on {loss.images:,} images of {loss.data}; {loss.same:.1%} keep their answer"
        )
    if not result.rejects and not result.several and not encoder_only:
        say("notice: the run is not calibrated for its classes, so the file cannot answer “none of these”")
