"""Agreement with the frozen model: losses that keep an adapted CLIP close to its backbone."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dear.methods.base import Frozen, Loss, Method
from dear.methods.prompts import scores, unit


def distance(adapted: Tensor, frozen: Tensor) -> Tensor:
    """1 - cosine, the mean over rows of unit features [n, E].

    >>> import torch
    >>> float(distance(torch.eye(2), torch.eye(2).flip(0)))
    1.0
    """
    return (1 - (adapted * frozen).sum(-1)).mean()


def knowledge_loss(method: Method, frozen: Frozen, labels: Tensor, weight: float) -> Loss:
    """Cross-entropy + weight x distance of the learned text features to the frozen ones (KgCoOp, eq. 5)."""
    texts = method.texts()
    ce = F.cross_entropy(scores(method.clip, method.images_from_frozen(frozen), texts), labels)
    apart = distance(unit(texts), method.prompts.frozen)
    return Loss(ce + weight * apart, {"ce": ce.detach(), "knowledge": apart.detach()})
