"""`dear data`: datasets known by name, and what a dataset contains and lacks."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from dear.cli import options as opt
from dear.cli.printing import echo, print_json, say, stages

if TYPE_CHECKING:
    from dear.tasks.check import LabelCheck

group = typer.Typer(
    no_args_is_help=True, help="List the datasets known by name, or check what a dataset contains and lacks."
)


@group.command("list")
def names(as_json: opt.Json = False) -> None:
    """List the datasets known by name. Commands that take a dataset also take a folder or a table.

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
    data_root: opt.DataRoot = None,
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
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.Json = False,
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
    from dear.tasks.check import LabelCheck
    from dear.tasks.check import check as check_data

    with stages() as progress:
        result = check_data(
            name,
            data_root=data_root,
            backbone=backbone,
            out=out,
            checked=checked,
            device=device,
            progress=progress,
        )
    if as_json:
        print_json({"data": name, **result.to_dict()} if isinstance(result, LabelCheck) else result.to_dict())
    elif isinstance(result, LabelCheck):
        _print_labels(result, name, str(backbone), out)
    else:
        echo(str(result))
    if not isinstance(result, LabelCheck) and not result.complete:
        raise typer.Exit(1)


def _print_labels(result: LabelCheck, name: str, backbone: str, out: Path | None) -> None:
    """The labels that look wrong, and the command that corrects them."""
    echo(result.verdict)
    for each in result.suspects[:20]:
        other = f"looks like {each.suggestion} ({each.confidence:.1%})"
        echo(f"  {each.key}: {each.label} ({each.label_probability:.1%}), {other}")
    if len(result.suspects) > 20:
        listed = "--out suspects.csv lists them all" if out is None else f"{out} lists them all"
        echo(f"  and {len(result.suspects) - 20} more; {listed}")
    if result.suspects and not result.several and not name.startswith("world:"):
        command = shlex.join(["label", "start", name, "--data", name, "--backbone", backbone])
        say(f"Correct them on the labeling page: dear {command} --out labels.csv")
    if out is not None:
        say(f"{out}: written")
