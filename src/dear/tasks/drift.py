"""`dear drift`: do new images still resemble the training images of a run?

Per image: is it farther from the training images than all but a twentieth of these are from each other? If
nothing changed, about 5% of new images are. For all images together: do their features have the same
distribution (kernel two-sample test with permutations)?
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.stats import betabinom
from torch import Tensor

from dear.calibration.reference import Reference
from dear.data.duplicates import find_duplicates, find_file_duplicates
from dear.data.folds import IntArray, equal_rows
from dear.data.inputs import is_frame
from dear.errors import InputError, UsageError
from dear.images.names import find_images
from dear.images.open import open_image
from dear.report.page import Table, Thumbnail, percent, render, thumbnail
from dear.runs.images import training_images
from dear.runs.model import Model
from dear.tasks.load import load_model
from dear.utils.files import PathLike, check_output, write_atomic
from dear.utils.progress import Progress

if TYPE_CHECKING:
    import pandas as pd

FAR = 0.05  #: share of training images that count as far from the others
PERMUTATIONS = 500
MOST_IMAGES = 1000  #: of each side in the two-sample test
ALARM = 0.01  #: p-value of an alarm
EXAMPLES = 8
MIN_IMAGES = 10


@dataclass(frozen=True)
class ClassDrift:
    """Images with the same predicted class."""

    name: str
    images: int
    far: float  #: share of them that is far from the training images


@dataclass(frozen=True)
class Drift:
    """New images compared with the training images."""

    images: int
    reference: int  #: training images they are compared with
    far: float  #: share of new images that is far; about `FAR` where nothing changed
    far_p: float  #: p-value of that share (`find_far`)
    p: float  #: p-value of the two-sample test
    classes: tuple[ClassDrift, ...]  #: most far images first
    examples: tuple[str, ...]  #: the images that are farthest
    unreadable: tuple[str, ...] = ()
    distinct: int = 0  #: new images, copies counted once; the p-values count no copies
    #: (file, predicted class, nearness, whether it is far) of every new image
    rows: tuple[tuple[str, str, float, bool], ...] = field(default=(), repr=False)

    @property
    def drifted(self) -> bool:
        """Whether the new images differ from the training images."""
        return self.p < ALARM and self.far_p < ALARM

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        share = f"{self.far:.1%} of the new images are far from all training images ({FAR:.0%} are expected)"
        if self.drifted:
            return f"The new images differ from the training images: {share}. Expect more wrong answers."
        if self.p < ALARM:
            return f"The mixture of images changed, but each resembles training images: {share}."
        return f"The new images resemble the training images: {share}."

    def to_frame(self) -> pd.DataFrame:
        """One row per new image: file, predicted class, nearness to training images, whether it is far."""
        import pandas as pd

        return pd.DataFrame(list(self.rows), columns=["image", "class", "nearness", "far"])

    def table(self) -> Table:
        """One row per predicted class."""
        rows = tuple((one.name, str(one.images), percent(one.far)) for one in self.classes[:20])
        return Table(("predicted class", "images", "far from all training images"), rows)

    def write_page(self, path: PathLike) -> None:
        """Write a page with the verdict, the classes and the farthest images."""
        shown = [
            Thumbnail(thumbnail(open_image(name)), name, (("soft", os.path.basename(name)),))
            for name in self.examples
        ]
        notes = {
            "images": f"{self.images} new, {self.reference} training images",
            "images as a whole": f"{_p_value(self.p)} (two-sample test; below {ALARM:g}: they changed)",
            "share of far images": f"{_p_value(self.far_p)} (below {ALARM:g}: more than expected)",
        }
        title = "Drift: new images compared with the training images"
        write_atomic(path, render("drift.html", title=title, drift=self, images=shown, notes=notes))

    def __repr__(self) -> str:
        return f"<Drift: {self.verdict}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return render("summary.html", verdict=self.verdict, tables=[self.table()])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "drifted": self.drifted,
            "verdict": self.verdict,
            "images": self.images,
            "distinct_images": self.distinct,
            "training_images": self.reference,
            "far": self.far,
            "far_expected": FAR,
            "far_p": self.far_p,
            "p": self.p,
            "classes": [asdict(one) for one in self.classes],
            "examples": list(self.examples),
            "unreadable": list(self.unreadable),
        }


def drift(
    run: PathLike | Model,
    images: PathLike | Sequence[PathLike] | Any,
    *,
    backbone: Any = None,
    out: PathLike | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> Drift:
    """Compare new images with the training images of a run; labels are not needed.

    Args:
        run: run folder, archive, `hf://owner/name`, or model.
        images: a folder; files, folders or patterns; or a frame with a column `path`: at least ten images.
        backbone: for a run whose backbone moved.
        out: where to write a page; None: nowhere.
        device: "auto", "cpu", "cuda", …
        progress: called with (stage, done, total).

    Raises:
        UsageError: there are fewer than ten images, or the run does not name its training images.
        InputError: a file does not exist.

    Example:
        >>> drift("run", ["photos-of-this-week/"]).drifted      # doctest: +SKIP
        False
    """
    check_output(out)
    model = load_model(run, backbone, device)
    names: Any = images["path"] if is_frame(images) else images  # type: ignore[index, call-overload]
    names = [names] if isinstance(names, str | os.PathLike) else names
    files = find_images([os.fspath(each) for each in names])
    missing = next((file for file in files if not os.path.exists(file)), None)
    if missing is not None:
        raise InputError(f"{missing}: no such image or folder")
    if len(files) < MIN_IMAGES:
        raise UsageError(f"drift needs at least {MIN_IMAGES} images, got {len(files)}")
    reference = reference_of(model, progress)
    answers = model.answers(files, top=1, unreadable="skip", progress=progress)
    good = [answer for answer in answers if answer.error is None]
    if len(good) < MIN_IMAGES:
        raise UsageError(
            f"drift needs at least {MIN_IMAGES} readable images, got {len(good)} of {len(files)}"
        )
    readable = [answer.image for answer in good]
    features = model.features(readable, progress=progress)
    problems = tuple(answer.error for answer in answers if answer.error is not None)
    likeliest = [answer.classes[0][0] for answer in good]
    units = find_file_duplicates(readable).units
    result = compare(reference, features, readable, likeliest, unreadable=problems, units=units)
    if out is not None:
        result.write_page(out)
    return result


def compare(
    reference: Reference,
    features: Tensor,
    files: Sequence[str],
    answers: Sequence[str],
    seed: int = 1,
    unreadable: tuple[str, ...] = (),
    units: IntArray | None = None,
) -> Drift:
    """Compare features [n, E] of new images with those of the training images.

    `units` [n]: copies of an image have the same; None: images with equal features are copies. Of copies one
    counts in both tests, which take images as independent.
    """
    nearness = reference.nearness(features)
    far, _ = find_far(reference.mutual_nearness, nearness)
    distinct = np.unique(equal_rows(features) if units is None else units, return_index=True)[1].tolist()
    if len(distinct) < MIN_IMAGES:
        raise UsageError(
            f"drift needs at least {MIN_IMAGES} different images, got {len(distinct)} and copies of them"
        )
    _, far_p = find_far(reference.mutual_nearness, nearness[distinct])
    by_class: dict[str, list[bool]] = {}
    for name, each in zip(answers, far.tolist(), strict=True):
        by_class.setdefault(name, []).append(each)
    rows = [ClassDrift(name, len(each), sum(each) / len(each)) for name, each in by_class.items()]
    order = nearness.argsort()[:EXAMPLES].tolist()
    return Drift(
        images=len(features),
        reference=len(reference.labels),
        far=float(far.double().mean()),
        far_p=far_p,
        p=two_sample(reference.features.float(), features[distinct].float(), seed),
        distinct=len(distinct),
        classes=tuple(sorted(rows, key=lambda row: (-row.far * row.images, row.name))),
        examples=tuple(files[index] for index in order),
        unreadable=unreadable,
        rows=tuple(zip(files, answers, nearness.tolist(), far.tolist(), strict=True)),
    )


def _p_value(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def find_far(training: Tensor, new: Tensor) -> tuple[Tensor, float]:
    """Which of m new images are far, bool [m], and the p-value of their number.

    `training` [n] and `new` [m] are the nearness of images to the training images. An image is far where its
    nearness is below the k-th smallest of the training images, k = `FAR` (n + 1). That limit is itself drawn
    at random: if nothing changed, the number of far images has a beta-binomial distribution (m; k, n + 1 -
    k), which is wider than a binomial one.

    >>> far, p = find_far(torch.arange(99.0), torch.tensor([1.0, 3.0, 50.0, 70.0]))
    >>> far.tolist(), round(p, 3)
    ([True, True, False, False], 0.016)
    """
    count = len(training)
    rank = max(1, math.floor(FAR * (count + 1) + 1e-9))
    far = new < training.sort().values[rank - 1]
    return far, float(betabinom.sf(int(far.sum()) - 1, len(new), rank, count + 1 - rank))


def two_sample(first: Tensor, second: Tensor, seed: int = 1, permutations: int = PERMUTATIONS) -> float:
    """P-value that features [n, E] and [m, E] have one distribution: MMD with permutations.

    The kernel is Gaussian in the distance of unit features, as wide as their median distance. The order of
    the images does not matter.
    """
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(first.shape[1], generator=generator, dtype=torch.float64)
    ordered = [some[(some.double() @ direction).argsort()] for some in (first, second)]
    parts = [some[torch.randperm(len(some), generator=generator)[:MOST_IMAGES]] for some in ordered]
    x = torch.nn.functional.normalize(torch.cat(parts).double(), dim=-1)
    squared = torch.cdist(x, x).square()
    upper = squared[torch.triu_indices(len(x), len(x), 1).unbind()]
    kernel = torch.exp(-squared / upper.median().clamp(min=1e-12))
    kernel.fill_diagonal_(0.0)
    n, m = map(len, parts)
    signs = torch.empty(permutations + 1, n + m, dtype=torch.float64)
    signs[0] = torch.cat([torch.ones(n), torch.zeros(m)])
    for row in range(1, permutations + 1):
        signs[row] = signs[0][torch.randperm(n + m, generator=generator)]
    of_first, of_second = signs, 1 - signs
    both = of_first @ kernel
    within = (both * of_first).sum(dim=1) / (n * (n - 1))
    across = (both * of_second).sum(dim=1) / (n * m)
    other = ((of_second @ kernel) * of_second).sum(dim=1) / (m * (m - 1))
    statistic = within + other - 2 * across
    return float((statistic >= statistic[0] - 1e-12).double().mean())


def reference_of(model: Model, progress: Progress | None = None) -> Reference:
    """Features of the run's training images: those stored in the run, or computed from its images."""
    if model.reference is not None:
        return model.reference
    if model.path is None or model.spec is None:
        raise UsageError(
            "drift needs the training images, which a model without a run folder does not name; pass a folder"
        )
    images = training_images(model.spec)
    copies = find_duplicates(images)
    features = model.features(images, progress=progress)
    return Reference.of(features, images.labels, copies.units, copies.contents)
