"""From logits to probabilities one can trust, and to the score that tells images of no class."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dear.calibration.scales import Threshold, apply_scales, class_scales, distance_ratio, threshold
from dear.errors import UsageError
from dear.methods.base import unit
from dear.runs.trained import TrainedRun


class CalibratedRun(TrainedRun):
    """A trained run that puts logits on the scale of its calibration and refuses images of no class."""

    @cached_property
    def _scales(self) -> dict[str, tuple[Any, Tensor]]:
        """By mode: what the scales were made of, and the scales."""
        return {}

    def calibrated(self, logits: Tensor, mode: str | None = None) -> Tensor:
        """Logits [b, C] of a mode on the scale where their softmax says how sure the answer is.

        Without a calibration, or for a mode that it does not hold, they stay on CLIP's own scale.
        """
        scales = self.scales(mode)
        return logits if scales is None else apply_scales(logits, scales.to(logits))

    def scales(self, mode: str | None = None) -> Tensor | None:
        """What `calibrated` does with each class's logits (`class_scales`), [2, C]; None: nothing."""
        mode = self.pick_mode(mode)
        own = None if self.calibration is None else self.calibration.modes.get(mode)
        if own is None:
            return None
        stamp = (id(own), self.method._stamp())
        if mode not in self._scales or self._scales[mode][0] != stamp:
            gamma = torch.ones(len(self.classes)) if all(self.trained) else self.text_distances()
            self._scales[mode] = (stamp, class_scales(own, self.trained, gamma))
        return self._scales[mode][1]

    @torch.no_grad()
    def text_distances(self) -> Tensor:
        """How training changed each class's distance from the trained ones in text space, [C]; 1: not."""
        own = self.bound
        base = own.with_classes(own.trained_classes)
        tuned, frozen = (unit(f).float() for f in (own.texts(), own.prompts.frozen))
        base_tuned, base_frozen = (unit(f).float() for f in (base.texts(), base.prompts.frozen))
        return distance_ratio(tuned, frozen, base_tuned, base_frozen).float().cpu()

    def nearness(self, features: Tensor) -> Tensor:
        """Mean cosine [b] of frozen features [b, W] with the nearest training images, on the CPU."""
        if self.reference is None:
            raise UsageError("this model does not know its training images")
        own = features[..., : self.clip.config.embed_dim]  # a focus stands behind it
        return self.reference.nearness(own.float().cpu())

    @property
    def needs_nearness(self) -> bool:
        """Whether the score of "none of these" counts how near images are to the training images.

        Not in a list with classes that were not trained: images of those need not be near.
        """
        known = self.calibration is not None and bool(self.calibration.nearness)
        return known and self.reference is not None and all(self.trained)

    def score(self, scaled: Tensor, nearness: Tensor | None = None, mode: str | None = None) -> Tensor:
        """The score [b] that `threshold` is compared with, of calibrated logits [b, C].

        `nearness` [b] of the same images may be None where `needs_nearness` is not True.
        """
        mode, largest = self.pick_mode(mode), scaled.amax(dim=-1)
        if self.calibration is None or mode not in self.calibration.modes:
            return largest
        return self.calibration.score(mode, largest, nearness if self.needs_nearness else None)

    def threshold(self, share: float, mode: str | None = None) -> Threshold:
        """The score below which an image is of no class; at most a share of known images is refused."""
        mode = self.pick_mode(mode)
        if self.calibration is None or mode not in self.calibration.modes:
            raise UsageError(
                "this run has no calibration, so it cannot say when an image is none of its classes; train "
                "it with calibration, on at least 10 images of classes that have two or more",
                hint="calibrate",
            )
        if not any(self.trained):
            raise UsageError(
                f"none of the classes ({', '.join(self.classes[:3])}, …) was trained, so it is not known how "
                "their images score and none can be refused; add the classes to the trained ones, or do not "
                "refuse images"
            )
        return threshold(self.calibration.held_out(mode, self.needs_nearness), share)
