"""`dear predict`: answers for images."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from dear.cli.options import (
    AS_RUN,
    Classes,
    ClassesFile,
    Device,
    Json,
    Mode,
    OwnBackbone,
    Template,
    Threads,
    read_class_list,
)
from dear.cli.printing import echo, print_json, say, stages
from dear.errors import InputError, UsageError

if TYPE_CHECKING:
    from dear.runs.answer import Answer


def predict(
    run: Annotated[
        Path | None,
        Argument(
            help="Run folder, archive of `dear bundle`, or hf://owner/name; leave out with --onnx.", **AS_RUN
        ),
    ] = None,
    images: Annotated[
        list[str] | None,
        Argument(
            help="Images, folders, patterns such as 'photos/*.jpg', or - for a list on standard input.",
            show_default=False,
        ),
    ] = None,
    classes: Classes = None,
    classes_file: ClassesFile = None,
    template: Template = None,
    reject: Annotated[
        bool, Option("--reject", help="Answer images of no class with “none of these”.")
    ] = False,
    reject_share: Annotated[
        float, Option(help="Share of images of known classes that --reject may refuse.")
    ] = 0.05,
    top: Annotated[int, Option(help="Answers per image.")] = 5,
    mode: Mode = None,
    onnx: Annotated[Path | None, Option(help="An exported model instead of a run folder.")] = None,
    backbone: OwnBackbone = None,
    device: Device = "auto",
    threads: Threads = None,
    unreadable: Annotated[str, Option(help="Images that cannot be read: skip and report, or stop.")] = "skip",
    csv: Annotated[Path | None, Option(help="Write a table to this file: one row per image.")] = None,
    jsonl: Annotated[
        bool, Option("--jsonl", help="Print one JSON object per image and line, for programs.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Answers for images, likeliest first, with probabilities.

    An image that cannot be read is reported on standard error and does not stop the others.

    Classes, its own and new ones, are put into the template that the run was trained with, unless
    --template gives another.

    Examples:

    `dear predict run a.jpg b.jpg --top 3`

    `dear predict run a.jpg --classes "tabby cat, red fox"`

    `dear predict run a.jpg --classes +"red fox" --reject`

    `dear predict run photos/ --csv answers.csv`

    `find . -name "*.jpg" | dear predict run - --jsonl`

    `dear predict --onnx model.onnx a.jpg`
    """
    if top < 1:
        raise UsageError(f"--top {top}: ask for at least one answer per image")
    if sum((csv is not None, jsonl, as_json)) > 1:
        raise UsageError("--csv, --jsonl and --json: choose one")
    words = list(images or [])
    if onnx is not None:
        given = {"--classes": classes, "--classes-file": classes_file, "--template": template}
        given |= {"--backbone": backbone, "--device": None if device in ("auto", "cpu") else device}
        _refuse_with_onnx(reject, [option for option, value in given.items() if value is not None])
        words = [*([] if run is None else [str(run)]), *words]  # without a run, the first one is an image
        if not words:
            raise UsageError("name at least one image: dear predict --onnx model.onnx a.jpg")
        answers = _ask_onnx(onnx, _find(words), top, mode, unreadable)
    else:
        if run is None or not words:
            raise UsageError("name a run folder and at least one image: dear predict run a.jpg")
        from dear.runs.class_lists import resolve_classes
        from dear.runs.model import Model

        names = read_class_list(classes, classes_file)
        files = _find(words)
        model = Model.of(run, backbone, device)
        with stages() as progress:
            answers = model.answers(
                files,
                classes=None if names is None else resolve_classes(names, model.classes),
                reject=reject_share if reject else None,
                template=template,
                top=top,
                mode=mode,
                unreadable=unreadable,
                progress=progress,
            )
    bad = [answer.error for answer in answers if answer.error is not None]
    if bad and len(bad) == len(answers):
        raise InputError(bad[0] if len(bad) == 1 else f"none of {len(bad)} images can be read: {bad[0]}")
    for reason in bad:
        say(f"cannot be read: {reason}")
    if csv is not None:
        _write_csv(answers, csv)
    else:
        _print(answers, as_json, jsonl)


def _refuse_with_onnx(reject: bool, given: Sequence[str]) -> None:
    """Refuse options that an exported model has no use for: its classes, prompts and device are fixed."""
    if reject:
        raise UsageError(
            "--reject: an exported model does not hold the features of the training images, by which images "
            "of no class are recognized; use the run folder"
        )
    if given:
        raise UsageError(
            f"{given[0]}: an exported model has its classes, prompts and weights built in and runs on the "
            "CPU; use the run folder"
        )


def _find(words: list[str]) -> list[str]:
    """The image files that the arguments mean; `-` is a list on standard input, one file per line."""
    from dear.images.views import find_images

    names: list[str] = []
    for word in words:
        names += [line.rstrip("\r\n") for line in sys.stdin if line.strip()] if word == "-" else [word]
    if not names:
        raise InputError("standard input names no image")
    return find_images(names)


def _ask_onnx(onnx: Path, paths: list[str], top: int, mode: str | None, unreadable: str) -> list[Answer]:
    """Answers of an exported model."""
    from dear.export.runtime import OnnxModel
    from dear.runs.answer import Answer

    if unreadable not in ("stop", "skip"):
        raise UsageError(f"unreadable images: the policy is stop or skip, not {unreadable!r}")
    model = OnnxModel(onnx)
    answers = []
    for path in paths:
        try:
            answers += model.predict([path], top, mode)
        except InputError as error:
            if unreadable == "stop":
                raise
            answers.append(Answer(path, (), str(error)))
    return answers


def _write_csv(answers: Sequence[Answer], path: Path) -> None:
    """One row per image; the columns are the same whatever the images are.

    A refused image has the class "none of these" and no probability; why an image was not read is its error.
    """
    import csv
    import io

    from dear.runs.answer import NONE_OF_THESE
    from dear.utils.files import write_atomic

    count = max([1, *(len(answer.classes) for answer in answers)])
    head = ["image", "class", "probability"]
    head += [f"{name}_{place}" for place in range(2, count + 1) for name in ("class", "probability")]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*head, "rejected", "error"])
    for answer in answers:
        cells = [cell for name, value in answer.classes for cell in (name, f"{value:.6f}")]
        cells += [""] * (2 * count - len(cells))
        if answer.rejected:
            cells[:2] = [NONE_OF_THESE, ""]
        refused = "" if answer.rejected is None else "yes" if answer.rejected else "no"
        table.writerow([answer.image, *cells, refused, answer.error or ""])
    write_atomic(path, text.getvalue())
    say(f"{path}: {len(answers)} images")


def _print(answers: Sequence[Answer], as_json: bool, jsonl: bool) -> None:
    """Answers for programs or for people."""
    if as_json:
        print_json({"predictions": [_plain(answer) for answer in answers]})
        return
    for answer in answers:
        if jsonl:
            print_json(_plain(answer))
        elif answer.error is None:
            echo(answer.image)
            if answer.rejected:
                echo("  none of these; the nearest:")
            for name, probability in answer.classes:
                echo(f"  {probability:6.1%}  {name}")


def _plain(answer: Answer) -> dict[str, Any]:
    return {
        "image": answer.image,
        "classes": [{"name": name, "probability": value} for name, value in answer.classes],
        "rejected": answer.rejected,  # null: not asked for
        "error": answer.error,
    }
