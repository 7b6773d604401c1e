"""Concept Entropy: how widely a head's phrases spread over the concepts (eq. 2-4)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping


def concept_shares(concepts: Iterable[str]) -> dict[str, float]:
    """Share of a head's phrases in each concept, largest first, ties by first appearance (eq. 3).

    Args:
        concepts: the concept of each phrase of the head.

    >>> concept_shares(["Color", "Color", "Shape", "Color"])
    {'Color': 0.75, 'Shape': 0.25}
    """
    counts = Counter(concepts)
    total = sum(counts.values())
    ordered = sorted(counts.items(), key=lambda item: -item[1])  # stable: ties stay in order
    return {concept: count / total for concept, count in ordered}


def concept_entropy(shares: Mapping[str, float]) -> float:
    """Entropy of a head's shares in bits: 0 when all phrases lie in one concept (eq. 4).

    >>> concept_entropy({"Color": 1.0})
    0.0
    >>> concept_entropy({"Color": 0.25, "Shape": 0.25, "Object": 0.25, "Text": 0.25})
    2.0
    """
    return sum(-share * math.log2(share) for share in shares.values() if share > 0) + 0.0
