"""How well a run detects images of unknown classes: `dear evaluate --unknown`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dear._io.files import PathLike
from dear._io.progress import Progress
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.methods.calibration import Threshold
from dear.runs.evaluate import Evaluation, share_interval
from dear.runs.model import Model, Run
from dear.train.confidence import auroc
from dear.workflows.retrieve import gallery_of


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
    backbone: PathLike | Clip | None = None,
    root: PathLike | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> Rejection:
    """Compare the scores of images of no class with those of an evaluation of the same run.

    Args:
        run: run folder, method or model, with a calibration.
        known: its evaluation on images of its classes, with `scores=True`.
        unknown: a folder of images (labels do not matter), a table, a benchmark, `world:NAME` or a set.
        share: of images of known classes that may be refused.
        mode: how to predict; None: the method's usual mode.
        backbone: for a run folder whose backbone moved.
        root: folder of the benchmarks, for the name of a benchmark.
        device: "auto", "cpu", "cuda", ...
        progress: called with ("images", images done, images in all).

    Raises:
        UsageError: the run has no calibration.
        DearError: anything else a user can correct, in one sentence.
    """
    model = Model.of(run, backbone, device)
    mode = model.pick_mode(mode)
    limit = check_known(model, known.classes, share, mode)
    images = gallery_of(unknown, root)
    outside = (model.scores(images, mode, progress=progress)).float()
    if known.scores is None:
        raise UsageError("the evaluation of known images has no scores; make it with scores=True")
    inside = known.scores[mode].float()
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
