"""Input and output of a training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from dear.clip.model import Clip


@dataclasses.dataclass(frozen=True)
class Loss:
    """What is minimized, and its named parts (unweighted, for the log)."""

    total: Tensor  #: scalar
    parts: Mapping[str, Tensor]  #: name -> scalar, detached


class Batch(NamedTuple):
    """Normalized pixels [B, 3, S, S], labels [B] and, where the dataset has them, domain numbers [B]."""

    pixels: Tensor
    labels: Tensor
    domains: Tensor | None = None


class FeatureBatch(NamedTuple):
    """A batch whose frozen image features [B, E] are known already, in place of its pixels."""

    features: Tensor
    labels: Tensor
    domains: Tensor | None = None


Batches = Callable[[bool], Iterator[Batch | FeatureBatch]]  #: batches(augment) walks the training set once


def features_of(clip: Clip, batch: Batch | FeatureBatch) -> Tensor:
    """Frozen image features [B, E] of a batch: the known ones, or computed from its pixels."""
    return batch.features if isinstance(batch, FeatureBatch) else clip.encode_image(batch.pixels)


Frozen = tuple[Tensor, ...]  #: what `Method.frozen_stage` returns: tensors [B, ...]
