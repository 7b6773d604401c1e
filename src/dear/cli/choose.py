"""`dear choose`: which method suits one's own images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dear.cli.common import (
    Backbone,
    Data,
    DataRoot,
    Device,
    Json,
    Template,
    Unreadable,
    device_named,
    print_json,
    say,
    stages,
)

if TYPE_CHECKING:
    from dear.workflows.choose import Recommendation


def choose(
    data: Data,
    backbone: Backbone = "mini",
    methods: Annotated[
        str | None, typer.Option("--methods", help="Methods to compare, with commas between.")
    ] = None,
    shots: Annotated[int, typer.Option("--shots", help="Images per class to use; 0 takes all.")] = 16,
    seed: Annotated[int, typer.Option("--seed", help="Of the draw of images, folds and training.")] = 1,
    folds: Annotated[int, typer.Option("--folds", help="Parts of the images held out in turn.")] = 3,
    minutes: Annotated[
        float, typer.Option("--minutes", help="Time for everything; methods that take longer are not tried.")
    ] = 2.0,
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Then train the recommended method on all images, into --out.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run folder for --adapt.", show_default=False)
    ] = None,
    unreadable: Unreadable = "stop",
    data_root: DataRoot = None,
    template: Template = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Compare methods on your own images by cross-validation, and recommend one.

    Each method answers for images it was not trained on, and for classes it was not trained on. The table
    shows 90% confidence intervals; the recommendation names methods that chance does not tell from the best.

    Examples:

    `dear choose --data photos/ --backbone openai/clip-vit-base-patch16`

    `dear choose --data world:textures --methods linear-probe,prolip,dear --minutes 5`

    `dear choose --data photos/ --adapt --out run`
    """
    from dear.errors import UsageError
    from dear.runs.spec import Spec
    from dear.workflows.choose import METHODS, ChooseOptions
    from dear.workflows.choose import choose as compare

    if adapt and out is None:
        raise UsageError("--adapt needs --out, the run folder to write")
    if out is not None and not adapt:
        raise UsageError("--out is for --adapt; leave it out, or add --adapt")
    names = METHODS if methods is None else tuple(n.strip() for n in methods.split(",") if n.strip())
    spec = Spec().changed(
        backbone=backbone,
        shots=shots,
        seed=seed,
        template=template,
        root=data_root,
        unreadable=unreadable,
    )
    with stages() as progress:
        found = compare(
            data, ChooseOptions(names, folds, minutes), spec, device=device_named(device), progress=progress
        )
    if as_json:
        print_json({"data": data, **found.report(), "run": None if out is None else str(out)})
    else:
        _print(found)
    if adapt and out is not None:
        from dear.workflows.adapt import adapt as train

        with stages() as progress:
            train(data, out, spec, method=found.pick.method, device=device_named(device), progress=progress)
        say(f"{out}: {found.pick.title} trained on all images; next: dear predict {out} IMAGE")


def _print(found: Recommendation) -> None:
    """The table, the notes and the recommendation."""
    from rich.console import Console
    from rich.table import Table

    table = Table(header_style="bold")
    table.add_column("method")
    for heading in ("trained classes", "new classes", "time"):
        table.add_column(heading, justify="right")
    for one in found.candidates:
        row = one.row()
        name = one.title if one.preset is None else f"{one.title} ({one.preset})"
        if one.skipped is not None:
            table.add_row(name, one.skipped, "", "")
            continue
        cells = []
        for column in ("trained", "new"):
            figures = row[column]
            if figures is None:
                cells.append("–")
            else:
                low, high = (f"{100 * figures[end]:.1f}" for end in ("low", "high"))
                cells.append(f"{100 * figures['accuracy']:.1f}% ({low}% to {high}%)")
        table.add_row(name, *cells, f"{one.seconds:.1f} s")
    Console().print(table)
    for note in found.notes:
        typer.echo(f"- {note}")
    typer.echo(f"- everything took {found.seconds:.0f} s")
    typer.echo(found.sentence)
