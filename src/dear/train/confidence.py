"""Measures of confidence: temperatures, areas under curves, intervals of shares."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

RANGE = (0.02, 50.0)  #: temperatures that are searched
CAUTION = 1.5  #: standard errors by which a temperature stays nearer to 1 than the best one


def negative_log_likelihood(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean negative log-likelihood of labels [n] under logits [n, C], with labels as sure as n images allow.

    A label counts (n + 1) / (n + 2) and the other classes share the rest (Platt's targets): otherwise the
    best temperature would be 0 whenever every held-out image is answered rightly.
    """
    n, classes = logits.shape
    slack = 1 / (n + 2)
    logs = logits.double().log_softmax(dim=-1)
    own = logs.gather(1, labels[:, None])[:, 0]
    others = (logs.sum(dim=-1) - own) / max(1, classes - 1)
    each = -((1 - slack) * own + slack * others)
    return each.mean() if weights is None else (each * weights).sum() / weights.sum()


def smallest(function: Callable[[float], float], low: float, high: float, steps: int = 60) -> float:
    """Where a function with one valley is smallest, by golden-section search.

    >>> round(smallest(lambda x: (x - 2) ** 2, -10, 10), 6)
    2.0
    """
    ratio = (5**0.5 - 1) / 2
    a, b = low, high
    c, d = b - ratio * (b - a), a + ratio * (b - a)
    at_c, at_d = function(c), function(d)
    for _ in range(steps):
        if at_c <= at_d:
            b, d, at_d = d, c, at_c
            c = b - ratio * (b - a)
            at_c = function(c)
        else:
            a, c, at_c = c, d, at_d
            d = a + ratio * (b - a)
            at_d = function(d)
    return (a + b) / 2


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T with the least negative log-likelihood of labels [n] under logits [n, C] / T.

    The likelihood is convex in 1 / T, so it has one valley.
    """

    def at(inverse: float) -> float:
        return float(negative_log_likelihood(logits.double() * inverse, labels))

    # In two rounds: a grid of powers finds the valley, the search its floor.
    low, high = 1 / RANGE[1], 1 / RANGE[0]
    grid = [low * (high / low) ** (i / 40) for i in range(41)]
    best = min(range(41), key=lambda i: at(grid[i]))
    return 1 / smallest(at, grid[max(0, best - 1)], grid[min(40, best + 1)])


def temperature_error(logits: Tensor, labels: Tensor, temperature: float) -> float:
    """Standard error of log T that was fitted on so many images (the robust, "sandwich" estimate).

    With scaled logits s = z / T and probabilities p, an image pulls at log T by s_y - sum p s, and the
    likelihood is curved by the variance of s under p.
    """
    scaled = logits.double() / temperature
    p = scaled.softmax(dim=-1)
    mean = (p * scaled).sum(dim=-1)
    pull = scaled.gather(1, labels[:, None])[:, 0] - mean
    curve = float((p * (scaled - mean[:, None]).square()).sum(dim=-1).mean())
    return math.inf if curve <= 0 else float(pull.square().mean().sqrt()) / curve / math.sqrt(len(labels))


def cautious_temperature(
    logits: Tensor, labels: Tensor, errors: float = CAUTION, too_high: float = 0.0
) -> float:
    """The temperature nearest to 1 within so many standard errors of the best one, on a log scale.

    It is 1 where the best one does not raise the likelihood by more than a standard error. A method that is
    calibrated already is thus left alone, unless enough images say otherwise.

    Args:
        logits: of held-out images, [n, C].
        labels: [n].
        errors: how many standard errors.
        too_high: how much larger log T of the methods that answered is than that of the one to be calibrated;
            it counts above 1 alone.
    """
    best = fit_temperature(logits, labels)
    before, after = (
        z.double().log_softmax(dim=-1).gather(1, labels[:, None])[:, 0] for z in (logits, logits / best)
    )
    gain = after - before
    if len(gain) < 2 or float(gain.mean()) <= float(gain.std()) / math.sqrt(len(gain)):
        return 1.0
    spread = errors * temperature_error(logits, labels, best) + (too_high if best > 1 else 0.0)
    return math.exp(math.copysign(max(0.0, abs(math.log(best)) - spread), math.log(best)))


def fit_bias(logits: Tensor, new: Tensor, labels: Tensor, span: float = 50.0) -> float:
    """The summand of new classes' logits with the least balanced negative log-likelihood.

    Args:
        logits: of trained and new classes in one list, each on its own scale already, [n, C].
        new: which columns are new classes, [C].
        labels: [n]; images of trained and of new classes count equally much together.
        span: the summand lies between -span and span.
    """
    of_new = new[labels]
    share = torch.where(of_new, 0.5 / of_new.sum().clamp(min=1), 0.5 / (~of_new).sum().clamp(min=1)).double()

    def at(bias: float) -> float:
        return float(negative_log_likelihood(logits.double() + bias * new.double(), labels, share))

    return smallest(at, -span, span)


def auroc(known: Tensor, unknown: Tensor) -> float:
    """How often a score of `known` [n] is above one of `unknown` [m]; ties count one half.

    >>> auroc(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]))
    0.875
    """
    ordered, _ = unknown.double().sort()
    values = known.double().contiguous()
    below = torch.searchsorted(ordered, values, right=False).double()
    up_to = torch.searchsorted(ordered, values, right=True).double()
    return float((below + up_to).mean() / 2 / len(unknown))


def share_interval(hits: int, n: int, sure: float = 0.9) -> tuple[float, float]:
    """Clopper and Pearson's interval of a share of which `hits` of `n` were seen.

    >>> tuple(round(end, 3) for end in share_interval(0, 10))
    (0.0, 0.259)
    """
    edge = (1 - sure) / 2
    low = 0.0 if hits == 0 else _share_with(hits - 1, n, 1 - edge)
    high = 1.0 if hits == n else _share_with(hits, n, edge)
    return low, high


def _share_with(hits: int, n: int, chance: float) -> float:
    """The true share of which so many hits of n, or fewer, are seen with a given chance."""
    logs = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(hits + 1)]

    def at_most(p: float) -> float:
        yes, no = math.log(p), math.log1p(-p)
        return sum(math.exp(log + k * yes + (n - k) * no) for k, log in enumerate(logs))

    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if at_most(middle) > chance else (low, middle)
    return (low + high) / 2
