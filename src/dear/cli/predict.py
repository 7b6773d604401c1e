"""`dear predict`: answers for images."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from dear.cli import options as opt
from dear.cli.printing import print_answers, say, stages
from dear.errors import InputError, UsageError


def predict(
    run: Annotated[
        str | None,
        Argument(
            help="Run folder, archive of `dear bundle`, or hf://owner/name; leave out with --onnx.",
            metavar="RUN",
            show_default=False,
        ),
    ] = None,
    images: Annotated[
        list[str] | None,
        Argument(
            help="Images, folders, patterns such as 'photos/*.jpg', or - for a list on standard input.",
            show_default=False,
        ),
    ] = None,
    classes: opt.Classes = None,
    classes_file: opt.ClassesFile = None,
    template: opt.Template = None,
    reject: Annotated[
        bool, Option("--reject", help="Answer images of no class with “none of these”.")
    ] = False,
    reject_share: opt.RejectShare = 0.05,
    certain: Annotated[
        float | None,
        Option(
            help="For a class tree: answer with the deepest node of at least this probability (default: 0.8)."
        ),
    ] = None,
    top: Annotated[int, Option(help="Classes per image.")] = 5,
    together: Annotated[
        bool,
        Option(
            "--together", help="Let the images help each other: an answer then depends on the other images."
        ),
    ] = False,
    mode: opt.Mode = None,
    onnx: Annotated[Path | None, Option(help="Exported model to use instead of a run.")] = None,
    backbone: opt.RunBackbone = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    unreadable: opt.Unreadable = "skip",
    csv: Annotated[Path | None, Option(help="File to write as a table, one row per image.")] = None,
    jsonl: Annotated[
        Path | None, Option(help="File to write as one JSON object per image and line; - prints them.")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Answer images: likeliest classes first, with probabilities.

    An image that cannot be read is reported on standard error and does not stop the others; the exit status
    is then 1. Class names are inserted into the template that the run was trained with, unless --template is
    given.

    Examples:

    `dear predict run a.jpg b.jpg --top 3`

    `dear predict run a.jpg --classes "tabby cat, red fox"`

    `dear predict run a.jpg --classes +"red fox" --reject`

    `dear predict run photos/ --csv answers.csv`

    `find . -name "*.jpg" | dear predict run - --jsonl answers.jsonl`

    `dear predict --onnx model.onnx a.jpg`
    """
    printed = str(jsonl) == "-"
    if sum((csv is not None, jsonl is not None, as_json)) > 1:
        raise UsageError("--csv, --jsonl and --json cannot be combined; use one of them")
    words = list(images or [])
    settings: dict[str, Any] = {
        "template": template,
        "reject": reject,
        "reject_share": reject_share,
        "certain": certain,
        "top": top,
        "mode": mode,
        "together": together,
        "backbone": backbone,
        "unreadable": unreadable,
        "csv": csv,
        "jsonl": None if printed else jsonl,
    }
    if onnx is not None:
        words = [*([] if run is None else [run]), *words]  # without a run, the first one is an image
    if not words or (run is None and onnx is None):
        example = "dear predict run a.jpg" if onnx is None else f"dear predict --onnx {onnx} a.jpg"
        raise UsageError(f"expected a run and at least one image: {example}")
    folder = opt.run_folder(run) if run is not None and onnx is None else None
    files = _read_list(words)
    if onnx is not None:
        from dear.export.predict import predict_exported

        fixed = classes if classes is not None else classes_file
        predictions = predict_exported(onnx, files, classes=fixed, device=device, **settings)
    else:
        from dear.tasks.predict import predict as answer

        assert folder is not None
        names = opt.read_class_list(classes, classes_file)
        with stages() as progress:
            predictions = answer(folder, files, classes=names, device=device, progress=progress, **settings)
    if together:
        say(f"answered together ({len(predictions)} images): each answer depends on the others")
    if csv is not None or (jsonl is not None and not printed):
        say(f"{csv or jsonl}: {len(predictions)} images")
    else:
        print_answers(predictions, as_json, lines=printed)
    if predictions.errors:
        for reason in predictions.errors:
            say(f"unreadable: {reason}")
        say(f"{len(predictions.errors)} of {len(predictions)} images could not be read")
        raise typer.Exit(1)


def _read_list(words: list[str]) -> list[str]:
    """The arguments, with `-` replaced by the lines of standard input."""
    names: list[str] = []
    for word in words:
        names += [line.rstrip("\r\n") for line in sys.stdin if line.strip()] if word == "-" else [word]
    if not names:
        raise InputError("standard input must name at least one image, got none")
    return names
