"""Reference images that are most alike an image in the heads that decide its answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.data.duplicates import Prints, matching_pairs, read_prints
from dear.data.folds import IntArray
from dear.data.images import ImageSet
from dear.heads.contributions import head_maps
from dear.heads.names import Head
from dear.tasks.explain.explanation import Neighbor
from dear.tasks.explain.parts import Trace
from dear.tasks.explain.scores import ScoreParts

COUNT = 6


class Neighbors:
    """Finds reference images by what the heads of a group add to the feature."""

    def __init__(self, scores: ScoreParts) -> None:
        self.scores = scores

    def copies_of(self, images: ImageSet) -> list[set[int]]:
        """For each image the indices of the reference images that are the image itself or a copy of it."""
        copies: list[set[int]] = [set() for _ in range(len(images))]
        if self.scores.reference is not None:
            (rows, prints), (others, other_prints) = read_prints(images), self._reference_prints
            for first, second, _ in matching_pairs(prints, other_prints):
                for i, j in zip(rows[first].tolist(), others[second].tolist(), strict=True):
                    copies[i].add(j)
        return copies

    def find(self, trace: Trace, parts: Tensor, copies: Sequence[set[int]]) -> list[tuple[Neighbor, ...]]:
        """Reference images most alike in the heads of the group that decides, for parts [2, B, L, H].

        `copies` are the indices of the reference images that each image is not compared with.
        """
        reference = self.scores.reference
        if reference is None:
            return []
        states, groups, result = trace.head_states()[0], self.scores.groups.named, []
        queries = states[min(states)].float()
        for b in range(len(queries)):
            lead = parts[0, b] - parts[1, b]
            best = max(groups, key=lambda g: float(sum(lead[layer - 1, h] for layer, h in groups[g])))
            near, query = (self._space(rows, groups[best]) for rows in (reference.states, queries[b : b + 1]))
            center = near.mean(0)
            alike = F.normalize(near - center, dim=-1) @ F.normalize(query - center, dim=-1).T  # [n, 1]
            order = alike[:, 0].argsort(descending=True).tolist()
            nearest = [row for row in order if row not in copies[b]][:COUNT]
            result.append(tuple(Neighbor(reference.images, row) for row in nearest))
        return result

    @cached_property
    def _reference_prints(self) -> tuple[IntArray, Prints]:
        """Indices of the reference images and what their copies are recognized by."""
        assert self.scores.reference is not None
        return read_prints(self.scores.reference.images)

    @cached_property
    def _maps(self) -> Tensor:
        clip = self.scores.method.clip
        return head_maps(clip, range(1, clip.config.vision.layers + 1)).float().cpu()

    def _space(self, states: Tensor, heads: Sequence[Head]) -> Tensor:
        """What heads add to the feature, side by side, [n, heads x E]."""
        terms = [states[:, layer - 1, h] @ self._maps[layer - 1, h] for layer, h in heads]
        return torch.cat(terms, dim=-1)
