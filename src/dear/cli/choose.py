"""`dear choose`: which method suits your images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from dear.cli import options as opt
from dear.cli.printing import echo, print_json, print_table, say, stages
from dear.errors import UsageError

if TYPE_CHECKING:
    from dear.tasks.choose.result import Choice


def choose(
    data: opt.Data,
    backbone: opt.Backbone = "mini",
    methods: Annotated[
        str | None, Option(help="Comma-separated methods to compare (default: seven common ones).")
    ] = None,
    shots: Annotated[int, Option(help="Images per class to compare on; 0 uses all.")] = 16,
    seed: Annotated[int, Option(help="Seed of the draw of images, of folds and of training.")] = 1,
    folds: Annotated[int, Option(help="Parts of the images held out in turn.")] = 3,
    minutes: Annotated[
        float, Option(help="Time for everything; methods that need longer are skipped.")
    ] = 2.0,
    adapt: Annotated[
        bool,
        Option("--adapt", help="Then train the recommended method on all training images, into --out."),
    ] = False,
    out: Annotated[
        Path | None, Option("--out", "-o", help="Run folder for --adapt.", show_default=False)
    ] = None,
    unreadable: opt.Unreadable = "stop",
    data_root: opt.DataRoot = None,
    template: opt.Template = None,
    texts: opt.Texts = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.Json = False,
) -> None:
    """Compare methods on your images by cross-validation, and recommend one.

    Each method answers for images and for classes that it was not trained on. The table shows 90% confidence
    intervals; the recommendation names methods that are not significantly worse than the best.

    Examples:

    `dear choose --data photos/ --backbone openai/clip-vit-base-patch16`

    `dear choose --data world:textures --methods linear-probe,prolip,dear --minutes 5`

    `dear choose --data photos/ --adapt --out run`
    """
    from dear.tasks.choose.task import choose as compare

    if adapt and out is None:
        raise UsageError("--adapt needs --out, the run folder to write")
    with stages() as progress:
        choice = compare(
            data,
            backbone=backbone,
            methods=methods,
            shots=shots,
            seed=seed,
            folds=folds,
            minutes=minutes,
            adapt=adapt,
            out=out,
            unreadable=unreadable,
            data_root=data_root,
            template=template,
            texts=texts,
            device=device,
            progress=progress,
        )
    if as_json:
        print_json({"data": data, **choice.to_dict(), "run": None if out is None else str(out)})
    else:
        _print(choice)
    if choice.run is not None and choice.run.spec is not None:
        images = choice.run.spec.images
        say(f"{out}: {choice.pick.title} trained on {images} images; next: dear predict {out} IMAGE")


def _print(choice: Choice) -> None:
    """The table, the notes and the recommendation."""
    rows = []
    for one in choice.candidates:
        row = one.row()
        name = one.title if one.preset is None else f"{one.title} ({one.preset})"
        cells = (_figure(row["trained"]), _figure(row["new"]), f"{one.seconds:.1f} s")
        rows.append((name, *cells) if one.skipped is None else (name, one.skipped, "", ""))
    print_table(("method", "trained classes", "new classes", "time"), rows)
    for note in choice.notes:
        echo(f"- {note}")
    echo(f"- total time: {choice.seconds:.0f} s")
    if choice.minutes_needed is not None:
        echo(f"- to compare all methods: --minutes {choice.minutes_needed}")
    echo(choice.sentence)


def _figure(figures: dict[str, Any] | None) -> str:
    """An accuracy with its confidence interval."""
    if figures is None:
        return "–"
    return f"{figures['accuracy']:.1%} ({figures['low']:.1%} to {figures['high']:.1%})"
