"""Concepts: groups of phrases with a readable name, and which group a phrase belongs to.

The paper's way is `cluster_concepts`: HDBSCAN over the sentence embeddings of all picked phrases. HDBSCAN
finds many small, pure groups (German cities, kinds of dogs) rather than twelve; each gets the name of a
concept, and groups of one name count as one concept. `fixed_concepts` names the concepts beforehand, and
`tagged_concepts` uses the tags of the corpus.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dear.errors import RoleError
from dear.heads.names import PROTOTYPES
from dear.heads.sentences import Embedder, Floats, unit

_SMALLEST = 3  # phrases of a cluster


@dataclass(frozen=True)
class Cluster:
    """One group of phrases: its concept's name, its center and how many phrases made it."""

    concept: str
    centroid: tuple[float, ...]
    size: int


@dataclass(frozen=True)
class Concepts:
    """A grouping of phrases into concepts."""

    concept_of: Mapping[str, str]  #: by phrase (eq. 2)
    clusters: tuple[Cluster, ...] = ()  #: the groups behind the names; empty for tags
    way: str = "clusters"  #: "clusters", "fixed" or "tags"
    #: share of phrases that HDBSCAN did not cluster; they are assigned to the nearest centroid
    noise: float = 0.0
    #: how well the concepts fit the corpus' tags, where it has tags
    agreement: Mapping[str, float] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Concepts that have phrases, the largest first."""
        counts = Counter(self.concept_of.values())
        return tuple(sorted(counts, key=lambda name: (-counts[name], name)))

    def summary(self) -> dict[str, Any]:
        """The concepts as plain values for `roles.json`."""
        counts = Counter(self.concept_of.values())
        groups = Counter(cluster.concept for cluster in self.clusters)
        return {
            "way": self.way,
            "phrases": len(self.concept_of),
            "clusters": len(self.clusters),
            "noise": round(self.noise, 4),
            "agreement": {name: round(value, 4) for name, value in self.agreement.items()},
            "concepts": {name: {"phrases": counts[name], "clusters": groups[name]} for name in self.names},
        }


def cluster_concepts(
    phrases: Sequence[str], embed: Embedder, tags: Mapping[str, str] | None = None
) -> Concepts:
    """Concepts as HDBSCAN finds them.

    Leaf clusters of at least three phrases: over picked phrases the alternative (excess of mass, larger
    clusters) mostly ends in two clusters, one of which holds nearly everything. A cluster is named by the
    majority of its phrases' tags, or, without tags, by the nearest of the twelve concepts' prototypes.
    """
    from sklearn.cluster import HDBSCAN

    if len(phrases) <= _SMALLEST:
        raise RoleError(f"{len(phrases)} phrases are too few to cluster; use 'fixed' or 'tags' concepts")
    vectors = embed(phrases)  # [n, d], unit: euclidean distance is monotone in cosine
    search = HDBSCAN(_SMALLEST, min_samples=1, cluster_selection_method="leaf", copy=True)
    labels: NDArray[np.int64] = search.fit(vectors).labels_
    if labels.max() < 0:
        raise RoleError(
            f"HDBSCAN finds no cluster in {len(phrases)} phrases; set concepts to 'fixed' or 'tags'"
        )
    members = [np.flatnonzero(labels == label) for label in range(labels.max() + 1)]
    centroids = unit(np.stack([vectors[rows].mean(axis=0) for rows in members]))
    names = _names(
        [[phrases[row] for row in rows.tolist()] for rows in members], centroids, embed, tags or {}
    )
    # eq. 2; noise is assigned to the nearest centroid as well
    nearest = (vectors @ centroids.T).argmax(axis=1)
    concept_of = {phrase: names[cluster] for phrase, cluster in zip(phrases, nearest, strict=True)}
    clusters = _clusters(names, centroids, [len(rows) for rows in members])
    agreement = tag_agreement(concept_of, dict(zip(phrases, nearest.tolist(), strict=True)), tags or {})
    return Concepts(concept_of, clusters, "clusters", float((labels < 0).mean()), agreement)


def check_prototypes(prototypes: Mapping[str, Sequence[str]]) -> None:
    """Refuse concepts without a sentence."""
    if not prototypes:
        raise RoleError("concepts must name at least one concept with its sentences, got none")
    for name, sentences in prototypes.items():
        if not sentences:
            raise RoleError(f"concepts: {name!r} must have at least one sentence, got none")


def fixed_concepts(
    phrases: Sequence[str],
    embed: Embedder,
    prototypes: Mapping[str, Sequence[str]] = PROTOTYPES,
    tags: Mapping[str, str] | None = None,
) -> Concepts:
    """Fixed concepts, each described by a few sentences; a phrase is assigned to the nearest (eq. 2)."""
    check_prototypes(prototypes)
    names, centroids = tuple(prototypes), _prototypes(prototypes, embed)
    nearest = (embed(phrases) @ centroids.T).argmax(axis=1)
    concept_of = {phrase: names[index] for phrase, index in zip(phrases, nearest, strict=True)}
    clusters = _clusters(names, centroids, [len(prototypes[name]) for name in names])
    return Concepts(concept_of, clusters, "fixed", 0.0, tag_agreement(concept_of, concept_of, tags or {}))


def _prototypes(sentences: Mapping[str, Sequence[str]], embed: Embedder) -> Floats:
    """The center of each concept's sentences, [K, d]."""
    return unit(np.stack([embed(list(texts)).mean(axis=0) for texts in sentences.values()]))


