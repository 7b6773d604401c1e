"""KgCoOp: CoOp regularized toward hand-written prompts (Yao, Zhang, Xu, CVPR 2023).

Loss: `CE + lambda L_kg`, where L_kg is the distance of the learned text features from the frozen features of
the hand-written prompts. The paper uses the squared Euclidean distance, the authors' code `1 - cosine`, which
for unit features is half of it; this follows the code. lambda = 8, context 4, 100 epochs, batch 128, lr
0.002. As in the authors' code the hand-written prompts are the task's template, and the context is
initialized to "a photo of a".

Departures: the last epoch is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from dear.methods.base import Method
from dear.methods.coop import CoOp, CoOpConfig
from dear.methods.frozen import Frozen, Loss
from dear.methods.options import NotNegative
from dear.methods.tensors import distance, scores, unit


@dataclass(frozen=True)
class KgCoOpConfig(CoOpConfig):
    weight: NotNegative = 8.0  #: lambda, weight of the distance to the frozen prompts


class KgCoOp(CoOp):
    """Learned context vectors, regularized by the frozen text features."""

    name, title = "kgcoop", "KgCoOp"
    about = "learned words kept close to the frozen prompts"
    recipe = {"optimizer": "sgd", "lr": 2e-3, "epochs": 100, "batch": 128}
    Config = KgCoOpConfig
    config: KgCoOpConfig

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        return knowledge_loss(self, frozen, labels, self.config.weight)


def knowledge_loss(method: Method, frozen: Frozen, labels: Tensor, weight: float) -> Loss:
    """Cross-entropy + weight x distance of the learned text features from the frozen ones (KgCoOp, eq. 5)."""
    texts = method.texts()
    ce = F.cross_entropy(scores(method.clip, method.images_from_frozen(frozen), texts), labels)
    knowledge = distance(unit(texts), method.prompts.frozen)
    return Loss(ce + weight * knowledge, {"ce": ce.detach(), "knowledge": knowledge.detach()})
