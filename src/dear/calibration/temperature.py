"""Measures of confidence: temperatures and areas under curves."""

from __future__ import annotations

import math

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

RANGE = (0.02, 50.0)  #: temperatures that are searched
CAUTION = 1.5  #: standard errors by which a temperature stays nearer to 1 than the best one


def negative_log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log-likelihood of labels [n] under logits [n, C], with labels as sure as n images allow.

    A label counts (n + 1) / (n + 2) and the other classes share the rest (Platt's targets): otherwise the
    best temperature would be 0 whenever every held-out image is answered rightly.
    """
    n, classes = logits.shape
    slack = 1 / (n + 2)
    logs = logits.double().log_softmax(dim=-1)
    own = logs.gather(1, labels[:, None])[:, 0]
    others = (logs.sum(dim=-1) - own) / max(1, classes - 1)
    return -((1 - slack) * own + slack * others).mean()


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T with the least negative log-likelihood of labels [n] under logits [n, C] / T.

    The likelihood is convex in 1 / T, so it has one valley.
    """

    def at(inverse: float) -> float:
        return float(negative_log_likelihood(logits.double() * inverse, labels))

    # On a log scale: a likelihood that is convex in 1 / T has one valley there, too.
    low, high = (math.log(1 / end) for end in reversed(RANGE))
    found = minimize_scalar(lambda log: at(math.exp(log)), bounds=(low, high), options={"xatol": 1e-9})
    return math.exp(-found.x)


def temperature_error(logits: Tensor, labels: Tensor, temperature: float) -> float:
    """Standard error of log T that was fitted on these images (the robust, "sandwich" estimate).

    With scaled logits s = z / T and probabilities p, an image pulls at log T by s_y - sum p s, and the
    likelihood is curved by the variance of s under p.
    """
    scaled = logits.double() / temperature
    p = scaled.softmax(dim=-1)
    mean = (p * scaled).sum(dim=-1)
    pull = scaled.gather(1, labels[:, None])[:, 0] - mean
    curve = float((p * (scaled - mean[:, None]).square()).sum(dim=-1).mean())
    return math.inf if curve <= 0 else float(pull.square().mean().sqrt()) / curve / math.sqrt(len(labels))


def cautious_temperature(logits: Tensor, labels: Tensor, too_high: float = 0.0) -> float:
    """The temperature nearest to 1 within `CAUTION` standard errors of the best one, on a log scale.

    It is 1 where the best one does not raise the likelihood by more than a standard error. A method that is
    calibrated already is thus left alone, unless enough images say otherwise. `too_high` is how much larger
    log T of the methods that answered is than that of the one to be calibrated; it counts above 1 alone.
    """
    best = fit_temperature(logits, labels)
    before, after = (
        z.double().log_softmax(dim=-1).gather(1, labels[:, None])[:, 0] for z in (logits, logits / best)
    )
    gain = after - before
    if len(gain) < 2 or float(gain.mean()) <= float(gain.std()) / math.sqrt(len(gain)):
        return 1.0
    spread = CAUTION * temperature_error(logits, labels, best) + (too_high if best > 1 else 0.0)
    return math.exp(math.copysign(max(0.0, abs(math.log(best)) - spread), math.log(best)))


def auroc(known: Tensor, unknown: Tensor) -> float:
    """How often a score of `known` [n] is above one of `unknown` [m]; ties count one half.

    >>> auroc(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]))
    0.875
    """
    ranked = unknown.sort().values
    below, up_to = (torch.searchsorted(ranked, known.contiguous(), right=right) for right in (False, True))
    return float((below + up_to).double().mean()) / (2 * len(ranked))
