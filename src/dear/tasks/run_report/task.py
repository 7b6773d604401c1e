"""The page about one adapted model: `dear report`, `dear.report_run`."""

from __future__ import annotations

from pathlib import Path

from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.data.open import open_data
from dear.runs.folder import read_config
from dear.runs.images import run_images
from dear.tasks.load import load_model
from dear.tasks.run_report.examine import examine
from dear.tasks.run_report.several_labels import examine_sets
from dear.tasks.share.task import local_run
from dear.train.label_check import label_sentence
from dear.utils.files import PathLike, check_output
from dear.utils.progress import Progress, silent


def report_run(
    run: PathLike,
    out: PathLike = "report.html",
    *,
    data: PathLike | ImageSet | None = None,
    data_root: PathLike | None = None,
    other: PathLike | ImageSet | None = None,
    mode: str | None = None,
    backbone: PathLike | Clip | None = None,
    device: str = "auto",
    progress: Progress = silent,
) -> Path:
    """Write one page about an adapted model.

    It shows accuracy per class, confusions, the worst errors, fusion weights, the change from zero-shot,
    and the accuracy on classes that were not trained; for several labels per image average precision with
    intervals, F1, and labels that are missed or wrong.

    Args:
        run: run folder, archive, or `hf://owner/name`.
        out: the page to write.
        data: labeled images to test on; None: the test images of the run's dataset.
        data_root: folder of the benchmarks, for the name of a benchmark.
        other: labeled images of classes that were not trained.
        mode: the mode to report on; None: the method's usual one.
        backbone: for a run whose backbone moved.
        device: "auto", "cpu", "cuda", …
        progress: called with (stage, done, total).

    Returns:
        The page.

    Raises:
        DearError: anything a user can correct.

    Example:
        >>> report_run("run", "page.html", data="photos/")    # doctest: +SKIP
    """
    check_output(out)
    folder = local_run(run)
    config = read_config(folder)
    images = run_images(folder) if data is None else _open(data, data_root)
    model = load_model(folder, backbone, device)
    others = None if other is None else _open(other, data_root)
    facts = (examine_sets if model.method.several else examine)(model, images, others, mode, progress)
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
    return Path(out)


def _open(data: PathLike | ImageSet, root: PathLike | None) -> ImageSet:
    return data if isinstance(data, ImageSet) else open_data(data, "test", root=root)
