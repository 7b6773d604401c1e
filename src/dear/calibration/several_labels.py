"""Several labels per image: the probability of each class, and the threshold above which it is assigned.

Logits z of a class c become the probability `sigmoid(z / T + b_c)`: one temperature for all classes, fitted
with the biases by the likelihood of held-out images, whose labels count as surely as their number allows
(Platt's targets). The threshold of a class is that with the best F1 on the same images; a class with fewer
than two held-out images has 1/2.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dear.utils.lbfgs import minimize_lbfgs

_LEAST_IMAGES = 2  # of a class, to choose its threshold


def fit_sigmoids(logits: Tensor, targets: Tensor) -> tuple[float, Tensor]:
    """The temperature and the biases [C] of logits [n, C] of held-out images with labels bool [n, C].

    >>> logits = torch.tensor([[2.0], [1.0], [-1.0], [-2.0]] * 10)
    >>> temperature, biases = fit_sigmoids(logits, logits > 0)
    >>> bool((logits / temperature + biases).sigmoid()[0, 0] > 0.9)
    True
    """
    z = logits.double().cpu()
    spread = z.std().clamp(min=1e-6)
    z = (z - z.mean(dim=0)) / spread
    truth = targets.double().cpu()
    positive = truth.sum(dim=0)
    certain = (positive + 1) / (positive + 2), 1 / (len(truth) - positive + 2)
    truth = torch.where(truth > 0, certain[0], certain[1])

    def loss(point: np.ndarray) -> tuple[float, np.ndarray]:
        slope = math.exp(point[0])
        scaled = z * slope + torch.from_numpy(point[1:])
        error = (scaled.sigmoid() - truth) / truth.numel()  # gradient of the mean to the scaled logits
        gradient = torch.cat([(error * z).sum()[None] * slope, error.sum(dim=0)])
        return float(F.binary_cross_entropy_with_logits(scaled, truth)), gradient.numpy()

    shares = positive.add(0.5) / (len(truth) + 1)
    start = torch.cat([torch.zeros(1), (shares / (1 - shares)).log()]).double().numpy()
    bounds = [(math.log(1e-3), math.log(1e3)), *[(-30.0, 30.0)] * len(positive)]
    solution = torch.from_numpy(minimize_lbfgs(loss, start, bounds))
    inverse = solution[0].exp() / spread
    return float(1 / inverse), solution[1:] - logits.double().cpu().mean(dim=0) * inverse


def best_thresholds(probabilities: Tensor, targets: Tensor) -> Tensor:
    """The threshold [C] of each class with the best F1, midway between two probabilities [n, C].

    >>> best_thresholds(torch.tensor([[0.9], [0.7], [0.3], [0.1]]), torch.tensor([[1], [1], [0], [0]]).bool())
    tensor([0.5000])
    """
    thresholds = []
    for column, truth in zip(probabilities.T, targets.T, strict=True):
        if int(truth.sum()) < _LEAST_IMAGES:
            thresholds.append(0.5)
            continue
        order = column.argsort(descending=True)
        values = column[order]
        hits = truth[order].double().cumsum(dim=0)
        f1 = 2 * hits / (torch.arange(1, len(order) + 1) + truth.sum())
        f1[:-1][values[:-1] == values[1:]] = -1  # equal probabilities are on one side
        best = int(f1.argmax())
        below = values[best + 1] if best + 1 < len(values) else values.new_zeros(())
        thresholds.append(float(values[best] + below) / 2)
    return torch.tensor(thresholds)
