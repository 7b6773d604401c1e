"""`dear data`: what a dataset's folder must hold, and what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dear._io.text import shown
from dear.cli.common import DataRoot, Json, print_json

group = typer.Typer(no_args_is_help=True, help="Datasets: list those known by name, check a folder.")


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.add_typer(group, name="data")


@group.command("list")
def names(as_json: Json = False) -> None:
    """List the datasets known by name. A folder or a table can be given instead.

    Example: `dear data list`
    """
    from dear.data import list_datasets

    found = list_datasets()
    if as_json:
        print_json({"datasets": list(found)})
        return
    typer.echo("\n".join(found))


@group.command("check")
def check(
    name: Annotated[str, typer.Argument(help="A benchmark's name, a folder, a table, or world:NAME.")],
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Say what of a dataset is there, what is missing, and where the field gets it.

    A benchmark's layout is compared with what was published; of a folder, a table or a world task every
    image is read. The exit status is 1 when something is missing or unreadable.

    Examples:

    `dear data check EuroSAT --data-root data/`

    `dear data check photos/`
    """
    from dear.data.check import check_dataset
    from dear.data.open import find_benchmark

    if find_benchmark(name) is not None and not Path(name).is_dir():
        found = check_dataset(name, data_root or ".")
        if as_json:
            print_json(found.as_dict())
        else:
            typer.echo(str(found))
        raise typer.Exit(0 if found.complete else 1)
    _check_images(name, as_json)


def _check_images(name: str, as_json: bool) -> None:
    from dear.data import open_data
    from dear.data.check import check_images, class_counts, describe_balance

    counts: dict[str, dict[str, int]] = {}
    bad = []
    for split in ("train", "test"):
        images = open_data(name, split)
        counts[split] = class_counts(images)
        bad += [item.reason for item in check_images(images, "skip").unreadable]
    if as_json:
        splits = {
            split: {
                "images": sum(found.values()),
                "classes": len(found),
                "fewest": min(found.values(), default=0),
                "most": max(found.values(), default=0),
                "per_class": found,
            }
            for split, found in counts.items()
        }
        print_json({"data": name, "splits": splits, "unreadable": bad})
    else:
        for split, found in counts.items():
            typer.echo(f"{split}: {shown(describe_balance(found))}")
        for item in bad:
            typer.echo(f"unreadable: {shown(item)}")
    raise typer.Exit(1 if bad else 0)
