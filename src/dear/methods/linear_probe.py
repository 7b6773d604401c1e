"""Linear probe: a linear classifier on frozen image features (Radford et al., ICML 2021).

`logits = tau (f / |f|) W^T + b` with f the frozen image feature; W and b are learned, the text tower is not
used.

Departures: CLIP's authors fit logistic regression with L-BFGS and search its penalty on validation data; here
W is trained by the same loop as every method, with weight decay, and nothing is searched. The temperature tau
only sets the scale of W. `start="text"` begins at the text features of the prompts, where the probe equals
zero-shot CLIP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.errors import UsageError
from dear.methods.base import Frozen, Method, unit


@dataclass(frozen=True)
class LinearProbeConfig:
    """Options of the linear probe."""

    start: str = "zero"  #: or "text": the prompts' features

    def __post_init__(self) -> None:
        if self.start not in ("zero", "text"):
            raise UsageError(f"start {self.start!r} is not known; choose from zero, text")


class LinearProbe(Method):
    """A linear classifier; it knows the classes it was trained on and no others."""

    name: ClassVar[str] = "linear-probe"
    title: ClassVar[str] = "Linear probe"
    recipe: ClassVar[Mapping[str, Any]] = {"epochs": 50, "batch": 32, "weight_decay": 1e-2}
    Config: ClassVar[type] = LinearProbeConfig
    config: LinearProbeConfig

    def build(self, generator: torch.Generator) -> None:
        """W [C, E] and b [C]."""
        text = self.prompts.frozen
        self.weight = self.learn(text if self.config.start == "text" else torch.zeros_like(text))
        self.bias = self.learn(torch.zeros(len(text)))

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        """Logits [B, C]."""
        images = unit(frozen[0]).to(self.weight.dtype)
        return {"default": F.linear(self.clip.logit_scale * images, self.weight, self.bias)}