def _clusters(names: Sequence[str], centroids: Floats, sizes: Sequence[int]) -> tuple[Cluster, ...]:
    rows = zip(names, np.round(centroids, 6).tolist(), sizes, strict=True)
    return tuple(Cluster(name, tuple(center), size) for name, center, size in rows)


def tagged_concepts(phrases: Sequence[str], tags: Mapping[str, str]) -> Concepts:
    """The concepts the phrases were written for."""
    untagged = next((phrase for phrase in phrases if phrase not in tags), None)
    if untagged is not None:
        raise RoleError(
            f"concepts='tags' needs a concept for every phrase of the corpus; {untagged!r} has none"
        )
    return Concepts({phrase: tags[phrase] for phrase in phrases}, way="tags")


def tag_agreement(
    concept_of: Mapping[str, str], cluster_of: Mapping[str, int | str], tags: Mapping[str, str]
) -> dict[str, float]:
    """How well discovered concepts and written tags agree, over the phrases that have tags.

    `same_name`: share of phrases whose concept is their tag. `purity`: share of phrases that have the
    commonest tag of their cluster. `adjusted_rand` and `mutual_information` (normalized) compare named
    concepts with tags; `cluster_mutual_information` the clusters before naming.
    """
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    tagged = [phrase for phrase in concept_of if phrase in tags]
    if not tagged:
        return {}
    truth = [tags[phrase] for phrase in tagged]
    concepts = [concept_of[phrase] for phrase in tagged]
    clusters = [str(cluster_of[phrase]) for phrase in tagged]
    tags_in_cluster: dict[str, Counter[str]] = {}
    for cluster, tag in zip(clusters, truth, strict=True):
        tags_in_cluster.setdefault(cluster, Counter())[tag] += 1
    pure = sum(counts.most_common(1)[0][1] for counts in tags_in_cluster.values())
    return {
        "same_name": sum(a == b for a, b in zip(truth, concepts, strict=True)) / len(tagged),
        "purity": pure / len(tagged),
        "adjusted_rand": float(adjusted_rand_score(truth, concepts)),
        "mutual_information": float(normalized_mutual_info_score(truth, concepts)),
        "cluster_mutual_information": float(normalized_mutual_info_score(truth, clusters)),
    }


def _names(
    groups: Sequence[Sequence[str]], centroids: Floats, embed: Embedder, tags: Mapping[str, str]
) -> list[str]:
    """A concept's name for each cluster: its commonest tag, else the nearest of the twelve concepts."""
    concepts = tuple(PROTOTYPES)
    nearest = (centroids @ _prototypes(PROTOTYPES, embed).T).argmax(axis=1)
    names = []
    for group, index in zip(groups, nearest, strict=True):
        counts = Counter(tags[phrase] for phrase in group if phrase in tags)
        best = min(counts, key=lambda tag: (-counts[tag], tag), default=None)
        names.append(best or concepts[index])
    return names
