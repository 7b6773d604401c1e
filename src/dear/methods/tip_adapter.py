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

import torch
from torch import Tensor, nn

from dear.methods.base import Batches, Frozen, Method, scores
from dear.methods.focus import FeatureReader, FocusConfig, training_features
from dear.methods.options import Count, NotNegative


@dataclass(frozen=True)
class TipAdapterConfig(FocusConfig):
    alpha: NotNegative = 1.0  #: weight of the cache; 0 is frozen CLIP
    beta: NotNegative = 5.5  #: how fast a key's influence falls with distance
    views: Count = 10  #: random views per image whose features are averaged; 0: the whole image once


class TipAdapter(Method):
    """The cache as it is: nothing is learned."""

    name, title = "tip-adapter", "Tip-Adapter"
    about = "compares with stored training images; nothing is trained, trained classes only"
    open_classes = False  # the cached labels number the classes
    Config, can_focus = TipAdapterConfig, True
    own_view_options = {"views": 0}
    config: TipAdapterConfig
    keys: Tensor
    labels: Tensor

    def build(self, generator: torch.Generator) -> None:
        """One key [n, W] and one label [n] per training image; none until `prepare`."""
        self.reader = FeatureReader(self.clip, self.config)
        self.register_buffer("keys", self.prompts.frozen.new_zeros(0, self.reader.width))
        self.register_buffer("labels", torch.zeros(0, dtype=torch.long, device=self.clip.device))

    def prepare(self, batches: Batches) -> None:
        found = training_features(self.clip, self.reader, batches, self.config.views, mean=True)
        self.keys, _, self.labels = found

    def state_shapes(self, state: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
        if not {"keys", "labels"} <= set(state):  # loading says what is missing
            return {}
        images = state["labels"].numel()
        return {"keys": (images, self.keys.shape[1]), "labels": (images,)}

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        config, keys, labels = self.config, self.keys, self.labels
        read = self.reader(frozen[0])
        near = torch.exp(-config.beta * (1 - read.to(keys.dtype) @ keys.T))  # [B, n]
        values = labels[:, None] == torch.arange(len(self.classes), device=labels.device)  # one-hot, [n, C]
        votes = near @ values.to(near.dtype)  # [B, C]
        zero_shot = scores(self.clip, self.reader.image(frozen[0]), self.prompts.frozen)
        return {"default": zero_shot + config.alpha * votes}


class TipAdapterF(TipAdapter):
    """The cache with keys that are trained on."""

    name, title = "tip-adapter-f", "Tip-Adapter-F"
    about = "the same with stored features that are trained; trained classes only"
    recipe = {"epochs": 20, "batch": 256, "weight_decay": 1e-2}
    keys: nn.Parameter

    def build(self, generator: torch.Generator) -> None:
        super().build(generator)
        del self.keys
        self.keys = self.learn(torch.zeros(0, self.reader.width))

    def prepare(self, batches: Batches) -> None:
        """Fill the cache; the parameter stays the same object, for the optimizer holds it."""
        found = training_features(self.clip, self.reader, batches, self.config.views, mean=True)
        keys, _, self.labels = found
        self.keys.data = keys.to(self.keys.dtype)
