"""Stability of a role map: a bootstrap over blocks of images.

While images are read, their moments are also summed in a few blocks. A replicate draws as many blocks with
replacement, adds their moments up, and goes through TEXTSPAN, concepts and the rule again; no image is read a
second time. The share of heads that keep kind and concept is compared with chance.
"""

from __future__ import annotations

import operator
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from dear.heads.moments import Moments
from dear.heads.names import Head
from dear.heads.role import Role
from dear.heads.roles import RoleMap

BLOCKS = 10
REPLICATES = 10
STEADY = 0.7  #: share of heads above which a map counts as steady
ENOUGH_IMAGES = 1000  #: images from which on roles are usually steady

Table = Mapping[Head, Role]


class BlockMoments(Moments):
    """Moments that are also summed in `BLOCKS` blocks, to which images are dealt in turn."""

    def __init__(self, maps: Tensor, layers: Sequence[int]) -> None:
        super().__init__(maps, layers)
        self.blocks = [Moments(maps, layers) for _ in range(BLOCKS)]

    def add(self, outputs: Tensor) -> None:
        """Add the outputs [B, L, H, d] of a batch."""
        block_of = (torch.arange(len(outputs), device=outputs.device) + self.count) % BLOCKS
        super().add(outputs)
        for number, block in enumerate(self.blocks):
            members = outputs[block_of == number]
            if len(members):
                block.add(members)

    def tensors(self) -> dict[str, Tensor]:
        """Everything but the counts, by name."""
        tensors = super().tensors()
        blocks = [block.tensors() for block in self.blocks]
        stacked = {f"block_{name}": torch.stack([block[name] for block in blocks]) for name in tensors}
        return tensors | stacked

    def restore(self, tensors: Mapping[str, Tensor], count: int) -> bool:
        """Continue from tensors of `count` images; False, and nothing is changed, if they do not fit."""
        present = self.tensors()
        if any(name not in tensors or tensors[name].shape != present[name].shape for name in present):
            return False
        for number, block in enumerate(self.blocks):
            rows = {name: tensors[f"block_{name}"][number] for name in ("total", "square")}
            block.restore(rows, len(range(number, count, BLOCKS)))
        return super().restore(tensors, count)

    def replicate(self, seed: int) -> Moments:
        """Moments of as many blocks drawn with replacement."""
        return reduce(operator.add, random.Random(seed).choices(self.blocks, k=BLOCKS))


@dataclass(frozen=True)
class Stability:
    """Agreement of a role map with the maps of bootstrap samples."""

    share: float  #: mean share of heads that keep their kind and concept
    chance: float  #: share that would agree if each map dealt its roles to heads at random
    replicates: int  #: how many maps were compared
    heads: Mapping[Head, float]  #: the share per head
    over: str = "images"  #: what was drawn again: "images" or "phrases"

    def evidence(self) -> dict[str, float | str]:
        """Plain values for `roles.json`."""
        numbers = {"share": round(self.share, 4), "chance": round(self.chance, 4)}
        return {**numbers, "replicates": self.replicates, "over": self.over}


def measure_stability(roles: Table, others: Iterable[Table]) -> Stability:
    """Compare a role map with others of the same heads.

    >>> first = {(1, 0): Role("mixed"), (1, 1): Role("core", "Color")}
    >>> second = {(1, 0): Role("mixed"), (1, 1): Role("core", "Shape")}
    >>> measure_stability(first, [first, second]).share
    0.75
    """
    hits: Counter[Head] = Counter()
    chance, count = 0.0, 0
    counts = Counter(_kind_and_concept(role) for role in roles.values())
    for table in others:
        count += 1
        hits.update(
            key for key, role in roles.items() if _kind_and_concept(table[key]) == _kind_and_concept(role)
        )
        other = Counter(_kind_and_concept(role) for role in table.values())
        chance += sum(counts[name] * other[name] for name in counts) / len(roles) ** 2
    heads = {key: hits[key] / max(count, 1) for key in roles}
    share = sum(heads.values()) / len(heads)
    return Stability(share, chance / max(count, 1), count, heads)


def bootstrap(
    moments: BlockMoments, find: Callable[[Moments], Table], roles: Table, replicates: int = REPLICATES
) -> Stability | None:
    """The stability of `roles`, which `find` made from `moments`; None with too few images for blocks."""
    if replicates < 1 or moments.count < 2 * BLOCKS:
        return None
    return measure_stability(roles, (find(moments.replicate(seed)) for seed in range(replicates)))


def role_map_warnings(roles: RoleMap) -> list[str]:
    """Warnings about a role map, for its user."""
    warnings = []
    counts = roles.counts()
    if not counts["generalization"] and not counts["other"]:
        warnings.append(
            "no head is of the kind generalization or other, so every head reads attribute tokens; "
            "training works without such heads"
        )
    if not counts["core"]:
        warnings.append("no head is of the kind core, so only mixed heads read attribute tokens")
    if caveat := roles.caveat():
        warnings.append(caveat)
    stability, images = roles.evidence.get("stability"), roles.evidence.get("image_count")
    more = ""
    if isinstance(images, int) and images < ENOUGH_IMAGES:
        more = f"; it is based on {images} images, {ENOUGH_IMAGES} or more varied ones are better"
    if isinstance(stability, Mapping) and "share" in stability:
        share, over = float(stability["share"]), stability.get("over", "images")
        if share < STEADY:
            kept = f"{share:.0%} of its heads keep their role when the {over} are drawn again"
            warnings.append(f"the role map is not steady: {kept}{more}")
    elif more:
        warnings.append(f"how steady the role map is was not measured{more}")
    return warnings


def _kind_and_concept(role: Role) -> tuple[str, str | None]:
    return role.kind, role.concept
