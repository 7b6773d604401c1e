"""Accuracy of a run on labeled images, and how well it detects images of unknown classes: `dear evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dear.calibration.scales import Threshold
from dear.calibration.temperature import auroc
from dear.clip.model import Clip
from dear.data.images import ImageSet, even_subset
from dear.data.open import open_data
from dear.errors import DataError, UsageError
from dear.runs.evaluate import Evaluation, share_interval
from dear.runs.model import Model, Run
from dear.tasks.retrieve import gallery_of
from dear.utils.files import PathLike
from dear.utils.progress import Progress

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


def open_held_out(data: PathLike, root: PathLike | None = None) -> ImageSet | None:
    """The test split of a dataset, or None where it has none."""
    try:
        found = open_data(data, "test", root=root)
    except DataError:
        return None
    return found if len(found) else None


def held_out_accuracy(run: Run, images: ImageSet, progress: Progress | None = None) -> HeldOutAccuracy:
    """Accuracy before and after, on at most `MOST_IMAGES` images spread evenly over the set.

    Images that cannot be read are left out.
    """
    some = even_subset(images, MOST_IMAGES)
    model = Model.of(run)
    before, after = (
        one.evaluate(some, unreadable="skip", cached=True, progress=progress)
        for one in (model.frozen(), model)
    )
    return HeldOutAccuracy(len(before.labels), len(images), before.accuracy["default"], after.accuracy)


@dataclass(frozen=True)
class Rejection:
    """Images of known classes against images of no class."""

    auroc: float  #: how often an image of a known class scores above one of no class
    refused: float  #: share of images of known classes that are answered with "none of these"
    refused_low: float  #: 95% confidence interval of the share that the run promised for as many images
    refused_high: float
    false_acceptance: float  #: share of images of no class that are answered with a class
    false_low: float  #: its 90% confidence interval
    false_high: float
    known: int  #: images of known classes
    unknown: int  #: images of no class
    share: float  #: of images of known classes that was to be refused at most

    def report(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def sentence(self) -> str:
        """The figures in words."""
        return (
            f"none of these: AUROC {self.auroc:.3f}; {self.refused:.1%} of {self.known} known images refused "
            f"(promised {self.refused_low:.1%} to {self.refused_high:.1%}); {self.false_acceptance:.1%} of "
            f"{self.unknown} unknown images accepted ({self.false_low:.1%} to {self.false_high:.1%})"
        )


def check_known(model: Model, classes: Sequence[str], share: float, mode: str | None = None) -> Threshold:
    """The threshold for "none of these", where it says something of images of these classes.

    Raises:
        UsageError: the run has no calibration, or was not trained on one of the classes.
    """
    other = next((name for name in classes if name not in model.classes), None)
    if other is not None:
        raise UsageError(
            f"the class {other!r} was not trained, so the run's threshold says nothing of its images; give "
            "images of the trained classes"
        )
    return model.threshold(share, mode)


def evaluate_unknown(
    run: Run,
    known: Evaluation,
    unknown: PathLike | ImageSet,
    *,
    share: float = 0.05,
    mode: str | None = None,
    root: PathLike | None = None,
    progress: Progress | None = None,
) -> Rejection:
    """Compare the scores of images of no class with those of an evaluation of the same run.

    Args:
        run: run folder, method or model, with a calibration.
        known: its evaluation on images of its classes, with `scores=True`.
        unknown: a folder of images (labels do not matter), a table, a benchmark, `world:NAME` or a set.
        share: of images of known classes that may be refused.
        mode: how to predict; None: the method's usual mode.
        root: folder of the benchmarks, for the name of a benchmark.
        progress: called with ("images", images done, images in all).
    """
    model = Model.of(run)
    mode = model.pick_mode(mode)
    limit = check_known(model, known.classes, share, mode)
    if known.scores is None:
        raise UsageError("the evaluation of known images has no scores; make it with scores=True")
    inside = known.scores[mode].float()
    outside = model.scores(gallery_of(unknown, root), mode, progress=progress).float()
    accepted = int((outside >= limit.value).sum())
    low, high = share_interval(accepted, len(outside))
    promised = limit.among(len(inside))
    return Rejection(
        auroc=auroc(inside, outside),
        refused=float((inside < limit.value).double().mean()),
        refused_low=promised[0],
        refused_high=promised[1],
        false_acceptance=accepted / len(outside),
        false_low=low,
        false_high=high,
        known=len(inside),
        unknown=len(outside),
        share=share,
    )
