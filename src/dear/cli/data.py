"""`dear data`: what a dataset's folder must hold, and what it holds."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dear.cli.options import DataRoot, Device, Json, Threads
from dear.cli.printing import echo, print_json, say, stages
from dear.errors import UsageError

group = typer.Typer(no_args_is_help=True, help="Datasets: list those known by name, check a folder.")


@group.command("list")
def names(as_json: Json = False) -> None:
    """List the datasets known by name. A folder or a table can be given instead.

    Example: `dear data list`
    """
    from dear.data import list_datasets

    datasets = list_datasets()
    if as_json:
        print_json({"datasets": list(datasets)})
    else:
        echo("\n".join(datasets))


@group.command("check")
def check(
    name: Annotated[str, Argument(help="A benchmark's name, a folder, a table, or world:NAME.")],
    data_root: DataRoot = None,
    backbone: Annotated[
        str | None,
        Option("--backbone", "-b", help="Also look for wrong labels, with features of this backbone."),
    ] = None,
    out: Annotated[
        Path | None,
        Option("--out", "-o", help="The .csv file to write suspected labels to."),
    ] = None,
    checked: Annotated[
        Path | None,
        Option(
            help="Table of labels of the labeling page; labels that were checked there are not suspected."
        ),
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Check a dataset: what is present, what is missing, and where to download it.

    A benchmark's layout is compared with what was published; of a folder, a table or a world task every
    image is read. With a backbone, labels that look wrong are listed: another class is twenty times as
    probable for a classifier that did not see the image. Of several labels per image, those that look missing
    are listed as well. Correct them on the labeling page:
    `dear label start photos/ --data photos/ --out labels.csv`. The exit status is 1 when something is missing
    or unreadable.

    Examples:

    `dear data check EuroSAT --data-root data/`

    `dear data check photos/`

    `dear data check photos/ --backbone openai/clip-vit-base-patch16 --out suspects.csv`
    """
    from dear.data.check import check_dataset, check_splits
    from dear.data.open import find_benchmark

    if out is not None and (backbone is None or out.suffix.lower() != ".csv"):
        raise UsageError(f"--out must end in .csv and needs --backbone, got {out}")
    if backbone is not None:
        _check_labels(name, data_root, backbone, out, checked, device, as_json)
    elif find_benchmark(name) is not None and not Path(name).is_dir():
        check = check_dataset(name, data_root or ".")
        if as_json:
            print_json(check.as_dict())
        else:
            echo(str(check))
        raise typer.Exit(0 if check.complete else 1)
    else:
        splits = check_splits(name, data_root)
        if as_json:
            print_json(splits.report())
        else:
            echo(str(splits))
        raise typer.Exit(1 if splits.unreadable else 0)


def _check_labels(
    name: str,
    root: str | None,
    backbone: str,
    out: Path | None,
    checked: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """Look for labels that seem wrong."""
    from dear.tasks.labeling.answers import AnswerFile
    from dear.tasks.labeling.check import check_labels, open_all
    from dear.tasks.load import load_backbone
    from dear.utils.files import check_output

    if checked is not None and not checked.is_file():
        raise UsageError(f"--checked {checked}: no such table of labels")
    check_output(out)
    images = open_all(name, root)[0]
    fine = AnswerFile(checked).read().checked if checked is not None else ()
    clip = load_backbone(backbone, device)
    with stages() as progress:
        result = check_labels(images, clip, fine, progress)
    if out is not None:
        result.write(out)
    if as_json:
        print_json({"data": name, **result.report()})
        return
    echo(result.verdict)
    for each in result.suspects[:20]:
        other = f"looks like {each.suggestion} ({each.confidence:.1%})"
        echo(f"  {each.key}: {each.label} ({each.label_probability:.1%}), {other}")
    if len(result.suspects) > 20:
        echo(f"  and {len(result.suspects) - 20} more; --out suspects.csv lists them all")
    if result.suspects and not result.several and not name.startswith("world:"):
        command = shlex.join(["label", "start", name, "--data", name, "--backbone", backbone])
        say(f"Correct them on the labeling page: dear {command} --out labels.csv")
    if out is not None:
        say(f"{out}: written")
