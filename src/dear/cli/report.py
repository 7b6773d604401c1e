"""`dear report`: the page about one adapted model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from dear.cli.options import DataRoot, Device, OwnBackbone, PageOut, Run, Threads, device_named
from dear.cli.printing import say, stages


def report(
    run: Run,
    out: PageOut = Path("report.html"),
    data: Annotated[
        str | None, Option("--data", "-d", help="Images to test on; else the run's own test images.")
    ] = None,
    data_root: DataRoot = None,
    other: Annotated[str | None, Option(help="Images of classes it was not trained on.")] = None,
    mode: Annotated[str | None, Option(help="The mode to report on, such as fused.")] = None,
    backbone: OwnBackbone = None,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Write one page about an adapted model.

    It shows accuracy per class, confusions, the most wrong images, fusion weights, what changed against
    zero-shot, and what happens to classes that were not trained.

    Example: `dear report run --data photos --out page.html`
    """
    from dear.data import open_data
    from dear.runs.folder import read_config
    from dear.runs.images import run_images
    from dear.runs.model import Model
    from dear.tasks.run_report.examine import examine
    from dear.train.label_check import label_sentence

    config = read_config(run)
    images = run_images(run) if data is None else open_data(data, "test", root=data_root)
    model = Model.load(run, backbone, device_named(device))
    unseen = None if other is None else open_data(other, "test", root=data_root)
    with stages() as progress:
        facts = examine(model, images, unseen, mode, progress)
    epochs, batch, seed = (config.recipe.get(name) for name in ("epochs", "batch", "seed"))
    notes = {
        "trained on": f"{config.images} images of {config.dataset}",
        "recipe": f"{epochs} epochs, batches of {batch}, seed {seed}",
        "made with": f"dear {config.dear}",
    }
    labels = label_sentence(model.metrics.get("labels"))
    if labels:
        notes["labels"] = labels
    facts.write_page(out, model.lines, notes)
    say(f"{out}: written")
