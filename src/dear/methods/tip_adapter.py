"""Tip-Adapter and Tip-Adapter-F: a cache of the training images (Zhang et al., ECCV 2022).

Keys are the unit features of the training images, each the mean over several random views; values are their
labels, one-hot. `logits = tau f w^T + alpha exp(-beta (1 - f K^T)) L`. Tip-Adapter learns nothing;
Tip-Adapter-F goes on to train the keys.

Departures: the authors search alpha and beta on validation images per dataset; here each training image is
classified by the keys of the others, and the most accurate pair is used. Their code keeps the epoch of
Tip-Adapter-F that is best on test data; here the last is used. Neither can predict novel classes, which the
cache does not contain. Votes grow with the number of images, so a method trained on a cross-validation fold
would be less confident than one trained on all images, and thresholds fitted on folds would be too low; folds
therefore scale their votes to the `images` per class of the full training set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear.data.folds import IntArray, equal_rows
from dear.methods.base import Method
from dear.methods.focus import FeatureReader, FocusConfig, training_features
from dear.methods.frozen import Batches, Frozen
from dear.methods.options import Count, NotNegative, Positive
from dear.methods.tensors import indicators, scores, unit


@dataclass(frozen=True)
class TipAdapterConfig(FocusConfig):
    #: weight of the cache, 0 is frozen CLIP; None: chosen on the training images
    alpha: NotNegative | None = None
    #: decay of a key's influence with distance; None: chosen on the training images
    beta: NotNegative | None = None
    views: Count = 10  #: random views per image to average; 0: the whole image, without augmentation
    images: Positive | None = None  #: images per class that votes are scaled to; None: the actual number


#: Candidates for alpha, as multiples of CLIP's logit scale, and for beta.
ALPHAS, BETAS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0), (1.0, 2.0, 3.5, 5.5, 8.0, 12.0, 20.0)
#: With several labels per image, the votes for a class are scaled as if it had this many images. Its logits
#: then do not grow with their number, and thresholds fitted on cross-validation folds remain valid.
VOTES = 16.0
ONE_IMAGE = (1.0, 1.0)  #: alpha (as a multiple) and beta if no class has two images, so none can be held out


class TipAdapter(Method):
    """The cache without training."""

    name, title = "tip-adapter", "Tip-Adapter"
    about = "compares with stored training images; nothing is trained, trained classes only"
    quick, holds_out = True, True
    open_classes = False  # the cached labels number the classes
    Config, can_focus, several_labels = TipAdapterConfig, True, True
    options_without_augmentation = {"views": 0}
    config: TipAdapterConfig
    keys: Tensor
    labels: Tensor
    alpha: Tensor  #: as set or chosen, []
    beta: Tensor  #: as set or chosen, []

    def build(self, generator: torch.Generator) -> None:
        """One key [n, W] and one label [n], or row [n, C], per training image; none until `prepare`."""
        self.reader = FeatureReader(self)
        self.register_buffer("keys", self.prompts.frozen.new_zeros(0, self.reader.width))
        shape = (0, len(self.classes)) if self.several else (0,)
        self.register_buffer("labels", torch.zeros(shape, dtype=torch.long, device=self.clip.device))
        for name in ("alpha", "beta"):
            self.register_buffer(name, self.prompts.frozen.new_tensor(getattr(self.config, name) or 0.0))

    def prepare(self, batches: Batches) -> None:
        self.keys = self._fill(batches)

    def _fill(self, batches: Batches) -> Tensor:
        """The keys [n, W]; sets labels, alpha and beta."""
        keys, images, labels, units = training_features(
            self.clip, self.reader, batches, self.config.views, mean=True
        )
        self.labels = labels.long()
        zero_shot = scores(self.clip, images, self.prompts.frozen)
        alpha, beta = choose_votes(keys, self.labels, zero_shot, self.clip.logit_scale, self.config, units)
        self.alpha, self.beta = self.alpha.new_tensor(alpha * self._vote_scale()), self.beta.new_tensor(beta)
        return keys

    def _vote_scale(self) -> float:
        """Factor of alpha: the images per class that votes are scaled to, relative to those of the cache."""
        if self.config.images is None or self.several:  # several labels are scaled by `vote_weights`
            return 1.0
        return self.config.images * len(self.classes) / len(self.labels)

    def learned_values(self) -> dict[str, Any]:
        return {"alpha": float(self.alpha), "beta": float(self.beta)}

    def settled_config(self) -> TipAdapterConfig:
        if not len(self.labels):
            return self.config
        return replace(
            self.config,
            alpha=float(self.alpha) / self._vote_scale(),
            beta=float(self.beta),
            images=self.config.images or len(self.labels) / len(self.classes),
        )

    def state_shapes(self, state: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
        if not {"keys", "labels"} <= set(state):  # `load_adapter_state` reports missing tensors
            return {}
        images = len(state["labels"]) if state["labels"].ndim else 0
        return {"keys": (images, self.keys.shape[1]), "labels": (images, *self.labels.shape[1:])}

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        keys, labels = self.keys, self.labels
        rows = self.reader(frozen)  # [B, W]
        similarity = torch.exp(-self.beta * (1 - rows.to(keys.dtype) @ keys.T))  # [B, n]
        if labels.ndim == 2:
            values = labels * vote_weights(labels)  # [n, C]
        else:  # one-hot, [n, C]
            values = labels[:, None] == torch.arange(len(self.classes), device=labels.device)
        votes = similarity @ values.to(similarity.dtype)  # [B, C]
        zero_shot = scores(self.clip, unit(frozen.x), self.prompts.frozen)
        return {"default": zero_shot + self.alpha * votes}


class TipAdapterF(TipAdapter):
    """The cache with trained keys."""

    name, title = "tip-adapter-f", "Tip-Adapter-F"
    about = "the same with stored features that are trained; trained classes only"
    recipe = {"epochs": 20, "batch": 256, "weight_decay": 1e-2}
    several_labels = False
    keys: nn.Parameter

    def build(self, generator: torch.Generator) -> None:
        super().build(generator)
        del self.keys
        self.keys = self.learn(torch.zeros(0, self.reader.width))

    def prepare(self, batches: Batches) -> None:
        """Fill the cache in place: the optimizer refers to the parameter."""
        self.keys.data = self._fill(batches).to(self.keys.dtype)


def vote_weights(labels: Tensor) -> Tensor:
    """Weight [C] of the votes for each class, of rows [n, C] of several labels."""
    return VOTES / labels.sum(dim=0).clamp(min=1)


@torch.no_grad()
def choose_votes(
    keys: Tensor,
    labels: Tensor,
    zero_shot: Tensor,
    temperature: float,
    config: TipAdapterConfig,
    units: IntArray | None = None,
) -> tuple[float, float]:
    """The alpha and beta with the best leave-one-out accuracy on the training images; ties by likelihood.

    An image and its copies do not vote for it, so its class loses votes; the other votes for its class are
    scaled up to compensate. Images that are the only one of their class are ignored.

    Args:
        keys: of the training images, [n, W].
        labels: [n], or rows [n, C] of several labels, for which mean average precision replaces accuracy.
        zero_shot: CLIP's logits of these images, [n, C].
        temperature: CLIP's logit scale, the unit of alpha.
        config: values of alpha and beta that are not None are kept.
        units: [n], copies of an image have the same; None: images with equal keys are copies.
    """
    alphas = tuple(temperature * share for share in ALPHAS) if config.alpha is None else (config.alpha,)
    betas = BETAS if config.beta is None else (config.beta,)
    if len(alphas) == len(betas) == 1:
        return alphas[0], betas[0]
    truth = indicators(labels, zero_shot.shape[1]).to(keys.dtype)  # [n, C]
    counts, several = truth.sum(dim=0), labels.ndim == 2  # [C]
    numbers = torch.from_numpy(equal_rows(keys) if units is None else units).to(keys.device)
    copies = numbers[:, None] == numbers  # [n, n]
    others = counts - copies.to(truth.dtype) @ truth  # images of each class that are no copies of one, [n, C]
    rows = torch.arange(len(labels)) if several else ((others * truth).amax(dim=1) > 0).nonzero()[:, 0]
    if not len(rows):
        alpha, beta = temperature * ONE_IMAGE[0], ONE_IMAGE[1]
        return alpha if config.alpha is None else config.alpha, beta if config.beta is None else config.beta
    scale = counts / others[rows].clamp(min=1)  # [rows, C]
    scale = scale * vote_weights(labels) if several else scale
    cosines = keys[rows] @ keys.T
    best = None
    for beta in betas:
        similarity = torch.exp(-beta * (1 - cosines))  # [rows, n]
        similarity[copies[rows]] = 0
        votes = similarity @ truth * scale  # [rows, C]
        for alpha in alphas:
            logits = zero_shot[rows] + alpha * votes
            if several:
                rank = (mean_precision(logits, truth), -alpha)
            else:
                correct = int((logits.argmax(dim=1) == labels[rows]).sum())
                rank = (correct, -float(F.cross_entropy(logits, labels[rows])))
            if best is None or rank > best[0]:
                best = (rank, alpha, beta)
    assert best is not None
    return best[1], best[2]


def mean_precision(scores: Tensor, truth: Tensor) -> float:
    """Mean over classes of the average precision of scores [n, C] for rows [n, C] of labels.

    Classes that all images have, or none, are ignored.
    """
    valid = (truth > 0).any(dim=0) & (truth <= 0).any(dim=0)  # [C]
    order = scores[:, valid].argsort(dim=0, descending=True)
    hits = truth[:, valid].gather(0, order)  # [n, valid classes]
    places = torch.arange(1, len(hits) + 1, device=hits.device)[:, None]
    return float((hits * hits.cumsum(dim=0) / places).sum(dim=0).div(hits.sum(dim=0)).mean())
