"""`dear report`: the page about one adapted model."""

from __future__ import annotations

from typing import Annotated

import typer

from dear.cli.common import DataRoot, Device, OwnBackbone, Run, device_named, say, stages


def report(
    run: Run,
    out: Annotated[str, typer.Option("--out", "-o", help="The page to write.")] = "report.html",
    data: Annotated[
        str | None,
        typer.Option("--data", "-d", help="Images to test on; else the run's own test images."),
    ] = None,
    data_root: DataRoot = None,
    other: Annotated[
        str | None, typer.Option("--other", help="Images of classes it was not trained on.")
    ] = None,
    mode: Annotated[str | None, typer.Option("--mode", help="The mode to report on, such as fused.")] = None,
    backbone: OwnBackbone = None,
    device: Device = "auto",
) -> None:
    """Write one page about an adapted model.

    It shows accuracy per class, confusions, the most wrong images, fusion weights, what changed against
    zero-shot, and what happens to classes that were not trained.

    Example: `dear report run --data photos --out page.html`
    """
    from pathlib import Path

    from dear.data import open_data
    from dear.report.run_page import write_run_page
    from dear.runs.folder import read_config, read_log
    from dear.runs.model import Model
    from dear.train.labels import label_sentence
    from dear.workflows.evaluate import run_images
    from dear.workflows.examine import examine

    config = read_config(run)
    images = run_images(run) if data is None else open_data(data, "test", root=data_root)
    model = Model.load(run, backbone, device_named(device))
    unseen = None if other is None else open_data(other, "test", root=data_root)
    with stages() as progress:
        facts = examine(model, images, unseen, mode, progress)
    recipe = config.recipe
    notes = {
        "trained on": f"{config.images} images of {config.dataset}",
        "recipe": f"{recipe.get('epochs')} epochs, batches of {recipe.get('batch')}, "
        f"seed {recipe.get('seed')}",
        "made with": f"dear {config.dear}",
    }
    labels = label_sentence(model.metrics.get("labels"))
    if labels:
        notes["labels"] = labels
    write_run_page(facts, out, read_log(Path(run)), notes)
    say(f"{out}: written")
