"""KgCoOp: CoOp kept close to hand-written prompts (Yao, Zhang, Xu, CVPR 2023).

Loss: `CE + lambda L_kg`, where L_kg measures how far the learned text features lie from the frozen features
of the hand-written prompts. The paper writes the squared euclidean distance, the authors' code `1 - cosine`,
which for unit features is half of it; ours is the code's. lambda = 8, context 4, 100 epochs, batch 128, lr
0.002. As in the authors' code the hand-written prompts are the task's template, and the context starts at
"a photo of a".

Departures: last epoch kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.methods.base import Frozen, Loss, Method, distance, scores, unit
from dear.methods.options import Options
from dear.methods.prompts import WORDS, ContextPrompts


@dataclass(frozen=True)
class KgCoOpConfig(Options):
    """Options of KgCoOp."""

    context: int = 4  #: how many context vectors
    words: str = WORDS  #: where they start; empty: random
    weight: float = 8.0  #: lambda, of the distance to the frozen prompts


class KgCoOp(Method):
    """Learned context vectors, regularized by the frozen text features."""

    name: ClassVar[str] = "kgcoop"
    title: ClassVar[str] = "KgCoOp"
    recipe: ClassVar[Mapping[str, Any]] = {"optimizer": "sgd", "lr": 2e-3, "epochs": 100, "batch": 128}
    Config: ClassVar[type] = KgCoOpConfig
    config: KgCoOpConfig

    def build(self, generator: torch.Generator) -> None:
        """One learned tensor: the context [M, D]."""
        self.context = ContextPrompts(self.prompts, self.config.context, self.config.words)
        self.ctx = self.learn(self.context.start(self.clip, generator))

    def texts(self) -> Tensor:
        """Features [C, E] of the prompts with the learned context."""
        return self.context.features(self.clip, {1: self.ctx})

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        """CE + lambda (1 - mean cosine between learned and frozen text features)."""
        return knowledge_loss(self, frozen, labels, self.config.weight)


def knowledge_loss(method: Method, frozen: Frozen, labels: Tensor, weight: float) -> Loss:
    """Cross-entropy + weight x distance of the learned text features to the frozen ones (KgCoOp, eq. 5)."""
    texts = method.texts()
    ce = F.cross_entropy(scores(method.clip, method.images_from_frozen(frozen), texts), labels)
    apart = distance(unit(texts), method.prompts.frozen)
    return Loss(ce + weight * apart, {"ce": ce.detach(), "knowledge": apart.detach()})
