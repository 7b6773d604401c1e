"""`dear choose`: which method suits one's own images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from dear.cli import options as opt
from dear.cli.printing import echo, print_json, print_table, say, stages
from dear.errors import UsageError

if TYPE_CHECKING:
    from dear.tasks.choose import Recommendation


def choose(
    data: opt.Data,
    backbone: opt.Backbone = "mini",
    methods: Annotated[str | None, Option(help="Methods to compare, with commas between.")] = None,
    shots: Annotated[int, Option(help="Images per class to use; 0 takes all.")] = 16,
    seed: Annotated[int, Option(help="Of the draw of images, folds and training.")] = 1,
    folds: Annotated[int, Option(help="Parts of the images held out in turn.")] = 3,
    minutes: Annotated[
        float, Option(help="Time for everything; methods that take longer are not tried.")
    ] = 2.0,
    adapt: Annotated[
        bool, Option("--adapt", help="Then train the recommended method on all images, into --out.")
    ] = False,
    out: Annotated[
        Path | None, Option("--out", "-o", help="The run folder for --adapt.", show_default=False)
    ] = None,
    unreadable: opt.Unreadable = "stop",
    data_root: opt.DataRoot = None,
    template: opt.Template = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.Json = False,
) -> None:
    """Compare methods on your own images by cross-validation, and recommend one.

    Each method answers for images it was not trained on, and for classes it was not trained on. The table
    shows 90% confidence intervals; the recommendation names methods that are not significantly worse than
    the best.

    Examples:

    `dear choose --data photos/ --backbone openai/clip-vit-base-patch16`

    `dear choose --data world:textures --methods linear-probe,prolip,dear --minutes 5`

    `dear choose --data photos/ --adapt --out run`
    """
    from dear.runs.spec import Spec
    from dear.tasks.choose import METHODS
    from dear.tasks.choose import choose as compare

    if adapt and out is None:
        raise UsageError("--adapt needs --out, the run folder to write")
    if out is not None and not adapt:
        raise UsageError("--out is for --adapt; leave it out, or add --adapt")
    spec = Spec().changed(
        backbone=backbone, shots=shots, seed=seed, template=template, root=data_root, unreadable=unreadable
    )
    with stages() as progress:
        found = compare(
            data,
            METHODS if methods is None else opt.split_names(methods),
            spec,
            folds=folds,
            minutes=minutes,
            device=opt.device_named(device),
            progress=progress,
        )
    if as_json:
        print_json({"data": data, **found.report(), "run": None if out is None else str(out)})
    else:
        _print(found)
    if out is not None:
        from dear.tasks.adapt import adapt as train

        with stages() as progress:
            train(
                data, out, spec, method=found.pick.method, device=opt.device_named(device), progress=progress
            )
        say(f"{out}: {found.pick.title} trained on all images; next: dear predict {out} IMAGE")


def _print(found: Recommendation) -> None:
    """The table, the notes and the recommendation."""
    rows = []
    for one in found.candidates:
        row = one.row()
        name = one.title if one.preset is None else f"{one.title} ({one.preset})"
        cells = (_figure(row["trained"]), _figure(row["new"]), f"{one.seconds:.1f} s")
        rows.append((name, *cells) if one.skipped is None else (name, one.skipped, "", ""))
    print_table(("method", "trained classes", "new classes", "time"), rows)
    for note in found.notes:
        echo(f"- {note}")
    echo(f"- everything took {found.seconds:.0f} s")
    echo(found.sentence)


def _figure(figures: dict[str, Any] | None) -> str:
    """An accuracy with its confidence interval."""
    if figures is None:
        return "–"
    return f"{figures['accuracy']:.1%} ({figures['low']:.1%} to {figures['high']:.1%})"
