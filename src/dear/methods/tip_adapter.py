"""Tip-Adapter and Tip-Adapter-F: a cache of the training images (Zhang et al., ECCV 2022).

Keys are the unit features of the training images, each the mean over several random views; values are their
labels, one-hot. `logits = tau f w^T + alpha exp(-beta (1 - f K^T)) L`. Tip-Adapter learns nothing;
Tip-Adapter-F goes on to train the keys.

Departures: alpha = 1 and beta = 5.5 are fixed; the authors search both per dataset, and their code
keeps Tip-Adapter-F's best epoch on test data, where ours keeps the last. The cache holds no novel classes, so
both refuse to name any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dear.methods.base import Batches, Frozen, Method, scores
from dear.methods.focus import FeatureReader, FocusConfig, training_features
from dear.methods.options import Count


@dataclass(frozen=True)
class TipAdapterConfig(FocusConfig):
    """Options of both Tip-Adapters."""

    alpha: float = 1.0  #: weight of the cache; 0 is frozen CLIP
    beta: float = 5.5  #: how fast a key's influence falls with distance
    views: Count = 10  #: random views per image whose features are averaged; 0: the whole image once


def vote(method: TipAdapter | TipAdapterF, features: Tensor) -> dict[str, Tensor]:
    """CLIP's logits plus the cache's vote, [B, C], for frozen image features [B, E]."""
    config, keys, labels = method.config, method.keys, method.labels
    read = method.reader(features)
    near = torch.exp(-config.beta * (1 - read.to(keys.dtype) @ keys.T))  # [B, N]
    values = labels[:, None] == torch.arange(len(method.classes), device=labels.device)  # one-hot, [N, C]
    votes = near @ values.to(near.dtype)  # [B, C]
    zero_shot = scores(method.clip, method.reader.image(features), method.prompts.frozen)
    return {"default": zero_shot + config.alpha * votes}


def cache_shapes(state: Mapping[str, Tensor], width: int) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a saved cache: one key and one label per training image."""
    if not {"keys", "labels"} <= set(state):  # loading says what is missing
        return {}
    images = state["labels"].numel()
    return {"keys": (images, width), "labels": (images,)}


class TipAdapter(Method):
    """The cache as it is: nothing is learned."""

    name: ClassVar[str] = "tip-adapter"
    title: ClassVar[str] = "Tip-Adapter"
    open_classes = False  # the cached labels number the classes
    Config: ClassVar[type] = TipAdapterConfig
    config: TipAdapterConfig
    keys: Tensor
    labels: Tensor

    def build(self, generator: torch.Generator) -> None:
        """Buffers for the cache, empty until `prepare`."""
        self.reader = FeatureReader(self.clip, self.config)
        self.register_buffer("keys", self.prompts.frozen.new_zeros(0, self.reader.width))
        self.register_buffer("labels", torch.zeros(0, dtype=torch.long, device=self.clip.device))

    def prepare(self, batches: Batches) -> None:
        """Fill the cache."""
        found = training_features(self.clip, self.reader, batches, self.config.views, mean=True)
        self.keys, _, self.labels = found

    def state_shapes(self, state: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
        """As many keys as there were training images."""
        return cache_shapes(state, self.keys.shape[1])

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        """Logits [B, C]."""
        return vote(self, frozen[0])


class TipAdapterF(Method):
    """The cache with keys that are trained on."""

    name: ClassVar[str] = "tip-adapter-f"
    title: ClassVar[str] = "Tip-Adapter-F"
    open_classes = False  # the cached labels number the classes
    recipe: ClassVar[Mapping[str, Any]] = {"epochs": 20, "batch": 256, "weight_decay": 1e-2}
    Config: ClassVar[type] = TipAdapterConfig
    config: TipAdapterConfig
    labels: Tensor

    def build(self, generator: torch.Generator) -> None:
        """Learned keys and a buffer for the labels, empty until `prepare`."""
        self.reader = FeatureReader(self.clip, self.config)
        self.keys = self.learn(torch.zeros(0, self.reader.width))
        self.register_buffer("labels", torch.zeros(0, dtype=torch.long, device=self.clip.device))

    def prepare(self, batches: Batches) -> None:
        """Fill the cache; the parameter stays the same object, for the optimizer holds it."""
        found = training_features(self.clip, self.reader, batches, self.config.views, mean=True)
        keys, _, self.labels = found
        self.keys.data = keys.to(self.keys.dtype)

    def state_shapes(self, state: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
        """As many keys as there were training images."""
        return cache_shapes(state, self.keys.shape[1])

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        """Logits [B, C]."""
        return vote(self, frozen[0])
