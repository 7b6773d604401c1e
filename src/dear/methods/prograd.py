"""ProGrad: CoOp with gradients that do not contradict zero-shot CLIP (Zhu, Niu, Han, Wu, Zhang, ICCV 2023).

Two gradients of the context: G_d of the cross-entropy, G_g of the KL divergence from frozen CLIP's
probabilities. If their angle is at most 90 degrees, the step is G_d; otherwise the component of G_d opposite
to G_g is removed: `G = G_d - lambda (G_d . G_g / |G_g|^2) G_g`.

As in the authors' code the teacher reads the task's template, and the divergence is the cross-entropy against
the teacher's softmax, which has the same gradient. Context 16, batch 32, lr 0.002.

Departures: the context is initialized at random (the authors put the template's words after zeros); 100
epochs for any number of shots, where the authors use 100 for 2 and 4 shots and base-to-novel, and 200 for 8
and 16; lambda is 1 for all datasets (the authors use 0.8 for three of them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.methods.coop import CoOp, CoOpConfig
from dear.methods.frozen import Frozen, Loss
from dear.methods.options import Count, NotNegative, Positive
from dear.methods.tensors import scores


@dataclass(frozen=True)
class ProGradConfig(CoOpConfig):
    context: Count = 16  #: number of context vectors
    words: str = ""  #: initial words of the context; empty: random
    strength: NotNegative = 1.0  #: lambda, fraction of the opposite component that is removed
    temperature: Positive = 1.0  #: T of both distributions in the divergence


@dataclass(frozen=True)
class TwoLosses(Loss):
    """The loss of the task, and the divergence from the frozen model."""

    general: Tensor  #: scalar, with its graph


class ProGrad(CoOp):
    """Learned context vectors with projected gradients."""

    name, title = "prograd", "ProGrad"
    about = "learned words that may not contradict the frozen model"
    recipe = {"optimizer": "sgd", "lr": 2e-3, "epochs": 100, "batch": 32}
    Config = ProGradConfig
    config: ProGradConfig

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> TwoLosses:
        images, temperature = frozen.x, self.config.temperature
        logits = scores(self.clip, images, self.texts())
        teacher = scores(self.clip, images, self.prompts.frozen)
        ce = F.cross_entropy(logits, labels)
        targets = (teacher / temperature).softmax(dim=-1)
        general = temperature**2 * F.cross_entropy(logits / temperature, targets)
        return TwoLosses(ce, {"ce": ce.detach(), "general": general.detach()}, general)

    def backward(self, loss: Loss, scale: Callable[[Tensor], Tensor]) -> None:
        """Gradients of the task without the component opposite to the gradient of the divergence."""
        assert isinstance(loss, TwoLosses)
        learned = [p for p in self.parameters() if p.requires_grad]
        general = torch.autograd.grad(scale(loss.general), learned, retain_graph=True)
        scale(loss.total).backward()
        for p, g in zip(learned, general, strict=True):
            if p.grad is None:
                continue
            direction = F.normalize(g.flatten(), dim=0)  # all values of one tensor
            component = p.grad.flatten() @ direction  # []
            p.grad -= self.config.strength * component.clamp(max=0) * direction.view_as(g)
