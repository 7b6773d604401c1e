"""ProLIP: the visual projection alone is trained (Fahes et al., "Fine-tuning CLIP's Last Visual Projector").

`logits = tau cos(P^T x, w_c)` with x the normed class token before the projection, P a trained copy of
CLIP's projection P0 and w_c the frozen text features. Loss: `CE + lambda |P - P0|^2` (sum over all entries),
lambda = 1 / shots.

Departures: the authors train with Adam (eps 1e-4) on all training images at once, a new stored view each of
300 epochs, in float16; here AdamW without weight decay on batches as large as the training set allows
(4,096), in float32. With classes of unequal size, shots is the mean number of images per class. Training
cycles through ten stored views per image, where the authors store 300. The projection folds into a plain
CLIP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.correction import Correction
from dear.clip.model import Clip
from dear.errors import UsageError
from dear.methods.base import Method
from dear.methods.frozen import Batches, Frozen, Loss
from dear.methods.headtools import fold
from dear.methods.options import NotNegative, Options


@dataclass(frozen=True)
class ProLIPConfig(Options):
    weight: NotNegative | None = None  #: lambda; None: 1 / images per class


class ProLIP(Method):
    """A trained visual projection, regularized toward the original."""

    name, title = "prolip", "ProLIP"
    about = "only the projection of the image tower, kept close to the frozen one; fast"
    quick = True
    cut = "pooled"
    recipe = {
        "epochs": 300, "batch": 4096, "lr": 1e-5, "weight_decay": 0.0, "warmup_epochs": 0, "views": 10,
    }  # fmt: skip
    Config = ProLIPConfig
    config: ProLIPConfig
    penalty: Tensor

    def build(self, generator: torch.Generator) -> None:
        """P [D, E], and lambda, which depends on the training set."""
        if self.clip.visual.proj is None:
            raise UsageError(
                f"ProLIP needs a backbone with a visual projection, got {self.clip.name}, which has none; "
                "use another method"
            )
        self.projection = self.learn(self.clip.visual.proj)
        weight = 1.0 if self.config.weight is None else self.config.weight
        self.register_buffer("penalty", self.projection.detach().new_tensor(weight))

    def prepare(self, batches: Batches) -> None:
        """Lambda = 1 / images per class."""
        if self.config.weight is None:
            images = sum(len(batch.labels) for batch in batches(False))
            self.penalty.fill_(len(self.classes) / max(1, images))

    def images_from_frozen(self, frozen: Frozen) -> Tensor:
        visual = self.clip.visual
        features = visual.correct_pooled(frozen.x.to(self.projection.dtype)) @ self.projection
        return features if visual.proj_bias is None else features + visual.proj_bias.to(features.dtype)

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        ce = F.cross_entropy(self.logits_from_frozen(frozen)[self.modes[0]], labels)
        distance = (self.projection - self.clip.visual.projection_matrix()).square().sum()
        return Loss(ce + self.penalty * distance, {"ce": ce.detach(), "distance": distance.detach()})

    def learned_values(self) -> dict[str, Any]:
        return {"penalty": float(self.penalty)}

    @torch.no_grad()
    def merge(self) -> Clip:
        correction = self.clip.visual.correction
        plain = fold(self.clip.with_correction(None))
        if correction is None:
            plain.visual.projection_matrix().copy_(self.projection)
            return plain
        plain.visual.projection_matrix().copy_(correction.pooled_matrix @ self.projection)
        bias = correction.pooled_bias @ self.projection
        return plain.with_correction(
            Correction(torch.eye(len(bias)), bias, correction.heads)
        ).fold_correction()
