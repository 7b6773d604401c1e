"""Reference images that are most alike an image in the heads that decide its answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

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

    def find(self, trace: Trace, parts: Tensor) -> list[tuple[Neighbor, ...]]:
        """Reference images most alike in the heads of the group that decides, for parts [2, B, L, H]."""
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
            order = alike[:, 0].argsort(descending=True)[:COUNT].tolist()
            result.append(tuple(Neighbor(reference.images, place) for place in order))
        return result

    @cached_property
    def _maps(self) -> Tensor:
        clip = self.scores.method.clip
        return head_maps(clip, range(1, clip.config.vision.layers + 1)).float().cpu()

    def _space(self, states: Tensor, heads: Sequence[Head]) -> Tensor:
        """What heads add to the feature, side by side, [n, heads x E]."""
        terms = [states[:, layer - 1, h] @ self._maps[layer - 1, h] for layer, h in heads]
        return torch.cat(terms, dim=-1)
