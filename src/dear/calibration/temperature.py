"""Measures of confidence: temperatures and areas under curves."""

from __future__ import annotations

import math

import torch
from scipy.optimize import brentq, minimize_scalar
from torch import Tensor

RANGE = (0.02, 50.0)  #: temperatures that are searched
CAUTION = 1.5  #: standard errors by which a temperature stays nearer to 1 than the best one


def negative_log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log-likelihood of labels [n] under logits [n, C], with labels as sure as n images allow.

    A label counts (n + 1) / (n + 2) and the other classes share the rest (Platt's targets): otherwise the
    best temperature would be 0 whenever every held-out image is answered correctly.
    """
    n, classes = logits.shape
    slack = 1 / (n + 2)
    logs = logits.double().log_softmax(dim=-1)
    correct = logs.gather(1, labels[:, None])[:, 0]  # [n]
    others = (logs.sum(dim=-1) - correct) / max(1, classes - 1)
    return -((1 - slack) * correct + slack * others).mean()


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T with the least negative log-likelihood of labels [n] under logits [n, C] / T.

    The negative log-likelihood is convex in 1 / T, so it has one minimum.
    """

    def loss(inverse: float) -> float:
        return float(negative_log_likelihood(logits.double() * inverse, labels))

    # On a log scale, where a function that is convex in 1 / T also has one minimum.
    low, high = (math.log(1 / end) for end in reversed(RANGE))
    least = minimize_scalar(lambda log: loss(math.exp(log)), bounds=(low, high), options={"xatol": 1e-9})
    return math.exp(-least.x)


def temperature_error(logits: Tensor, labels: Tensor, temperature: float) -> float:
    """Standard error of log T that was fitted on these images (the robust, "sandwich" estimate).

    With scaled logits s = z / T and probabilities p, the gradient of the log-likelihood of an
    image in log T is sum p s - s_y, and its curvature the variance of s under p.
    """
    scaled = logits.double() / temperature
    p = scaled.softmax(dim=-1)
    mean = (p * scaled).sum(dim=-1)
    gradient = mean - scaled.gather(1, labels[:, None])[:, 0]  # [n]
    curvature = float((p * (scaled - mean[:, None]).square()).sum(dim=-1).mean())
    if curvature <= 0:
        return math.inf
    return float(gradient.square().mean().sqrt()) / curvature / math.sqrt(len(labels))


def cautious_temperature(
    logits: Tensor, labels: Tensor, bias: float = 0.0, caution: float = CAUTION
) -> float:
    """The temperature nearest to 1 within `caution` standard errors of the best one, on a log scale.

    Logits [n, C] and labels [n] are those of held-out images. A method that is calibrated already stays as it
    is, unless enough images show otherwise. `bias` is how much higher log T of the methods that answered is
    than that of the method to be calibrated, which learned from more images.

    Where logits say little about the labels, the likelihood is flat around a large T, whose standard error is
    huge, although T = 1 is far less likely. A temperature therefore never is so near to 1 that its likelihood
    is below that of the best one by more than a difference of `2 caution` standard errors would be.
    """
    best = fit_temperature(logits, labels)
    log = math.log(best) - bias
    error = caution * temperature_error(logits, labels, best)
    cautious = math.copysign(max(0.0, abs(log) - error), log)
    highest = negative_log_likelihood(logits / best, labels) + (2 * caution) ** 2 / (2 * len(labels))

    def excess(log_temperature: float) -> float:
        loss = negative_log_likelihood(logits / math.exp(log_temperature + bias), labels)
        return float(loss - highest)

    if excess(cautious) > 0 > excess(log):
        cautious = float(brentq(excess, cautious, log))
    return math.exp(cautious)


def auroc(known: Tensor, unknown: Tensor) -> float:
    """How often a score of `known` [n] is above one of `unknown` [m]; ties count one half.

    >>> auroc(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]))
    0.875
    """
    from sklearn.metrics import roc_auc_score

    truth = torch.cat([torch.ones(len(known)), torch.zeros(len(unknown))])
    return float(roc_auc_score(truth.numpy(), torch.cat([known, unknown]).cpu().numpy()))
