"""Answers without the heads of a role, and without a concept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from dear.heads.concept_words import known_concepts, readable_words, value_features
from dear.shortcuts.removal import span_basis
from dear.tasks.explain.explanation import Counterfactual, label_or_not
from dear.tasks.explain.parts import Trace
from dear.tasks.explain.scores import ScoreParts


class Counterfactuals:
    """Computes what a model answers without the heads of a role, and without a concept.

    What the heads add to the feature is replaced by its mean over the reference images. Without a concept,
    the span of its words in the feature is replaced as well.
    """

    def __init__(self, scores: ScoreParts) -> None:
        self.scores = scores

    @cached_property
    def concepts(self) -> dict[str, tuple[tuple[str, ...], Tensor, Tensor]]:
        """Per concept the words that the backbone reads, their features [K, E], and their span [E, E]."""
        clip = self.scores.model.clip
        concepts: dict[str, tuple[tuple[str, ...], Tensor, Tensor]] = {}
        if not self.scores.groups.by_role:  # a map that names no heads names no concepts either
            return concepts
        for name, concept in known_concepts().items():
            if clip.tokenizer is not None and len(readable_words(clip, concept.words)) > 1:
                words, features = value_features(clip, concept)
                basis = span_basis(features)
                concepts[name] = (words, features, (basis.T @ basis).float())
        return concepts

    def answers(
        self, trace: Trace, pairs: Tensor, logits: Tensor
    ) -> tuple[list[list[Counterfactual]], list[list[Counterfactual]]]:
        """Answers without the heads of each group, and without each concept: [..][B]."""
        reference = self.scores.reference
        if reference is None:
            return [], []
        groups = [
            self._counterfactuals(name, trace.without(heads, reference.means), pairs, logits, len(heads))
            for name, heads in self.scores.groups.named.items()
        ]
        concepts = []
        features = trace.features() - reference.center  # [B, E]
        for name, (words, texts, span) in self.concepts.items():
            heads = () if self.scores.role_map is None else self.scores.role_map.select(concept=name)
            affine = torch.eye(len(span)) - span, reference.center @ span
            new = trace.without(heads, reference.means, affine)
            nearest = (features @ (texts - texts.mean(0)).T).argmax(-1).tolist()
            values = [words[place] for place in nearest]
            share = float(span.trace()) / len(span)
            concepts.append(self._counterfactuals(name, new, pairs, logits, len(heads), share, values))
        return groups, concepts

    def _counterfactuals(
        self,
        name: str,
        new: Tensor,
        pairs: Tensor,
        logits: Tensor,
        heads: int,
        share: float = 0.0,
        values: Sequence[str] | None = None,
    ) -> list[Counterfactual]:
        """What new logits change; `share` of the feature's directions was removed for them."""
        new = new.float().cpu()
        before, after = self._margins(logits.float(), pairs), self._margins(new, pairs)
        best = self.scores.model.calibrator.probabilities(new).max(-1)
        answers = [self.scores.model.classes[place] for place in best.indices.tolist()]
        values_of = best.values
        if self.scores.several:
            names = [self.scores.model.classes[label] for label in pairs[:, 0].tolist()]
            has_label = (after >= 0).tolist()
            answers = [label_or_not(label, has) for label, has in zip(names, has_label, strict=True)]
            values_of = new.gather(1, pairs)[:, 0].sigmoid()
        return [
            Counterfactual(
                name,
                float(before[b] - after[b]),
                float(before[b] * (1 - share) - after[b]),
                answers[b],
                float(values_of[b]),
                "" if values is None else values[b],
                heads,
            )
            for b in range(len(new))
        ]

    def _margins(self, logits: Tensor, pairs: Tensor) -> Tensor:
        """The lead [B] of each class over the other one, or of each label over its threshold."""
        first = logits.gather(1, pairs[:, :1])[:, 0]
        other = (
            self.scores.limits[pairs[:, 0]] if self.scores.several else logits.gather(1, pairs[:, 1:])[:, 0]
        )
        return first - other.to(first)
