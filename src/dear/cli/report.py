"""`dear report`: the page about one adapted model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from dear.cli import options as opt
from dear.cli.printing import say, stages


def report(
    run: opt.Run,
    out: opt.PageOut = Path("report.html"),
    data: Annotated[
        str | None,
        Option(
            "--data", "-d", help="Labeled images to test on (default: the test images of the run's dataset)."
        ),
    ] = None,
    data_root: opt.DataRoot = None,
    other: Annotated[str | None, Option(help="Labeled images of classes that were not trained.")] = None,
    mode: Annotated[str | None, Option(help="The mode to report on, such as fused.")] = None,
    backbone: opt.RunBackbone = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Write one page about an adapted model.

    It shows accuracy per class, confusions, the worst errors, fusion weights, the change from zero-shot,
    and the accuracy on classes that were not trained.

    Example: `dear report run --data photos --out page.html`
    """
    from dear.tasks.run_report.task import report_run

    with stages() as progress:
        page = report_run(
            run,
            out,
            data=data,
            data_root=data_root,
            other=other,
            mode=mode,
            backbone=backbone,
            device=device,
            progress=progress,
        )
    say(f"{page}: written")
