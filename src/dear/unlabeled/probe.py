"""A linear probe on frozen features that learns from unlabeled images as well (method page, section 2f).

With f a unit image feature, m the mean of all features, labeled or not, `z = unit(f - m)` and the centered
text scores `s_c = scale (f - m) t_c`, the logits are `10 z W^T + b + a s`. W, b and the scalar a minimize the
weighted mean cross-entropy plus `ridge |W|^2`, by L-BFGS. The first fit sees labeled images alone. Then, four
times: the probe answers the unlabeled images, the answers propagate along the graph of nearest neighbors (not
where these mostly have other answers), are balanced and sharpened, and the probe is fitted to them and to the
labels. The unlabeled images of a class together weigh at most half as much as its labels, so that the many
images of a frequent class neither outweigh the labels nor change how often the probe answers with each class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dear.errors import InputError
from dear.unlabeled.graph import centered_unit, choose_graph, propagate_labels
from dear.utils.lbfgs import minimize_lbfgs

UNLABELED = -1  #: label of an image without one, as in scikit-learn
ROUNDS = 4
STEPS = 2  #: of propagation in each round
MIN_AGREEMENT = 1 / 3  #: of neighbors with the probe; below it they are mostly of other classes
BALANCE = 0.5  #: exponent of the class means that probabilities are divided by
POWER = 1.5  #: to which probabilities are raised
POOL_SHARE = 0.5  #: weight of the unlabeled images of a class compared with that of its labels, at most
MAX_FITTED = 20_000  #: unlabeled images that one fit reads; the others take part in propagation
_SCALE = 10.0  # of z
_ITERATIONS = 100  # of L-BFGS in the first fit
_REFIT_ITERATIONS = 30  # from the fit before; more changed no accuracy by more than 0.3 points


@dataclass(frozen=True)
class Probe:
    """A fitted probe; `logits` answers features of any images."""

    mean: Tensor  #: m, [E]
    weight: Tensor  #: W, [C, E]
    bias: Tensor  #: b, [C]
    text_weight: float  #: a
    texts: Tensor  #: unit text features times CLIP's scale, [C, E]

    def logits(self, features: Tensor) -> Tensor:
        """Logits [n, C] of unit image features [n, E]."""
        inputs, scores = probe_inputs(features, self.mean, self.texts)
        return F.linear(inputs, self.weight, self.bias) + self.text_weight * scores


@dataclass(frozen=True)
class SemiSupervisedFit:
    """What the loop returns."""

    probe: Probe  #: fitted to labels and unlabeled images
    labeled_only: Probe  #: the first fit
    #: of all images [n, C]: one-hot where labeled, else the targets of the last fit
    probabilities: Tensor
    space: str  #: in which the neighbors were near: "image" or "text"; "" without unlabeled images
    agreement: (
        float  #: of neighbors under the labeled-only probe (`edge_agreement`); 1 without unlabeled images
    )


def default_ridge(classes: int) -> float:
    """The penalty on W, which falls with the number of classes.

    >>> default_ridge(10)
    0.02
    """
    return 0.02 * math.pow(10 / classes, 1.5)


def probe_inputs(features: Tensor, mean: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
    """10 z [n, E] and text scores s [n, C] of unit features [n, E]; `texts` [C, E] include the scale."""
    return _SCALE * centered_unit(features, mean), (features - mean) @ texts.T


def fit_probe(
    features: Tensor,
    targets: Tensor,
    texts: Tensor,
    mean: Tensor,
    ridge: float,
    weights: Tensor | None = None,
    start: Probe | None = None,
) -> Probe:
    """The probe that minimizes the weighted mean cross-entropy plus `ridge |W|^2`.

    Args:
        features: unit image features [n, E].
        targets: probabilities [n, C], one-hot for labels.
        texts: unit text features times CLIP's scale, [C, E]; zeros where the classes have no words.
        mean: m [E].
        ridge: penalty on W.
        weights: of the images [n]; None: all equal.
        start: where the search begins; None: at W = 0, b = 0, a = 1.

    Raises:
        InputError: there is no image.
    """
    if not len(features):
        raise InputError("fit_probe needs at least 1 image, got 0")
    inputs, scores = probe_inputs(features, mean, texts)
    weights = features.new_ones(len(features)) if weights is None else weights
    shares = (weights / weights.sum())[:, None]
    classes, width = targets.shape[1], features.shape[1]
    at_w, at_b = classes * width, classes * (width + 1)

    def unpack(point: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        flat = torch.from_numpy(point).to(features)
        return flat[:at_w].view(classes, width), flat[at_w:at_b], flat[at_b]  # [C, E], [C], []

    def loss(point: np.ndarray) -> tuple[float, np.ndarray]:
        weight, bias, text_weight = unpack(point)
        logs = torch.addmm(bias, inputs, weight.T).add_(scores * text_weight).log_softmax(dim=1)
        value = -(shares * targets * logs).sum() + ridge * weight.square().sum()
        residual = logs.exp_().sub_(targets).mul_(shares)  # [n, C]; targets sum to 1
        gradient = (residual.T @ inputs + 2 * ridge * weight).flatten()
        parts = [gradient, residual.sum(dim=0), (residual * scores).sum()[None]]
        return float(value), torch.cat(parts).double().cpu().numpy()

    point = np.zeros(at_b + 1)
    point[at_b] = 1.0
    if start is not None:
        flat = [start.weight.flatten(), start.bias, start.bias.new_tensor([start.text_weight])]
        point = torch.cat(flat).double().cpu().numpy()
    steps = _ITERATIONS if start is None else _REFIT_ITERATIONS
    with torch.no_grad():
        weight, bias, text_weight = unpack(minimize_lbfgs(loss, point, maxiter=steps, gtol=1e-5, ftol=1e-8))
    return Probe(mean, weight.clone(), bias.clone(), float(text_weight), texts)


def balance_and_sharpen(probabilities: Tensor) -> Tensor:
    """Probabilities [n, C] divided by the root of the class means, raised to `POWER`, renormalized.

    >>> even = torch.tensor([[0.8, 0.2], [0.2, 0.8]])
    >>> (balance_and_sharpen(even)[0] > even[0]).tolist()
    [True, False]
    """
    means = probabilities.mean(dim=0)
    scaled = probabilities / means.clamp(min=1e-6) ** BALANCE
    return F.normalize(scaled.clamp(min=1e-12) ** POWER, p=1.0, dim=1)


def pool_weights(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Weights [n] of unlabeled images with class probabilities [n, C] next to labels of weight 1.

    Args:
        probabilities: each row sums to 1.
        labels: number of labels of each class [C]; a class without one counts as if it had one.

    Example:
        >>> pool_weights(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([2, 4])).tolist()
        [0.5, 0.5, 1.0]
    """
    expected = probabilities.sum(dim=0)  # images of each class
    limit = torch.minimum(POOL_SHARE * labels.to(probabilities).clamp(min=1), expected)
    return probabilities @ (limit / expected.clamp(min=1e-6))


