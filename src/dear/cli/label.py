"""`dear label`: what to label next, labels of other tools, and the labeling page."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dear.cli import options as opt
from dear.cli.printing import echo, print_json, say, stages
from dear.utils.text import format_count

group = typer.Typer(
    no_args_is_help=True, help="Choose what to label next, label in the browser, or import labels."
)
Pool = Annotated[str, Argument(help="Images to label: a folder, a table with a column path, or a dataset.")]
ClassNames = Annotated[str | None, Option(help="Comma-separated class names.")]


@group.command("next")
def label_next(
    pool: Pool,
    out: Annotated[
        Path | None,
        Option("--out", "-o", help="CSV file to write: path, label, guess, confidence (default: a list)."),
    ] = None,
    data: Annotated[
        str | None, Option("--data", "-d", help="Labeled images: class folders, a table, or a dataset.")
    ] = None,
    data_root: Annotated[str | None, Option(help="Folder that the paths of the table start from.")] = None,
    classes: ClassNames = None,
    classes_file: opt.ClassesFile = None,
    run: Annotated[
        Path | None,
        Option(
            "--run", help="A run whose uncertainty counts, instead of that of a probe.", **opt.RUN_OPTIONS
        ),
    ] = None,
    backbone: opt.Backbone = "mini",
    count: Annotated[int, Option(help="Images to choose.")] = 50,
    tasks: Annotated[
        Path | None, Option(help="Also write Label Studio tasks with predictions to this .json file.")
    ] = None,
    template: opt.Template = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.Json = False,
) -> None:
    """Choose the images that are most worth labeling, the most useful first.

    Every prefix of the list is a good choice. Fill in the column label and give the table as --data: rows
    without a label are unlabeled images.

    Examples:

    `dear label next pool/ --classes "cat,dog" --count 10`

    `dear label next pool/ --classes "cat,dog" --backbone openai/clip-vit-base-patch16 --out next.csv`

    `dear label next pool/ --data photos/ --count 20 --out next.csv --tasks tasks.json`
    """
    from dear.tasks.labeling.next import label_next as choose_next

    names = opt.read_class_list(classes, classes_file)
    with stages() as progress:
        chosen = choose_next(
            pool, count=count, data=data, data_root=data_root, classes=names, run=run, backbone=backbone,
            device=device, template=template, out=out, tasks=tasks, progress=progress,
        )  # fmt: skip
    for reason in chosen.unreadable:
        say(f"skipped: {reason}")
    if as_json:
        print_json(chosen.to_dict() if out is None else {**chosen.to_dict(), "out": str(out)})
        return
    if not chosen.choices:
        say(f"{out or pool}: no image is left to label: all are labeled, or near duplicates of labeled ones")
        return
    if out is None:
        for choice in chosen.choices:
            echo(f"{choice.path}  {choice.guess} ({choice.confidence:.1%})" if choice.guess else choice.path)
        return
    say(f"{out}: {format_count(len(chosen.choices), 'image')} to label, the most useful first")
    if Path(pool).is_dir():  # whose paths the table holds
        train = f"dear adapt --data {out} --data-root {pool} --unlabeled {pool}"
        say(f"next: fill in the column label, then {train}")


@group.command("import")
def label_import(
    source: Annotated[
        str, Argument(help="A Label Studio export (.json or .csv), a table of labels, or class folders.")
    ],
    out: Annotated[Path, Option("--out", "-o", help="The table of labels to add to.")],
    images: Annotated[
        str | None, Option(help="Folder of the images, if the export names them by other addresses.")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Add labels of another tool to a table of labels.

    Example: `dear label import project.json --images pool/ --out labels.csv`
    """
    from dear.tasks.labeling.exchange import add_labels

    result = add_labels(source, out, images=images)
    if as_json:
        print_json(result.to_dict())
        return
    classes = format_count(len(set(result.labels.values())), "class", "classes")
    say(f"{out}: {format_count(result.added, 'label')} added, {len(result.labels)} in all, {classes}")
    folder = images or (source if Path(source).is_dir() else None)
    if folder is not None:  # whose paths the table holds
        say(f"next: dear adapt --data {out} --data-root {folder}")


@group.command("start")
def label_start(
    pool: Pool,
    out: Annotated[Path, Option("--out", "-o", help="The table of labels; answers are added to it.")],
    data: Annotated[
        str | None,
        Option(
            "--data", "-d", help="Labels to start with and to check: class folders or a table of the images."
        ),
    ] = None,
    classes: ClassNames = None,
    classes_file: opt.ClassesFile = None,
    backbone: opt.Backbone = "mini",
    template: opt.Template = None,
    host: Annotated[
        str, Option(help="Address to listen on; 0.0.0.0 for a phone in the same network.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0 finds a free one.")] = 7861,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Label images in the browser: one key per class, groups of similar images at once, undo.

    Every answer is on disk before the next image appears. Stop and start again at any time. Labels that look
    wrong are changed or marked as checked under "Check labels".

    Examples:

    `dear label start pool/ --classes "cat,dog" --out labels.csv`

    `dear label start photos/ --data photos/ --out labels.csv`
    """
    from dear.tasks.labeling.server import serving
    from dear.tasks.labeling.start import start_session

    names = opt.read_class_list(classes, classes_file)
    with stages() as progress:
        session, unreadable = start_session(
            pool, out, data=data, classes=names, backbone=backbone, template=template, device=device,
            progress=progress,
        )  # fmt: skip
    for reason in unreadable:
        say(f"skipped: {reason}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # closes as after Ctrl-C
    with serving(session, host, port) as server:
        say(f"Label {len(session.paths)} images at {server.url} (Ctrl-C ends it)")
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            say(f"\n{len(session.answers.labels)} labels in {out}. To train: {session.command()}")
