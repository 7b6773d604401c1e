"""SkipTuning: the upper half of both towers, trained on features of the lower (Wu et al., CVPR 2025).

Layers 1 to 6 of 12 stay frozen and run once per view; layers 7 to 12 of both towers, their final norms and
projections are trained with cross-entropy, without prompts or adapters. At a step only some classes take
part: those nearest to the batch's images (by cosine with the frozen text features, the true classes first),
half of all and at most 50, and behind them every rank with a probability that falls exponentially.

Departures: what is learned is the difference to the backbone, so that weight decay pulls toward CLIP rather
than toward zero (5e-4 times a rate of 2e-5: 1e-8 per step). When training ends, the differences are rounded
to half precision, and saved so. Which later ranks take part is drawn once from the method's seed; the
authors draw once at the first step.
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

_TAIL_END = 5.0  # the exponential is read from 0 to here over the later ranks


@dataclass(frozen=True)
class SkipTuningConfig(Options):
    frozen_layers: int | None = None  #: of the image tower; None: half of them
    frozen_text_layers: int | None = None  #: of the text tower; None: half of them
    #: share of the classes that surely take part at a step
    class_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    most_classes: AtLeastOne = 50  #: and their largest number
    tail: Positive = 0.3  #: scale of the exponential by which later ranks take part


def _first(number: int | None, layers: int, option: str) -> int:
    """The first trained layer."""
    frozen = layers // 2 if number is None else number
    if not 0 <= frozen < layers:
        raise UsageError(f"{option} must be from 0 to {layers - 1} (the tower has {layers}), got {frozen}")
    return frozen + 1


class SkipTuning(Method):
    """The upper layers of both towers, trained."""

    name, title = "skip-tuning", "SkipTuning"
    about = "the upper half of both towers, trained in full; many parameters"
    cut: int = 1  # `build` sets the layer
    recipe = {
        "optimizer": "sgd", "lr": 2e-5, "epochs": 20, "batch": 4, "warmup_lr": 1e-6, "precision": "float32",
    }  # fmt: skip
    Config = SkipTuningConfig
    config: SkipTuningConfig

    def build(self, generator: torch.Generator) -> None:
        """Additions to the upper layers, all zero, and the ranks of classes that take part in a step."""
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
        """Ranks [K] of classes, nearest first, that take part in a step."""
        count = len(self.classes)
        sure = min(math.ceil(self.config.class_share * count), self.config.most_classes)
        falling = torch.exp(-torch.linspace(0, _TAIL_END, count - sure) / self.config.tail)
        low, high = (float(falling.min()), float(falling.max())) if count - sure > 1 else (0.0, 1.0)
        selected = torch.rand(count - sure, generator=generator) < (falling - low) / (high - low)
        return torch.cat([torch.arange(sure), sure + selected.nonzero()[:, 0]])

    def images_from_frozen(self, frozen: Frozen) -> Tensor:
        return self.image_changes.images(self, frozen.x, self.cut)

    def texts(self) -> Tensor:
        return self.text_changes.texts(self, self.text_first)

    @torch.no_grad()
    def chosen_classes(self, images: Tensor, labels: Tensor) -> Tensor:
        """The classes [K] that take part in the step of unit features [B, E] with labels [B], ascending."""
        near = images @ self.prompts.frozen.to(images.dtype).T  # [B, C]
        near = near.scatter(1, labels[:, None], torch.inf).amax(dim=0)  # [C]
        return near.argsort(descending=True, stable=True)[self.ranks].sort().values

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        images = self.images_from_frozen(frozen)
        chosen = self.chosen_classes(unit(images.detach()), labels)
        texts = self.text_changes.texts(self, self.text_first, chosen)
        among = (chosen[None] == labels[:, None]).to(torch.uint8).argmax(dim=1)  # [B]
        ce = F.cross_entropy(scores(self.clip, images, texts), among)
        return Loss(ce, {"ce": ce.detach()})

    @torch.no_grad()
    def finish(self) -> None:
        """Round what was learned to half precision, in which it is saved."""
        for parameter in self.parameters():
            parameter.copy_(parameter.half())

    def adapter_state(self) -> dict[str, Tensor]:
        """What was learned; in half precision where that loses nothing, as after training."""
        state = super().adapter_state()
        halves = {name: tensor.half() for name, tensor in state.items()}
        exact = all(torch.equal(halves[name].to(tensor.dtype), tensor) for name, tensor in state.items())
        return halves if exact else state

    def merge(self) -> Clip:
        return fold_changes(self, self.image_changes, self.text_changes)
