"""What goes into a training step and what comes out of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor


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


Batches = Callable[[bool], Iterator[Batch]]  #: batches(augment) walks the training set once
Frozen = tuple[Tensor, ...]  #: what `Method.frozen_stage` returns: tensors [B, ...]
