"""Do new images still look like those a run was trained on? `dear drift`.

Per image: is it nearer to the training images than the farthest twentieth of these are to each other? If
nothing changed, 5% of new images are not. For all images together: do their features have the same
distribution (kernel two-sample test with permutations)?
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from scipy.stats import binomtest
from torch import Tensor

from dear.calibration.reference import Reference
from dear.errors import UsageError
from dear.images.names import find_images
from dear.runs.images import training_images
from dear.runs.model import Model
from dear.utils.files import PathLike
from dear.utils.progress import Progress

FAR = 0.05  #: share of training images that are called far from the others
PERMUTATIONS = 500
MOST_IMAGES = 1000  #: of each side in the two-sample test
ALARM = 0.01  #: p-value of the two-sample test
EXAMPLES = 8
LEAST_IMAGES = 10


@dataclass(frozen=True)
class ClassDrift:
    """Images that are answered with one class."""

    name: str
    images: int
    far: float  #: share of them that is far from the training images


@dataclass(frozen=True)
class Drift:
    """What new images look like beside the training images."""

    images: int
    reference: int  #: training images they are compared with
    far: float  #: share of new images that is far; `FAR` where nothing changed
    far_p: float  #: p-value of that share (binomial test)
    p: float  #: p-value of the two-sample test
    classes: tuple[ClassDrift, ...]  #: most images far from training first
    examples: tuple[str, ...]  #: the images that are farthest
    unreadable: tuple[str, ...] = ()

    @property
    def drifted(self) -> bool:
        """Whether the new images are others than the training images."""
        return self.p < ALARM and self.far_p < ALARM

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        share = f"{self.far:.1%} of the new images are far from all training images ({FAR:.0%} are expected)"
        if self.drifted:
            return f"The new images look different from the training images: {share}. Answers may be worse."
        if self.p < ALARM:
            return f"The new images are a different mixture, but each looks like training images: {share}."
        return f"The new images look like the training images: {share}."

    def report(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "drifted": self.drifted,
            "verdict": self.verdict,
            "images": self.images,
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
    images: Sequence[PathLike],
    *,
    backbone: Any = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> Drift:
    """Compare new images (files, folders or patterns, without labels) with the training images of a run.

    Raises:
        UsageError: there are fewer than ten images, or the training images are not known any more.
    """
    model = Model.of(run, backbone, device)
    files = find_images([os.fspath(each) for each in images])
    if len(files) < LEAST_IMAGES:
        raise UsageError(f"{len(files)} images say nothing about a change; give at least {LEAST_IMAGES}")
    reference = reference_of(model, progress)
    answers = model.answers(files, top=1, unreadable="skip", progress=progress)
    good = [answer for answer in answers if answer.error is None]
    if len(good) < LEAST_IMAGES:
        raise UsageError(
            f"{len(good)} of {len(files)} images can be read; at least {LEAST_IMAGES} are needed"
        )
    readable = [answer.image for answer in good]
    features = model.features(readable, progress=progress)
    problems = tuple(answer.error for answer in answers if answer.error is not None)
    likeliest = [answer.classes[0][0] for answer in good]
    return compare(reference, features, readable, likeliest, unreadable=problems)


def compare(
    reference: Reference,
    features: Tensor,
    files: Sequence[str],
    answers: Sequence[str],
    seed: int = 1,
    unreadable: tuple[str, ...] = (),
) -> Drift:
    """Features [n, E] of new images beside those of the training images."""
    nearness = reference.nearness(features)
    limit = reference.own_nearness.quantile(FAR)
    far = nearness < limit
    count = int(far.sum())
    by_class: dict[str, list[bool]] = {}
    for name, each in zip(answers, far.tolist(), strict=True):
        by_class.setdefault(name, []).append(each)
    rows = [ClassDrift(name, len(own), sum(own) / len(own)) for name, own in by_class.items()]
    order = nearness.argsort()[:EXAMPLES].tolist()
    return Drift(
        images=len(features),
        reference=len(reference.labels),
        far=count / len(features),
        far_p=float(binomtest(count, len(features), FAR, alternative="greater").pvalue),
        p=two_sample(reference.features.float(), features.float(), seed),
        classes=tuple(sorted(rows, key=lambda row: (-row.far * row.images, row.name))),
        examples=tuple(files[index] for index in order),
        unreadable=unreadable,
    )


def two_sample(first: Tensor, second: Tensor, seed: int = 1, permutations: int = PERMUTATIONS) -> float:
    """P-value that features [n, E] and [m, E] have one distribution: MMD with permutations.

    The kernel is Gaussian in the distance of unit features, as wide as their median distance.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = [some[torch.randperm(len(some), generator=generator)[:MOST_IMAGES]] for some in (first, second)]
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
    """The features of the run's training images: those it keeps, or computed from its images again."""
    if model.reference is not None:
        return model.reference
    if model.path is None or model.spec is None:
        raise UsageError("this model was not read from a run folder, so its training images are not known")
    images = training_images(model.spec)
    return Reference.of(model.features(images, progress=progress), images.labels)
