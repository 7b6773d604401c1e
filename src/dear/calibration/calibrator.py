"""Applies the calibration of a run to a list of classes: probabilities, and the score of "none of these"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dear.calibration.calibration import (
    Calibration,
    Threshold,
    apply_scales,
    class_scales,
    several_labels_scales,
    threshold,
)
from dear.calibration.reference import Reference
from dear.errors import UsageError


@dataclass(frozen=True, eq=False)
class Calibrator:
    """Turns logits of some classes into probabilities, and decides which images are rejected."""

    calibration: Calibration | None  #: None: logits keep CLIP's scale
    reference: Reference | None  #: features of the training images
    classes: Sequence[str]
    trained: Sequence[bool]  #: whether each class was trained
    trained_classes: Sequence[str] = ()  #: in the order of the calibration, for several labels
    several: bool = False  #: images have several labels: probabilities are sigmoids, not a softmax

    def scales(self, mode: str) -> Tensor | None:
        """The factors and offsets of `apply_scales` for each class; None: logits stay unchanged."""
        fitted = None if self.calibration is None else self.calibration.modes.get(mode)
        if fitted is None:
            return None
        if self.several:
            return several_labels_scales(fitted, self._trained_indices)
        return class_scales(fitted, self.trained)

    @property
    def _trained_indices(self) -> list[int | None]:
        """Index of each class among the trained ones; None: it is new."""
        index_of = {name: index for index, name in enumerate(self.trained_classes)}
        return [index_of.get(name) for name in self.classes]

    def probabilities(self, scaled: Tensor) -> Tensor:
        """Probabilities [b, C] of calibrated logits [b, C]."""
        return scaled.sigmoid() if self.several else scaled.softmax(dim=-1)

    def label_thresholds(self, mode: str) -> Tensor:
        """With several labels: the probability [C] from which an image has each label.

        A new class has the median of the trained ones.

        Raises:
            UsageError: there is no calibration.
        """
        fitted = None if self.calibration is None else self.calibration.modes.get(mode)
        if fitted is None:
            raise UsageError(
                "several labels: this run has no calibration, and thus no thresholds of labels; "
                "train it with calibration, on at least 10 images",
                hint="calibrate",
            )
        values = torch.tensor(fitted.thresholds)
        return torch.stack(
            [values.median() if index is None else values[index] for index in self._trained_indices]
        )

    def calibrate(self, logits: Tensor, mode: str) -> Tensor:
        """Logits [b, C] of a mode on the scale where their softmax is the probability of being right.

        Without a calibration, or for a mode that it does not hold, they keep CLIP's scale.
        """
        scales = self.scales(mode)
        return logits if scales is None else apply_scales(logits, scales.to(logits))

    @property
    def needs_nearness(self) -> bool:
        """Whether the score of "none of these" counts how near images are to the training images.

        Not in a list with classes that were not trained: images of those need not be near.
        """
        calibrated = self.calibration is not None and bool(self.calibration.nearness)
        return calibrated and self.reference is not None and all(self.trained)

    def nearness(self, features: Tensor) -> Tensor:
        """Mean cosine [b] of frozen features [b, W] with the nearest training images, on the CPU.

        W is E, or more with a focus, whose columns come after those of the image feature.
        """
        if self.reference is None:
            raise UsageError("this model does not know its training images")
        width = self.reference.features.shape[1]
        return self.reference.nearness(features[..., :width].float().cpu())

    def score(self, scaled: Tensor, nearness: Tensor | None, mode: str) -> Tensor:
        """The score [b] that `threshold` is compared with, of calibrated logits [b, C].

        `nearness` [b] of the same images may be None where `needs_nearness` is not True.
        """
        largest = scaled.amax(dim=-1)
        if self.calibration is None or mode not in self.calibration.modes:
            return largest
        return self.calibration.score(mode, largest, nearness if self.needs_nearness else None)

    def threshold(self, share: float, mode: str) -> Threshold:
        """The score below which an image is of no class; about a share of known images is refused.

        Raises:
            UsageError: there is no calibration of this mode, or none of the classes was trained.
        """
        if self.calibration is None or mode not in self.calibration.modes:
            raise UsageError(
                "reject needs a calibration, which this run does not have; train "
                "it with calibration, on at least 10 images of classes that have two or more",
                hint="calibrate",
            )
        if self.several:
            raise UsageError(
                "reject: a run with several labels answers an image of no class with an empty set already"
            )
        if not any(self.trained):
            raise UsageError(
                f"none of the classes ({', '.join(self.classes[:3])}, …) was trained, so it is not known how "
                "their images score and none can be refused; add the classes to the trained ones, or do not "
                "refuse images"
            )
        return threshold(self.calibration.held_out(mode, self.needs_nearness), share)
