"""2SFS: task features first, then a classifier (Farina et al., "Rethinking Few-Shot Adaptation", CVPR 2025).

First stage: the layer norms of both towers are trained with cross-entropy. Second stage: the norms are fixed,
and a classifier initialized to the text features of the classes is trained, `logits = tau cos(f, phi_c)`.
Trained classes then use their row of the classifier; new classes use the features of the adapted text tower.

Departures: the authors' code was not available, so their values are those of the paper: the first stage has
0.6 of the steps, AdamW with a rate of 2e-4, batches of 32. Here both stages share one cosine schedule over 50
epochs, and the norm before the first layer is frozen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from dear.methods.base import Method
from dear.methods.frozen import Frozen
from dear.methods.layer_changes import LayerChanges
from dear.methods.options import Options
from dear.methods.tensors import unit


@dataclass(frozen=True)
class TwoStageConfig(Options):
    #: fraction of the epochs in which the norms are trained
    first_stage: Annotated[float, Meta(gt=0, lt=1)] = 0.6


class TwoStage(Method):
    """Trained norms, then a trained classifier."""

    name, title = "two-stage", "2SFS"
    about = "the norms of both towers first, then a classifier"
    cut = 1
    dynamic = True  # the two stages compute different things
    recipe = {"lr": 2e-4, "weight_decay": 1e-2, "epochs": 50, "batch": 32}
    Config = TwoStageConfig
    config: TwoStageConfig
    stage: Tensor

    def build(self, generator: torch.Generator) -> None:
        """Additions to the norms, all zero; the classifier [trained classes, E]; the stage, 1 or 2."""
        sides = {"image": self.clip.config.vision.layers, "text": self.clip.config.text.layers}
        self.changes = {
            side: LayerChanges(
                side, range(1, layers + 1), lambda name: name.startswith("ln_"), projection=False
            )
            for side, layers in sides.items()
        }
        for changes in self.changes.values():
            changes.learn(self)
        shape = (len(self.trained_classes), self.clip.config.embed_dim)
        self.classifier = self.learn(torch.zeros(shape))
        self.register_buffer("stage", torch.ones((), dtype=torch.long, device=self.clip.device))

    def images_from_frozen(self, frozen: Frozen) -> Tensor:
        """Features [B, E] under the trained norms; fixed in the second stage."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and int(self.stage) == 1):
            return self.changes["image"].images(self, frozen.x)

    def texts(self) -> Tensor:
        """Features [C, E] of the adapted text tower; in stage 2, trained classes use the classifier."""
        if int(self.stage) == 1:
            return self.changes["text"].texts(self)
        if self.classes == self.trained_classes:
            return self.classifier
        with torch.no_grad():
            rows = list(unit(self.changes["text"].texts(self)).to(self.classifier.dtype))
        row_of = {name: row for row, name in enumerate(self.trained_classes)}
        trained = unit(self.classifier)
        return torch.stack(
            [trained[row_of[name]] if name in row_of else rows[i] for i, name in enumerate(self.classes)]
        )

    @torch.no_grad()
    def after_epoch(self, epoch: int, epochs: int) -> None:
        """Start the second stage: the classifier begins at the adapted text features."""
        if int(self.stage) == 1 and epoch == max(1, round(self.config.first_stage * epochs)):
            self.classifier.copy_(unit(self.changes["text"].texts(self)))
            self.stage.fill_(2)
