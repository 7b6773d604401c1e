"""`dear predict`: answers for images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from dear._io.printable import shown
from dear.cli.common import Device, Json, Mode, OwnBackbone, Template, class_names, device_named, print_json

Answers = list[tuple[str, tuple[tuple[str, float], ...]]]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("predict")(predict)


def predict(
    run: Annotated[
        Path | None, typer.Argument(help="The run folder; leave out with --onnx.", show_default=False)
    ] = None,
    images: Annotated[list[Path] | None, typer.Argument(help="Images.", show_default=False)] = None,
    classes: Annotated[
        str | None, typer.Option("--classes", help="Other class names, with commas between (new ones too).")
    ] = None,
    classes_file: Annotated[
        Path | None, typer.Option("--classes-file", help="Other class names from a text file, one per line.")
    ] = None,
    template: Template = None,
    top: Annotated[int, typer.Option("--top", help="Answers per image.")] = 5,
    mode: Mode = None,
    onnx: Annotated[
        Path | None, typer.Option("--onnx", help="An exported model instead of a run folder.")
    ] = None,
    backbone: OwnBackbone = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Answers for images, likeliest first, with probabilities.

    Classes, its own and new ones, are put into the template that the run was trained with, unless
    --template gives another.

    Examples:

    `dear predict run a.jpg b.jpg --top 3`

    `dear predict run a.jpg --classes "tabby cat, red fox"`

    `dear predict --onnx model.onnx a.jpg`
    """
    from dear.errors import UsageError

    if top < 1:
        raise UsageError(f"--top {top}: ask for at least one answer per image")
    paths = [str(path) for path in (images or [])]
    answers: Answers
    if onnx is not None:
        given = {"--classes": classes, "--classes-file": classes_file, "--template": template}
        given |= {"--backbone": backbone, "--device": None if device in ("auto", "cpu") else device}
        _refuse_with_onnx(given)
        paths = [*([] if run is None else [str(run)]), *paths]  # without a run, the first one is an image
        if not paths:
            raise UsageError("name at least one image: dear predict --onnx model.onnx a.jpg")
        from dear.export import runtime

        answers = [(found.image, found.top) for found in runtime.predict(onnx, paths, top, mode)]
    else:
        if run is None or not paths:
            raise UsageError("name a run folder and at least one image: dear predict run a.jpg")
        from dear.workflows.predict import predict_run

        said = predict_run(
            str(run),
            paths,
            classes=class_names(classes, classes_file),
            template=template,
            top=top,
            mode=mode,
            backbone=backbone,
            device=device_named(device),
        )
        answers = [(found.image, found.classes) for found in said]
    _print(answers, as_json)


def _refuse_with_onnx(given: Mapping[str, object]) -> None:
    """Refuse options that an exported model has no use for: its classes, prompts and device are fixed."""
    from dear.errors import UsageError

    for option, value in given.items():
        if value is not None:
            raise UsageError(
                f"{option}: an exported model has its classes, prompts and weights built in and runs on the "
                "CPU; use the run folder"
            )


def _print(answers: Answers, as_json: bool) -> None:
    """Answers for programs or for people."""
    if as_json:
        rows = [
            {"image": image, "classes": [{"name": n, "probability": p} for n, p in found]}
            for image, found in answers
        ]
        print_json({"predictions": rows})
        return
    for image, found in answers:
        typer.echo(shown(image))
        for name, probability in found:
            typer.echo(f"  {probability:6.1%}  {name}")
