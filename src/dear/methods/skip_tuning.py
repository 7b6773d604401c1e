"""SkipTuning: trains the upper half of both towers on the output of the lower half (Wu et al., CVPR 2025).

Layers 1 to 6 of 12 are frozen and run once per view; layers 7 to 12 of both towers, their final norms and
projections are trained with cross-entropy, without prompts or adapters. A step uses only some classes: the
nearest to the batch's images (by cosine with the frozen text features, the true classes first), half of all
and at most 50, and each further rank with a probability that decays exponentially.

Departures: the learned tensors are differences from the backbone, so weight decay pulls toward CLIP rather
than toward zero (5e-4 times a rate of 2e-5: 1e-8 per step). After training, the differences are rounded to
half precision and saved that way. The further ranks are drawn once, from the method's seed; the authors draw
them at the first step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from dear.clip.model import Clip
from dear.errors import UsageError
from dear.methods.base import Method
from dear.methods.frozen import Frozen, Loss
from dear.methods.layer_changes import LayerChanges, fold_changes
from dear.methods.options import AtLeastOne, Options, Positive
from dear.methods.tensors import scores, unit

_TAIL_END = 5.0  # the exponential is evaluated from 0 to this value over the further ranks


@dataclass(frozen=True)
class SkipTuningConfig(Options):
    frozen_layers: int | None = None  #: frozen layers of the image tower; None: half of them
    frozen_text_layers: int | None = None  #: frozen layers of the text tower; None: half of them
    #: fraction of the classes, the nearest ones, that every step uses
    class_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    most_classes: AtLeastOne = 50  #: upper bound of their number
    tail: Positive = 0.3  #: scale of the exponential by which a step uses further ranks


def _first(number: int | None, layers: int, option: str) -> int:
    """The first trained layer."""
    frozen = layers // 2 if number is None else number
    if not 0 <= frozen < layers:
        raise UsageError(f"{option} must be from 0 to {layers - 1} (the tower has {layers}), got {frozen}")
    return frozen + 1


class SkipTuning(Method):
    """Trains the upper layers of both towers."""

    name, title = "skip-tuning", "SkipTuning"
    about = "the upper half of both towers, trained in full; many parameters"
    cut: int = 1  # `build` sets the layer
    recipe = {
        "optimizer": "sgd", "lr": 2e-5, "epochs": 20, "batch": 4, "warmup_lr": 1e-6, "precision": "float32",
    }  # fmt: skip
    Config = SkipTuningConfig
    config: SkipTuningConfig

    def build(self, generator: torch.Generator) -> None:
        """Additions to the upper layers, all zero, and the ranks of the classes that a step uses."""
        config, clip = self.config, self.clip.config
        self.cut = _first(config.frozen_layers, clip.vision.layers, "frozen_layers")
        self.text_first = _first(config.frozen_text_layers, clip.text.layers, "frozen_text_layers")
        upper = range(self.cut, clip.vision.layers + 1), range(self.text_first, clip.text.layers + 1)
        self.image_changes = LayerChanges("image", upper[0], lambda name: True, projection=True)
        self.text_changes = LayerChanges("text", upper[1], lambda name: True, projection=True)
        self.image_changes.learn(self)
        self.text_changes.learn(self)
        self.ranks = self._ranks(generator).to(self.clip.device)

    def _ranks(self, generator: torch.Generator) -> Tensor:
        """Ranks [K] of the classes that a step uses; rank 0 is the nearest."""
        count = len(self.classes)
        nearest = min(math.ceil(self.config.class_share * count), self.config.most_classes)
        decay = torch.exp(-torch.linspace(0, _TAIL_END, count - nearest) / self.config.tail)
        low, high = (float(decay.min()), float(decay.max())) if count - nearest > 1 else (0.0, 1.0)
        selected = torch.rand(count - nearest, generator=generator) < (decay - low) / (high - low)
        return torch.cat([torch.arange(nearest), nearest + selected.nonzero()[:, 0]])

    def images_from_frozen(self, frozen: Frozen) -> Tensor:
        return self.image_changes.images(self, frozen.x, self.cut)

    def texts(self) -> Tensor:
        return self.text_changes.texts(self, self.text_first)

    @torch.no_grad()
    def chosen_classes(self, images: Tensor, labels: Tensor) -> Tensor:
        """Indices [K] of the classes for a step with unit features [B, E] and labels [B], ascending."""
        cosines = images @ self.prompts.frozen.to(images.dtype).T  # [B, C]
        nearness = cosines.scatter(1, labels[:, None], torch.inf).amax(dim=0)  # [C]
        return nearness.argsort(descending=True, stable=True)[self.ranks].sort().values

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        images = self.images_from_frozen(frozen)
        chosen = self.chosen_classes(unit(images.detach()), labels)
        texts = self.text_changes.texts(self, self.text_first, chosen)
        targets = (
            (chosen[None] == labels[:, None]).to(torch.uint8).argmax(dim=1)
        )  # [B], positions in `chosen`
        ce = F.cross_entropy(scores(self.clip, images, texts), targets)
        return Loss(ce, {"ce": ce.detach()})

    @torch.no_grad()
    def finish(self) -> None:
        """Round the learned tensors to half precision, in which they are saved."""
        for parameter in self.parameters():
            parameter.copy_(parameter.half())

    def adapter_state(self) -> dict[str, Tensor]:
        """The learned tensors, in half precision if that is exact, as it is after training."""
        state = super().adapter_state()
        halves = {name: tensor.half() for name, tensor in state.items()}
        exact = all(torch.equal(halves[name].to(tensor.dtype), tensor) for name, tensor in state.items())
        return halves if exact else state

    def merge(self) -> Clip:
        return fold_changes(self, self.image_changes, self.text_changes)
