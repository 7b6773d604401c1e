"""Retrieval by heads: nearest images in the contributions of the heads of one attribute.

The contributions of the heads are concatenated and centered over the gallery; neighbors are nearest by cosine
(method page, section 4). Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.model import Clip
from dear.heads.collect import HeadContributions
from dear.heads.contributions import head_maps
from dear.heads.focus import attribute_heads, centered_unit
from dear.heads.names import Head
from dear.heads.roles import RoleMap

SAME = 0.99999  #: cosine of whole features from which on an image is the query itself
ALIKE = 0.75  #: share of common results from which on two attributes retrieve the same images


def head_space(
    images: HeadContributions, heads: Iterable[Head], center: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Unit rows [n, heads · E] of centered contributions, and the center (their mean by default)."""
    return centered_unit(torch.cat([images.contribution([key]) for key in heads], dim=1), center)


class HeadIndex:
    """A gallery in the spaces of a role map's attributes, in small form: heads · d values per image.

    A contribution is `o M` with o [d] and M [d, E]. The rows of `o R^T`, with `M^T = Q R`, have the same
    cosines and d values instead of E. `features` [n, E] are those of the gallery, `outputs` [n, L, H, d] of
    the map's layers (`head_outputs`); `spaces` are the attributes that have heads.
    """

    def __init__(self, clip: Clip, roles: RoleMap, features: Tensor, outputs: Tensor) -> None:
        self.spaces = attribute_heads(roles)
        self._layers = tuple(roles.layers)
        maps = head_maps(clip, self._layers).float().cpu()
        self._maps = torch.linalg.qr(maps.transpose(-1, -2), mode="r").R  # [L, H, d', d]
        self._features = F.normalize(features, dim=1)
        self._centers, self._rows = {}, {}
        for name in self.spaces:
            self._rows[name], self._centers[name] = centered_unit(self._space(name, outputs))

    def similarities(self, name: str, feature: Tensor, outputs: Tensor) -> Tensor:
        """Cosines [n] with a query's feature [E] and outputs [L, H, d]; -2 for the query itself."""
        query = centered_unit(self._space(name, outputs[None]), self._centers[name])[0][0]
        same = self._features @ F.normalize(feature, dim=0) > SAME
        return (self._rows[name] @ query).masked_fill(same, -2.0)

    def _space(self, name: str, outputs: Tensor) -> Tensor:
        parts = []
        for layer, head in self.spaces[name]:
            row = self._layers.index(layer)
            parts.append(outputs[:, row, head] @ self._maps[row, head].T)
        return torch.cat(parts, dim=1)


def precision_at(space: Tensor, values: Tensor, top: int = 8) -> float:
    """Mean share of the `top` nearest images, without the query, that have the query's value.

    >>> space = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    >>> precision_at(space, torch.tensor([0, 0, 1, 1]), top=1)
    1.0
    """
    near = space @ space.T
    near.fill_diagonal_(-2.0)
    nearest = near.topk(min(top, len(space) - 1), dim=1).indices
    return float((values[nearest] == values[:, None]).double().mean())


def mean_overlap(results: Mapping[str, Iterable[int]]) -> float:
    """Mean share of images that two attributes' lists have in common; 0 for fewer than two lists.

    >>> mean_overlap({"Color": [1, 2, 3, 4], "Shape": [1, 2, 9, 8]})
    0.5
    """
    pairs = list(combinations(map(set, results.values()), 2))
    if not pairs:
        return 0.0
    return sum(len(a & b) / max(1, min(len(a), len(b))) for a, b in pairs) / len(pairs)
