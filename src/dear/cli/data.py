"""`dear data`: what a dataset's folder must hold, and what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from dear.cli.options import DataRoot, Device, Json, Threads, device_named
from dear.cli.printing import echo, print_json, say, stages
from dear.errors import UsageError

group = typer.Typer(no_args_is_help=True, help="Datasets: list those known by name, check a folder.")


@group.command("list")
def names(as_json: Json = False) -> None:
    """List the datasets known by name. A folder or a table can be given instead.

    Example: `dear data list`
    """
    from dear.data import list_datasets

    found = list_datasets()
    if as_json:
        print_json({"datasets": list(found)})
    else:
        echo("\n".join(found))


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
        Option("--out", "-o", help="Suspected labels as a .html page to correct them on, or a .csv list."),
    ] = None,
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Say what of a dataset is there, what is missing, and where the field gets it.

    A benchmark's layout is compared with what was published; of a folder, a table or a world task every
    image is read. With a backbone, labels that look wrong are listed: another class is twenty times as
    probable for a classifier that did not see the image. The page makes a corrected table that `--data`
    takes. The exit status is 1 when something is missing or unreadable.

    Examples:

    `dear data check EuroSAT --data-root data/`

    `dear data check photos/`

    `dear data check photos/ --backbone openai/clip-vit-base-patch16 --out labels.html`
    """
    from dear.data.check import check_dataset
    from dear.data.open import find_benchmark

    if out is not None and (backbone is None or out.suffix.lower() not in (".html", ".csv")):
        raise UsageError(f"--out {out}: name a .html page or a .csv list, and the --backbone to look with")
    if backbone is not None:
        _check_labels(name, data_root, backbone, out, device_named(device), as_json)
    elif find_benchmark(name) is not None and not Path(name).is_dir():
        found = check_dataset(name, data_root or ".")
        if as_json:
            print_json(found.as_dict())
        else:
            echo(str(found))
        raise typer.Exit(0 if found.complete else 1)
    else:
        _check_images(name, as_json)


def _check_images(name: str, as_json: bool) -> None:
    """Read every image, and count those of each class."""
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
            echo(f"{split}: {describe_balance(found)}")
        for item in bad:
            echo(f"unreadable: {item}")
    raise typer.Exit(1 if bad else 0)


def _check_labels(
    name: str, root: str | None, backbone: str, out: Path | None, device: str, as_json: bool
) -> None:
    """Look for labels that seem wrong."""
    from dataclasses import asdict

    from dear.clip.factory import load
    from dear.data.images import FileImages
    from dear.tasks.labels.task import find_suspects, open_all, write_label_page, write_suspects

    images, splits = open_all(name, root)
    page = out is not None and out.suffix.lower() == ".html"
    if page and not isinstance(images, FileImages):
        raise UsageError(f"--out {out}: {name} has no image files to correct; name a .csv list")
    clip = load(backbone, device=device)
    with stages() as progress:
        found = find_suspects(images, clip, progress=progress)
    if as_json:
        suspects = [{**asdict(each), "factor": each.factor} for each in found]
        print_json({"data": name, "images": len(images), "suspects": suspects})
    else:
        echo(f"{len(found)} of {len(images)} labels look wrong")
        for each in found[:20]:
            other = f"looks like {each.suggestion} ({each.confidence:.1%})"
            echo(f"  {each.key}: {each.label} ({each.own:.1%}), {other}")
        if len(found) > 20:
            echo(f"  and {len(found) - 20} more; see them all with --out labels.html")
    if out is None:
        return
    if isinstance(images, FileImages) and page:
        write_label_page(images, splits, found, clip, out)
    else:
        write_suspects(found, out)
    say(f"{out}: written")
