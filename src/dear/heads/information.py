"""Does a role map say anything? What heads say about concepts, compared with heads rotated at random.

The information of a map is what knowing the head says about the concept of a phrase: the entropy of the
concepts of all phrases together less the mean Concept Entropy of the heads, in bits. It is 0 where all heads
have the same concepts. Few phrases per head make it larger than 0 even for heads that mean nothing, so it is
compared with that of the same heads after a random rotation of the joint space of images and texts.

Stability (`dear.heads.stability`) cannot take its place: any fixed subspace has a nearest concept, so on many
images rotated heads keep their roles nearly as often as real ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from dear.heads.moments import Moments
from dear.heads.rules import concept_entropy, concept_shares

ROTATIONS = 8
CLEAR = 3.0  #: standard deviations of the rotated heads by which the information must exceed their mean

Concepts = Iterable[Sequence[str]]  #: the concept of each phrase, head by head


def head_information(concepts: Concepts) -> float:
    """Mutual information in bits of head and concept, each phrase counted once per head that has it.

    Heads without phrases do not count.

    >>> head_information([["Color", "Color"], ["Shape", "Shape"]])
    1.0
    >>> head_information([["Color", "Shape"], ["Shape", "Color"]])
    0.0
    """
    heads = [list(head) for head in concepts if head]
    if not heads:
        return 0.0
    together: dict[str, float] = {}
    for head in heads:
        for concept, share in concept_shares(head).items():
            together[concept] = together.get(concept, 0.0) + share / len(heads)
    each = statistics.fmean(concept_entropy(concept_shares(head)) for head in heads)
    return max(0.0, concept_entropy(together) - each)


@dataclass(frozen=True)
class Information:
    """Information of a role map, and of maps of the same heads rotated at random."""

    bits: float
    rotated: tuple[float, ...]

    @property
    def clear(self) -> bool:
        """Whether the heads say more than rotated heads do.

        >>> Information(1.65, (1.11, 1.21, 1.30)).clear, Information(0.40, (0.37, 0.40, 0.41)).clear
        (True, False)
        """
        return self.bits > statistics.fmean(self.rotated) + CLEAR * statistics.stdev(self.rotated)

    def evidence(self) -> dict[str, float | int]:
        """Plain values for `roles.json`."""
        return {
            "bits": round(self.bits, 4),
            "rotated": round(statistics.fmean(self.rotated), 4),
            "deviation": round(statistics.stdev(self.rotated), 4),
            "rotations": len(self.rotated),
        }


def rotated_moments(moments: Moments, seed: int) -> Moments:
    """The same heads with all contributions turned by one random rotation of the joint space.

    How a head's variance is spread over directions stays; which directions they are is chance.
    """
    width = moments.maps.shape[-1]
    noise = torch.randn(width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rotation = torch.linalg.qr(noise).Q.to(moments.maps)
    result = Moments(moments.maps @ rotation, moments.layers)
    result.take(moments.tensors(), moments.count)
    return result


def measure_information(
    moments: Moments, find: Callable[[Moments], Concepts], rotations: int = ROTATIONS
) -> Information:
    """The information of a role map.

    Args:
        moments: of the heads, over images or over the directions of their input.
        find: the concepts of the phrases that some moments lead to, head by head.
        rotations: how often heads are rotated, at least 2.
    """
    rotated = (head_information(find(rotated_moments(moments, seed))) for seed in range(rotations))
    return Information(head_information(find(moments)), tuple(rotated))
