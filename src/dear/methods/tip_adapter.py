"""Tip-Adapter and Tip-Adapter-F: a cache of the training images (Zhang et al., ECCV 2022).

Keys are the unit features of the training images, each the mean over several random views; values are their
labels, one-hot. `logits = tau f w^T + alpha exp(-beta (1 - f K^T)) L`. Tip-Adapter learns nothing;
Tip-Adapter-F goes on to train the keys.

Departures: the authors search alpha and beta on validation images per dataset; here each training image is
classified by the keys of the others, and the pair with the most right answers is used. Their code keeps
Tip-Adapter-F's best epoch on test data, where ours keeps the last. The cache has no novel classes, so both
refuse to name any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear.methods.base import Method
from dear.methods.focus import FeatureReader, FocusConfig, training_features
from dear.methods.frozen import Batches, Frozen
from dear.methods.options import Count, NotNegative
from dear.methods.tensors import indicators, scores, unit


@dataclass(frozen=True)
class TipAdapterConfig(FocusConfig):
    #: weight of the cache, 0 is frozen CLIP; none: chosen on the training images
    alpha: NotNegative | None = None
    #: how fast a key's influence falls with distance; none: chosen on the training images
    beta: NotNegative | None = None
    views: Count = 10  #: random views per image whose features are averaged; 0: the whole image once


#: What is tried: alpha, as a multiple of CLIP's temperature, and beta.
ALPHAS, BETAS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0), (1.0, 2.0, 3.5, 5.5, 8.0, 12.0, 20.0)
#: Of several labels: a class votes as if it had this many images. Its logits then do not grow with their
#: number, so that thresholds found on parts of the images hold for all.
VOTES = 16.0
ONE_IMAGE = (1.0, 1.0)  #: the same where no class has a second image, from which one could choose


class TipAdapter(Method):
    """The cache as it is: nothing is learned."""

    name, title = "tip-adapter", "Tip-Adapter"
    about = "compares with stored training images; nothing is trained, trained classes only"
    quick = True
    open_classes = False  # the cached labels number the classes
    Config, can_focus, several_labels = TipAdapterConfig, True, True
    own_view_options = {"views": 0}
    config: TipAdapterConfig
    keys: Tensor
    labels: Tensor
    alpha: Tensor  #: as it was chosen, []
    beta: Tensor  #: as it was chosen, []

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
        keys, images, labels = training_features(
            self.clip, self.reader, batches, self.config.views, mean=True
        )
        self.labels = labels.long()
        zero_shot = scores(self.clip, images, self.prompts.frozen)
        alpha, beta = choose_votes(keys, self.labels, zero_shot, self.clip.logit_scale, self.config)
        self.alpha, self.beta = self.alpha.new_tensor(alpha), self.beta.new_tensor(beta)
        return keys

    def facts(self) -> dict[str, Any]:
        return {"alpha": float(self.alpha), "beta": float(self.beta)}

    def settled_config(self) -> TipAdapterConfig:
        if not len(self.labels):
            return self.config
        return replace(self.config, alpha=float(self.alpha), beta=float(self.beta))

    def state_shapes(self, state: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
        if not {"keys", "labels"} <= set(state):  # loading says what is missing
            return {}
        images = len(state["labels"]) if state["labels"].ndim else 0
        return {"keys": (images, self.keys.shape[1]), "labels": (images, *self.labels.shape[1:])}

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        keys, labels = self.keys, self.labels
        read = self.reader(frozen)
        near = torch.exp(-self.beta * (1 - read.to(keys.dtype) @ keys.T))  # [B, n]
        values = labels * vote_weights(labels) if labels.ndim == 2 else labels
        if labels.ndim == 1:
            values = labels[:, None] == torch.arange(
                len(self.classes), device=labels.device
            )  # one-hot, [n, C]
        votes = near @ values.to(near.dtype)  # [B, C]
        zero_shot = scores(self.clip, unit(frozen.x), self.prompts.frozen)
        return {"default": zero_shot + self.alpha * votes}


class TipAdapterF(TipAdapter):
    """The cache with keys that are trained on."""

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
    keys: Tensor, labels: Tensor, zero_shot: Tensor, temperature: float, config: TipAdapterConfig
) -> tuple[float, float]:
    """The alpha and beta with which keys classify most of the other training images; ties by likelihood.

    An image does not vote for itself. Its class then has one vote less than the others, so that those that
    remain count more. An image without another one of its class is not counted.

    Args:
        keys: of the training images, [n, W].
        labels: [n], or rows [n, C] of several labels, whose pair has the best mean average precision.
        zero_shot: CLIP's logits of these images, [n, C].
        temperature: CLIP's, the unit of alpha.
        config: what is not None there is used as it is.
    """
    alphas = tuple(temperature * share for share in ALPHAS) if config.alpha is None else (config.alpha,)
    betas = BETAS if config.beta is None else (config.beta,)
    if len(alphas) == len(betas) == 1:
        return alphas[0], betas[0]
    truth = indicators(labels, zero_shot.shape[1]).to(keys.dtype)  # [n, C]
    counts, several = truth.sum(dim=0), labels.ndim == 2  # [C]
    rows = torch.arange(len(labels)) if several else (counts[labels] > 1).nonzero()[:, 0]
    if not len(rows):
        alpha, beta = temperature * ONE_IMAGE[0], ONE_IMAGE[1]
        return alpha if config.alpha is None else config.alpha, beta if config.beta is None else config.beta
    scale = counts / (counts - truth[rows]).clamp(min=1)  # [rows, C]
    scale = scale * vote_weights(labels) if several else scale
    cosines = keys[rows] @ keys.T
    best = None
    for beta in betas:
        near = torch.exp(-beta * (1 - cosines))
        near[torch.arange(len(rows), device=rows.device), rows] = 0
        votes = near @ truth * scale
        for alpha in alphas:
            logits = zero_shot[rows] + alpha * votes
            if several:
                rank = (mean_precision(logits, truth), -alpha)
            else:
                right = int((logits.argmax(dim=1) == labels[rows]).sum())
                rank = (right, -float(F.cross_entropy(logits, labels[rows])))
            if best is None or rank > best[0]:
                best = (rank, alpha, beta)
    assert best is not None
    return best[1], best[2]


def mean_precision(scores: Tensor, truth: Tensor) -> float:
    """Mean over classes of the average precision of scores [n, C] for rows [n, C] of labels.

    Classes that all images have, or none, are left out.
    """
    known = (truth > 0).any(dim=0) & (truth <= 0).any(dim=0)
    order = scores[:, known].argsort(dim=0, descending=True)
    hits = truth[:, known].gather(0, order)  # [n, C]
    places = torch.arange(1, len(hits) + 1, device=hits.device)[:, None]
    return float((hits * hits.cumsum(dim=0) / places).sum(dim=0).div(hits.sum(dim=0)).mean())