def fit_semi_supervised_probe(
    features: Tensor,
    labels: Tensor,
    texts: Tensor,
) -> SemiSupervisedFit:
    """A probe fitted to labeled and unlabeled images.

    Args:
        features: unit features of all images [n, E].
        labels: int64 [n]; `UNLABELED` (-1) where there is none.
        texts: unit text features times CLIP's scale, [C, E]; zeros where the classes have no words.

    Raises:
        InputError: no image is labeled, or a label is not below the number of classes.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> features = F.normalize(torch.eye(2).repeat(20, 1) + 0.1 * torch.randn(40, 2, generator=generator))
        >>> labels = torch.full((40,), UNLABELED)
        >>> labels[:2] = torch.tensor([0, 1])
        >>> fit = fit_semi_supervised_probe(features, labels, torch.zeros(2, 2))
        >>> fit.probe.logits(torch.eye(2)).argmax(dim=1).tolist()
        [0, 1]
    """
    classes = len(texts)
    check_labels(labels, classes, len(features))
    labeled = labels != UNLABELED
    if not bool(labeled.any()):
        raise InputError("fit_semi_supervised_probe needs at least 1 labeled image, got 0")
    mean = features.mean(dim=0)
    ridge = default_ridge(classes)
    truth = F.one_hot(labels[labeled], classes).to(features)
    first = fit_probe(features[labeled], truth, texts, mean, ridge)
    probabilities = features.new_zeros(len(labels), classes)
    probabilities[labeled] = truth
    pool = (~labeled).nonzero()[:, 0]
    if not len(pool):
        return SemiSupervisedFit(first, first, probabilities, "", 1.0)
    answers = torch.where(labeled, labels, first.logits(features).argmax(dim=1))
    graph, space, agreement = choose_graph(features, mean, texts, answers, labels)
    steps = STEPS if agreement >= MIN_AGREEMENT else 0
    fitted = torch.cat([labeled.nonzero()[:, 0], draw_rows(pool, MAX_FITTED)])
    in_fit = labeled[fitted]
    weights = torch.ones_like(fitted, dtype=features.dtype)
    probe = first
    for _ in range(ROUNDS):
        probabilities[pool] = probe.logits(features[pool]).softmax(dim=1)
        probabilities = propagate_labels(graph, probabilities, labeled, steps)
        probabilities[pool] = balance_and_sharpen(probabilities[pool])
        weights[~in_fit] = pool_weights(probabilities[fitted[~in_fit]], truth.sum(dim=0))
        probe = fit_probe(features[fitted], probabilities[fitted], texts, mean, ridge, weights, start=probe)
    return SemiSupervisedFit(probe, first, probabilities, space, agreement)


def check_labels(labels: Tensor, classes: int, images: int) -> None:
    """Refuse labels [n] that do not fit the features or the classes."""
    if labels.shape != (images,):
        raise InputError(f"labels must have shape [{images}] like the features, got {list(labels.shape)}")
    if images and not UNLABELED <= int(labels.min()) <= int(labels.max()) < classes:
        raise InputError(
            f"labels must be {UNLABELED} (unlabeled) to {classes - 1}, "
            f"got {int(labels.min())} to {int(labels.max())}"
        )


def classes_without_labels(labels: Tensor, classes: Sequence[str]) -> tuple[str, ...]:
    """Names of the classes that no image [n] is labeled with.

    >>> classes_without_labels(torch.tensor([0, -1, 2]), ["ant", "bee", "cat"])
    ('bee',)
    """
    present = set(labels.tolist())
    return tuple(name for label, name in enumerate(classes) if label not in present)


def draw_rows(rows: Tensor, count: int) -> Tensor:
    """At most `count` of the rows [n], at random but always the same, ascending."""
    if len(rows) <= count:
        return rows
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:count]
    return rows[order.sort().values.to(rows.device)]
