"""Accuracy of a run on labeled images: `dear evaluate`, `dear zeroshot`, and the summary of `dear adapt`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dear._io.files import PathLike
from dear._io.progress import Progress
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.data.open import open_data
from dear.errors import DataError, UsageError
from dear.runs.evaluate import Evaluation
from dear.runs.folder import read_config
from dear.runs.model import Model, Run

MOST_IMAGES = 1000  #: held-out images that are looked at after training


def evaluate_run(
    run: Run,
    data: PathLike | ImageSet,
    *,
    split: str = "test",
    template: str | None = None,
    mode: str | None = None,
    scores: bool = False,
    unreadable: str = "stop",
    backbone: PathLike | Clip | None = None,
    root: PathLike | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> Evaluation:
    """Accuracy of a run on a labeled set, in every mode.

    Classes that the run does not know are named with the template it was trained with, unless `template`
    says otherwise. Answers for image files that were given before, by the same weights and learned tensors,
    come from the user's cache.

    Args:
        run: run folder, method or model.
        data: what `open_data` takes, or an image set.
        split: which images of `data`.
        template: prompt with `{}` for every class; None: the one the run was trained with.
        mode: a mode that the caller will ask for; refused before any work if the method has none such.
        scores: also those that thresholds for "none of these" are compared with.
        unreadable: "stop" refuses a set with images that cannot be read, "skip" leaves those out.
        backbone: for a run folder whose backbone moved.
        root: folder of the benchmarks, for the name of a benchmark.
        device: "auto", "cpu", "cuda", ...
        progress: called with ("images", images done, images in all).

    Raises:
        DearError: anything a user can correct, in one sentence.
    """
    model = Model.of(run, backbone, device).with_classes(template=template)
    model.pick_mode(mode)
    images = data if isinstance(data, ImageSet) else open_data(data, split, root=root)
    return model.evaluate(images, scores=scores, unreadable=unreadable, cached=True, progress=progress)


@dataclass(frozen=True)
class HeldOutAccuracy:
    """Accuracy on images that were not trained on, as fractions of 1."""

    images: int  #: how many images were answered
    available: int  #: how many held-out images there are
    before: float  #: accuracy of the frozen backbone (zero-shot)
    after: dict[str, float]  #: accuracy of the adapted model, by mode


def open_held_out(data: PathLike | ImageSet, root: PathLike | None = None) -> ImageSet | None:
    """The test split of a dataset, or None where it has none."""
    if isinstance(data, ImageSet):
        return None
    try:
        found = open_data(data, "test", root=root)
    except DataError:
        return None
    return found if len(found) else None


def held_out_accuracy(run: Run, images: ImageSet, progress: Progress | None = None) -> HeldOutAccuracy:
    """Accuracy before and after, on at most `MOST_IMAGES` images spread evenly over the set.

    Images that cannot be read are left out.
    """
    step = -(-len(images) // MOST_IMAGES)
    some = images if step == 1 else images.subset(range(0, len(images), step))
    model = Model.of(run)
    before, after = (
        one.evaluate(some, unreadable="skip", cached=True, progress=progress)
        for one in (model.frozen(), model)
    )
    return HeldOutAccuracy(len(before.labels), len(images), before.accuracy["default"], after.accuracy)


def run_images(run: str | os.PathLike[str], split: str = "test") -> ImageSet:
    """A split of the dataset a run was trained on.

    Raises:
        UsageError: the run does not say where its images are.
        DataError: they are no longer there.
    """
    spec = read_config(run)
    if spec.data is None:
        raise UsageError(f"{run}: does not say where its images are; name them", hint="report-data")
    try:
        return open_data(spec.data, split, root=spec.root)
    except DataError as error:
        raise DataError(f"{run}: its images cannot be opened again ({error})", hint="report-data") from None
