"""Training on frozen image features that are known beforehand: no step runs the image tower."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dear.errors import UsageError
from dear.methods.batch import FeatureBatch
from dear.train.feed import Feed
from dear.train.frozen import StepInputs


class FeatureTable:
    """The frozen image features of a training set, handed out in the order of a feed's steps.

    Args:
        features: [n, E], one row per image of the feed, of CLIP's own view of it.
        feed: says which images belong to a step.

    Raises:
        UsageError: another number of rows than images, or a recipe that asks for random views.
    """

    def __init__(self, features: Tensor, feed: Feed) -> None:
        if len(features) != len(feed.images):
            raise UsageError(f"{len(features)} features for {len(feed.images)} images")
        if feed.recipe.augment:
            raise UsageError("features can be known beforehand only with augment = False in the recipe")
        self.features, self.feed = features.to(feed.device), feed

    def at(self, step: int) -> StepInputs:
        """The inputs of a training step (from 0)."""
        rows = torch.tensor(self.feed.indices(step), device=self.features.device)
        domains = None if self.feed.domains is None else self.feed.domains[rows]
        return StepInputs((self.features[rows],), self.feed.labels[rows], domains)

    def walk(self, augment: bool = False) -> Iterator[FeatureBatch]:
        """Walk the set once in its own order: what `Method.prepare` is given."""
        for rows in torch.arange(len(self.features), device=self.features.device).split(256):
            domains = None if self.feed.domains is None else self.feed.domains[rows]
            yield FeatureBatch(self.features[rows], self.feed.labels[rows], domains)
