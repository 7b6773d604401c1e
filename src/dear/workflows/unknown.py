"""How well a run detects images of unknown classes: `dear evaluate --unknown`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dear._io.files import PathLike
from dear._io.progress import Progress
from dear.clip.factory import pick_device
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.methods.base import Method
from dear.methods.calibration import rejection_score, run_threshold
from dear.runs.evaluate import Evaluation
from dear.runs.folder import load_run
from dear.train.confidence import auroc, share_interval
from dear.train.crossval import answers_of
from dear.workflows.retrieve import gallery_of


@dataclass(frozen=True)
class Rejection:
    """Images of known classes against images of no class.

    Attributes:
        auroc: how often an image of a known class scores above one of no class.
        refused: share of images of known classes that are answered with "none of these".
        refused_low: lower end of the share that the run promised for as many images, 95 % sure.
        refused_high: its upper end.
        false_acceptance: share of images of no class that are answered with a class.
        false_low: lower end of its interval, 90 % sure.
        false_high: its upper end.
        known: images of known classes.
        unknown: images of no class.
        share: of images of known classes that was to be refused at most.
    """

    auroc: float
    refused: float
    refused_low: float
    refused_high: float
    false_acceptance: float
    false_low: float
    false_high: float
    known: int
    unknown: int
    share: float

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


def evaluate_unknown(
    run: PathLike | Method,
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
        run: run folder, or a method, with a calibration.
        known: its evaluation on images of its classes.
        unknown: a folder of images (labels do not matter), a table, a benchmark, `world:NAME` or a set.
        share: of images of known classes that may be refused.
        mode: how to predict; None: the method's usual mode.
        backbone: for a run folder whose backbone moved.
        root: folder of the benchmarks, for the name of a benchmark.
        device: "auto", "cpu", "cuda", ...
        progress: told how many images are done.

    Raises:
        UsageError: the run has no calibration.
        DearError: anything else a user can correct, in one sentence.
    """
    method = run if isinstance(run, Method) else load_run(run, backbone, pick_device(device))
    mode = method.pick_mode(mode)
    limit = run_threshold(method, mode, share)
    images = gallery_of(unknown, root)
    if progress is not None:
        progress("unknown", 0, len(images))
    scaled = method.calibrated(answers_of(method, images)[mode], mode)
    outside = rejection_score(method, scaled, mode)
    if progress is not None:
        progress("unknown", len(images), len(images))
    inside = (known.scores or {})[mode]
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
