"""Information of a role map about concepts, compared with that of randomly rotated heads.

The information of a map is the mutual information of head and concept over phrases: the entropy of the
concepts of all phrases together less the mean Concept Entropy of the heads, in bits. It is 0 where all heads
have the same concepts. Few phrases per head make it larger than 0 even for heads that mean nothing, so it is
compared with that of the same heads after a random rotation of the joint space of images and texts.

Stability (`dear.heads.stability`) cannot take its place: any fixed subspace has a nearest concept, so on many
images rotated heads keep their roles nearly as often as real ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

import torch

from dear.heads.moments import Moments
from dear.heads.role import Information
from dear.heads.rules import concept_entropy, concept_shares

ROTATIONS = 8

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
    pooled: dict[str, float] = {}
    for head in heads:
        for concept, share in concept_shares(head).items():
            pooled[concept] = pooled.get(concept, 0.0) + share / len(heads)
    mean_entropy = statistics.fmean(concept_entropy(concept_shares(head)) for head in heads)
    return max(0.0, concept_entropy(pooled) - mean_entropy)


def rotated_moments(moments: Moments, seed: int) -> Moments:
    """The same heads with all contributions rotated by one random rotation of the joint space.

    A head's variance along its directions stays as it is; the directions are random.
    """
    width = moments.maps.shape[-1]
    noise = torch.randn(width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rotation = torch.linalg.qr(noise).Q.to(moments.maps)
    result = Moments(moments.maps @ rotation, moments.layers)
    result.restore(moments.tensors(), moments.count)
    return result


def measure_information(
    concepts: Concepts, moments: Moments, find: Callable[[Moments], Concepts], rotations: int = ROTATIONS
) -> Information:
    """The information of a role map.

    Args:
        concepts: the concepts of the map's phrases, head by head.
        moments: of the heads, over images or over the directions of their input.
        find: the concepts of the phrases that some moments lead to, head by head.
        rotations: how often heads are rotated, at least 2.
    """
    bits = head_information(concepts)
    rotated = [head_information(find(rotated_moments(moments, seed))) for seed in range(rotations)]
    mean, deviation = statistics.fmean(rotated), statistics.stdev(rotated)
    return Information(round(bits, 4), round(mean, 4), round(deviation, 4), rotations)
