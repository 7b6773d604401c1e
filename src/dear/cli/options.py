"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from dear.cli.printing import say
from dear.errors import RunError, UsageError
from dear.utils.parallel import cpu_limit


def run_folder(source: str) -> Path:
    """The folder of a run: the folder itself, or where `hf://owner/name` or an archive was put.

    A missing folder is reported before PyTorch is imported, which takes seconds.
    """
    shared = source.startswith("hf://")
    if not shared and not os.path.exists(source):
        raise RunError(f"{source}: no such run folder; `dear zeroshot` answers with a backbone", hint="adapt")
    if not shared and not source.lower().endswith(".zip"):
        return Path(source)
    from dear.tasks.share.task import local_run

    return local_run(source)


def set_threads(value: int | None) -> int | None:
    """Set the CPU threads of PyTorch, whether it is imported already or later; the value of `--threads`.

    Without the option PyTorch takes every core, or what the CPU limit of the container allows. The number
    does not follow the load of the machine: it decides how sums are rounded, and the same command should
    return the same bits.
    """
    limit = cpu_limit() if value is None else value
    if limit is None:
        return value
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # for a PyTorch that is not imported yet
        if value is not None or name not in os.environ:
            os.environ[name] = str(limit)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(limit)
    return value


#: keywords of an argument or option that names a run
RUN_OPTIONS: dict[str, Any] = {"parser": run_folder, "metavar": "RUN", "show_default": False}
Run = Annotated[
    Path,
    Argument(
        help="Run folder that `dear adapt` wrote, archive of `dear bundle`, or hf://owner/name.",
        **RUN_OPTIONS,
    ),
]
Backbone = Annotated[
    str,
    Option(
        "--backbone",
        "-b",
        help="Name (see `dear backbones`), folder, or checkpoint file; mini knows drawn images only.",
    ),
]
RunBackbone = Annotated[
    str | None, Option("--backbone", "-b", help="The backbone, if it moved since training.")
]
Data = Annotated[
    str,
    Option(
        "--data",
        "-d",
        help="A folder of class folders, a table (CSV, JSONL, Parquet, COCO JSON), a benchmark name, "
        "hf://datasets/NAME, or world:NAME.",
    ),
]
DataRoot = Annotated[
    str | None,
    Option(help="The folder that relative paths of a table start from, or that holds the benchmarks."),
]
MARGIN = "Margin around boxes (x, y, width, height), as a fraction of each box"
Margin = Annotated[float, Option("--box-margin", help=f"{MARGIN}.")]
MarginOrRun = Annotated[float | None, Option("--box-margin", help=f"{MARGIN} (default: as in training).")]
Split = Annotated[str, Option(help="Part of the data: train, test, val, or all.")]
Template = Annotated[str | None, Option(help='The prompt, with {} for the class: "a photo of a {}."')]
Texts = Annotated[
    str | None,
    Option(help='Several texts per class, averaged: JSON {"class": ["sentence.", "other name"]}.'),
]
Unreadable = Annotated[
    str, Option(help="What to do with images that cannot be read: stop, or skip and report.")
]
Roles = Annotated[str | None, Option(help="Role map of the backbone.")]
AllowOtherRoles = Annotated[
    bool, Option("--allow-other-roles", help="Use a role map that was made on other weights.")
]
Mode = Annotated[
    str | None, Option(help="Mode of the method, for DeAR fused or decoupled (default: the usual one).")
]
RejectShare = Annotated[float, Option(help="Share of images of known classes that may be rejected.")]
Device = Annotated[str, Option(help="cpu, cuda, cuda:1, mps …; auto takes a GPU if there is one.")]
Threads = Annotated[
    int | None,
    Option(
        "--threads",
        min=1,
        callback=set_threads,
        show_default=False,
        help="CPU threads (default: all cores, or the CPU limit of the container).",
    ),
]
Log = Annotated[
    str | None,
    Option(help="Also log to tensorboard:FOLDER, mlflow:FOLDER, wandb:PROJECT, or trackio:PROJECT."),
]
RunOut = Annotated[Path, Option("--out", "-o", help="The run folder to write.")]
PageOut = Annotated[Path, Option("--out", "-o", help="The page to write.")]
Json = Annotated[bool, Option("--json", help="Print one JSON object for programs, and nothing else.")]
Way = Annotated[
    str,
    Option(
        help="How to remove what --without names. Concepts: words, heads, examples, leace (join with +); "
        "image properties: directions, heads, copies; auto: cross-validation chooses."
    ),
]
Examples = Annotated[
    list[str] | None,
    Option(
        help="Images that show what --without names: a folder per value; CONCEPT=FOLDER for several concepts."
    ),
]


CLASSES_HELP = (
    'Comma-separated class names instead of the trained ones. A + before any name ("+red fox") adds all '
    "names to the trained ones; a name with a comma goes in double quotes."
)
CLASSES_FILE_HELP = "UTF-8 text file with the names for --classes, one per line."
Classes = Annotated[str | None, Option(help=CLASSES_HELP)]
ClassesFile = Annotated[Path | None, Option(help=CLASSES_FILE_HELP)]


def read_class_list(classes: str | None, file: Path | None) -> list[str] | None:
    """The names of `--classes` or `--classes-file`, each with its `+`; None if neither is given.

    `dear.runs.class_lists.resolve_classes` applies them to a run.
    """
    if classes is None and file is None:
        return None
    from dear.runs.class_lists import split_class_lines, split_class_list

    if classes is not None and file is not None:
        raise UsageError("--classes and --classes-file cannot be combined; use one of them")
    if file is not None:
        from dear.utils.files import read_text

        names = split_class_lines(read_text(file, "list of classes"))
        if not names:
            raise UsageError(f"--classes-file {file}: contains no class; write one per line")
        say(f"classes: {len(names)} from {file}, the first is {names[0]!r}")
        return names
    names = split_class_list(classes or "")
    if not names:
        raise UsageError("--classes needs at least one name, got none; separate names by commas")
    if len(names) == 1 and os.path.isfile(names[0]):
        raise UsageError(f"--classes {names[0]}: is a file; use --classes-file {names[0]}")
    if len(names) == 1 and not names[0].startswith("+"):
        say(f"classes: only {names[0]!r}; with one class every image is answered with it")
    return names
