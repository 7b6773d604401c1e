"""What all scripts share: options from their defaults, and rows written with machine, versions and date."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dear.tasks.speed import add_rows, machine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the script's own text."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_options(parser: argparse.ArgumentParser, **options: Any) -> None:
    """Add an option per keyword: its default, or (default, help).

    A list takes several values, False is a switch, and a type alone means that there is no default.

    >>> parser = parser_of("")
    >>> add_options(parser, batch=[4, 16], csv=Path, quick=False, warm_up=(3, "runs that are not counted"))
    >>> vars(parser.parse_args(["--batch", "8", "--quick"]))
    {'batch': [8], 'csv': None, 'quick': True, 'warm_up': 3}
    """
    for name, given in options.items():
        default, about = given if isinstance(given, tuple) else (given, None)
        flag, kind = f"--{name.replace('_', '-')}", default if isinstance(default, type) else type(default)
        if default is False:
            parser.add_argument(flag, action="store_true", help=about)
        elif kind is list:
            parser.add_argument(flag, type=type(default[0]), nargs="*", default=default, help=about)
        else:
            parser.add_argument(flag, type=kind, default=None if kind is default else default, help=about)


def arguments(doc: str | None, **options: Any) -> argparse.Namespace:
    """The command line of a script that has options alone; see `add_options`."""
    parser = parser_of(doc)
    add_options(parser, **options)
    return parser.parse_args()


def names(text: str) -> list[str]:
    """The type of an option that takes words with commas between them."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    """The type of an option that takes whole numbers with commas between them."""
    return [int(part) for part in text.split(",")]


def record(
    path: Path | None,
    rows: Sequence[Mapping[str, Any]],
    device: torch.device | str = "cpu",
    machine_last: bool = False,
) -> None:
    """Print rows, and add them to a CSV file, if one is named, with machine, versions and date."""
    for row in rows:
        print(", ".join(f"{key}: {value}" for key, value in row.items()), flush=True)
    if path is not None:
        here = machine(torch.device(device))
        add_rows(path, [{**row, **here} if machine_last else {**here, **row} for row in rows])


def markdown(head: Sequence[object], rows: Iterable[Sequence[object]], words: int = 1) -> str:
    """A Markdown table whose first columns are words and the others numbers; floats get one digit.

    >>> print(markdown(("method", "accuracy"), [("dear", 71.23)]))
    | method | accuracy |
    |---|---:|
    | dear | 71.2 |
    """
    under = "|".join(["---"] * words + ["---:"] * (len(head) - words))
    first, *rest = (
        "| " + " | ".join(f"{v:.1f}" if isinstance(v, float) else str(v) for v in row) + " |"
        for row in (head, *rows)
    )
    return "\n".join([first, f"|{under}|", *rest])


def where() -> dict[str, Any]:
    """Date, machine and versions, for figures that do not depend on the number of threads."""
    known = machine(torch.device("cpu"))
    return {name: known[name] for name in ("date", "machine", "torch", "dear")}


def read(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV file; none where there is no file."""
    if not Path(path).exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
