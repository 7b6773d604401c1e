"""Writes the generated pages: docs/reference/cli.md (the command line) and docs/papers.md (the methods).

python scripts/reference.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pandas as pd
import typer.main

from dear.bench.published import PublishedRow, PublishedTable, tables
from dear.cli import build_app
from dear.methods import list_methods
from dear.methods.papers import Paper, paper

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "research" / "results"
_TABLES = {
    "main-2": "DeAR, Table 2",
    "supplement-3": "DeAR, supplement, three seeds",
    "purification": "purification, mean over held-out domains",
}
_SETS = {"mini": "the attribute world on `mini`", "small": "photos on a small CLIP"}


def command_page() -> str:
    """Every command with its help, arguments, and options."""
    root: Any = typer.main.get_command(build_app())
    parts = ["# Command line", "", "Generated from the code by `python scripts/reference.py`.", ""]
    with click.Context(root, info_name="dear") as context:
        for path, command, inner in _commands(root, context, ("dear",)):
            parts += [f"## {' '.join(path)}", "", *_help(command), ""]
            rows = [row for row in (_row(param, inner) for param in command.params) if row]
            parts += ["| option | meaning | default |", "|---|---|---|", *rows, ""]
    return "\n".join(parts)


def _help(command: Any) -> list[str]:
    """The paragraphs of a command's help; examples are indented there and become code."""
    lines = [line.replace("\b", "") for line in (command.help or "").splitlines()]
    return [
        f"    {line.strip()}" if line.startswith(("    dear", "  dear", "dear ")) else line.strip()
        for line in lines
    ]


def _row(param: Any, context: click.Context) -> str:
    name = (
        ", ".join(f"`{opt}`" for opt in (*param.opts, *param.secondary_opts))
        if param.opts[0].startswith("-")
        else f"`{param.human_readable_name}`"
    )
    if name == "`--help`":
        return ""
    default = param.get_default(context, call=False)
    shown = (
        "" if default is None or default is False or default == () or callable(default) else f"`{default}`"
    )
    text = " ".join((getattr(param, "help", None) or "").split()).replace("|", "\\|")
    return f"| {name} | {text} | {shown} |"


def _commands(command: Any, context: click.Context, path: tuple[str, ...]) -> Any:
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        if child is None or child.hidden:
            continue
        with click.Context(child, info_name=name, parent=context) as inner:
            if hasattr(child, "list_commands"):
                yield from _commands(child, inner, (*path, name))
            else:
                yield (*path, name), child, inner


def papers_page() -> str:
    """Every method: paper, settings, departures, figures of the authors, of others, and ours."""
    published = pd.read_csv(RESULTS / "published_figures.csv", dtype=str, keep_default_na=False)
    ours = pd.read_csv(RESULTS / "fair_table.csv")
    parts = [
        "# Papers",
        "",
        "Generated from the method files by `python scripts/reference.py`. Published figures are means over eleven "
        "datasets with ViT-B/16 and 16 images per class: accuracy on base classes, on novel classes, and their "
        "harmonic mean (HM). *Reported by* names another paper whose table has the row; it may repeat the authors' "
        "figures. *Rerun* is a public rerun of the authors' code, with its address. "
        f"Ours ({ours.date.min()} to {ours.date.max()}) are means over three seeds, on "
        + " and ".join(_SETS.values())
        + " ([all rows](results/accuracy.md)): they do not reproduce the published ones, which need ViT-B/16 "
        "([how](reproducing.md)). Those of DeAR's default, `strong`, are in [recipes](recipes.md#base-to-novel). `dear methods NAME` prints an "
        "entry with its equations.",
        "",
    ]
    for name in list_methods():
        parts += _entry(paper(name), published[published.method == name], ours)
    return "\n".join(parts)


def _entry(entry: Paper, published: pd.DataFrame, ours: pd.DataFrame) -> list[str]:
    settings = {**entry.options, **{f"{key} (recipe)": value for key, value in entry.recipe.items()}}
    parts = [f"## {entry.title} (`{entry.method}`)", ""]
    parts += [f"{_plain(entry.summary)}. {entry.citation + '.' if entry.citation else ''}".strip(), ""]
    if settings:
        parts += ["Settings: " + ", ".join(f"{key} `{value}`" for key, value in settings.items()) + ".", ""]
    if entry.presets:
        parts += [
            "Presets: " + "; ".join(f"`{key}`: {_plain(text)}" for key, text in entry.presets.items()) + ".",
            "",
        ]
    parts += [f"Departures: {_plain(entry.departures) or 'none'}.", ""]
    rows = _figures(entry.method, published, ours)
    if rows:
        parts += ["| figures | base | novel | HM | accuracy |", "|---|---|---|---|---|", *rows, ""]
    return parts


def _figures(name: str, published: pd.DataFrame, ours: pd.DataFrame) -> list[str]:
    rows = []
    for row in published.itertuples():
        kind = "published" if row.kind == "authors" else "reported by"
        few = ", 16 images per class" if row.few_shot_16 else ""
        if row.hm:
            rows.append(f"| {kind}: {row.source} | {row.base} | {row.novel} | {row.hm} | |")
        if few:
            rows.append(f"| {kind}: {row.source}{few} | | | | {row.few_shot_16} |")
    for entry in tables():
        for row in (row for row in entry.rows if row.method == name and entry.name in _TABLES):
            kind = "published" if name in ("dear", "purify") else "reported by"
            rows += _rows_of(f"{kind}: {_TABLES[entry.name]}", entry, row)
            for again in entry.reruns_of(row.label):
                rows += _rows_of(f"rerun: {again.source}", entry, again)
    named = ours[ours.method.str.partition("@")[0] == name]
    for (backbone, method, mode), group in named.groupby(["backbone", "method", "mode"]):
        _, _, preset = method.partition("@")
        notes = [
            _SETS[backbone],
            *([f"preset {preset}"] if preset else []),
            *([mode] if mode != "default" else []),
        ]
        means = [100 * group[column].mean() for column in ("base", "novel", "hm")]
        figures = " | ".join("" if pd.isna(mean) else f"{mean:.2f}" for mean in means)
        rows.append(f"| ours: {', '.join(notes)} | {figures} | |")
    return rows


def _rows_of(label: str, table: PublishedTable, row: PublishedRow) -> list[str]:
    """The mean over datasets, or a row per dataset where no mean is printed."""
    lines = []
    datasets = dict.fromkeys(dataset for dataset, _ in row.cells)
    for dataset in ["Average"] if "Average" in datasets else datasets:
        numbers = [row.number(dataset, column) for column in table.columns]
        texts = ["" if number is None else f"{number.value:.2f}" for number in numbers]
        cells = [*texts, ""] if len(texts) == 3 else ["", "", "", *texts]
        where = "" if dataset == "Average" else f", {dataset}"
        lines.append(f"| {label}{where} | {' | '.join(cells)} |")
    return lines


def _plain(text: str) -> str:
    """Text in one line, as Markdown shows it."""
    flat = re.sub(r"\s+", " ", re.sub(r"^\s*- ", "", text, flags=re.MULTILINE))
    return flat.strip().replace("|", "\\|").replace("<", "&lt;").rstrip(".")


PAGES = {"docs/reference/cli.md": command_page, "docs/papers.md": papers_page}


def main() -> None:
    """Write all pages."""
    for name, page in PAGES.items():
        (ROOT / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
