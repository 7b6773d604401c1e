"""Linear probe: a linear classifier on frozen image features (Radford et al., ICML 2021).

`logits = x W^T + b` with x the frozen unit image feature, or the focused one; W and b are a logistic
regression with an L2 penalty on W, fitted by L-BFGS. The text tower is not used.

Departures: CLIP's authors search the penalty on validation data; here it is chosen by cross-validation on the
training images, and features have unit length. `start="text"` adds zero-shot CLIP's logits, so that W learns
the difference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.methods.base import Method
from dear.methods.focus import FeatureReader, FocusConfig, training_features
from dear.methods.frozen import Batches, Frozen
from dear.methods.logistic import choose_strength, fit_logistic
from dear.methods.options import Positive
from dear.methods.tensors import unit


@dataclass(frozen=True)
class LinearProbeConfig(FocusConfig):
    start: Literal["zero", "text"] = "zero"  #: "text": add zero-shot CLIP's logits
    #: inverse of the penalty, as in scikit-learn; None: chosen by cross-validation
    C: Positive | None = None


class LinearProbe(Method):
    """A linear classifier for the classes it was trained on."""

    name, title = "linear-probe", "Linear probe"
    about = "a linear classifier on frozen features; seconds, trained classes only"
    quick, holds_out = True, True
    Config, can_focus, several_labels = LinearProbeConfig, True, True
    config: LinearProbeConfig
    weight: Tensor
    bias: Tensor
    strength: Tensor  #: C, as set or chosen, []

    def build(self, generator: torch.Generator) -> None:
        self.reader = FeatureReader(self)
        count, dtype = len(self.classes), torch.promote_types(self.clip.dtype, torch.float32)
        for name, shape in (("weight", (count, self.reader.width)), ("bias", (count,)), ("strength", ())):
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=self.clip.device))

    def prepare(self, batches: Batches) -> None:
        rows, images, labels, units = training_features(self.clip, self.reader, batches, views=0)
        features, count = rows.to(self.weight.dtype), len(self.classes)
        offset = self._offset(images)
        strength = self.config.C or choose_strength(features, labels, count, offset, units)
        self.strength = self.strength.new_tensor(strength)
        self.weight, self.bias = fit_logistic(features, labels, count, strength, offset)

    def learned_values(self) -> dict[str, float]:
        return {"C": float(self.strength)}

    def settled_config(self) -> LinearProbeConfig:
        return replace(self.config, C=float(self.strength) or None)

    def _offset(self, images: Tensor) -> Tensor | None:
        """Zero-shot logits [B, C] of unit image features [B, E], if they are added to the classifier's."""
        if self.config.start == "zero":
            return None
        return self.clip.logit_scale * images.to(self.weight.dtype) @ self.prompts.frozen.T

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        logits = F.linear(self.reader(frozen).to(self.weight.dtype), self.weight, self.bias)
        offset = self._offset(unit(frozen.x))
        return {"default": logits if offset is None else logits + offset}
