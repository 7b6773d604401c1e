"""Search by heads on `mini`: share of the 8 nearest images that have the query's own value, per attribute.

    python research/heads/retrieval.py --out research/results/retrieval.csv

For every attribute with heads in the role map: images of the attribute world in which it is at play (color,
place, texture on shapes; letters; objects …), each in turn the query and left out of its own list. Beside the
heads with that role: the whole feature, as many random heads (mean of five draws), as many true heads (those
that the attribute explains best, `head_truth.json`), and chance (the share of images with the query's value).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from measure.script import arguments, record
from measure.world import backbone, true_heads
from torch import Tensor

from dear import world
from dear.heads.collect import HeadContributions, collect_contributions
from dear.heads.focus import attribute_heads
from dear.heads.known_roles import known_roles
from dear.heads.names import Head
from dear.heads.neighbors import head_space, precision_at
from dear.tasks.mini.measure import CONCEPT_FACTORS, batches

DRAWS = 5


def by(seen: HeadContributions, heads: Sequence[Head], values: Tensor) -> float:
    """Precision in the contributions of some heads."""
    return precision_at(head_space(seen, heads)[0], values)


def main() -> None:
    args = arguments(__doc__, images=(1000, "per attribute"), out=Path)
    torch.set_num_threads(1)
    clip = backbone()
    roles = known_roles(clip)
    assert roles is not None
    seen: dict[int, tuple[HeadContributions, Tensor]] = {}
    keys = [key for key, _ in roles]
    for concept, heads in attribute_heads(roles).items():
        if concept not in CONCEPT_FACTORS:
            continue
        column, kind = CONCEPT_FACTORS[concept]
        if kind not in seen:
            scenes = world.sample(args.images, torch.Generator().manual_seed(7), kinds=(kind,))
            seen[kind] = collect_contributions(clip, batches(clip, scenes), roles.layers), scenes.factors()
        images, factors = seen[kind]
        shown = factors[:, column] >= 0
        values = factors[shown, column]
        some = images.subset(shown)
        rng = random.Random(1)
        drawn = [by(some, rng.sample(keys, len(heads)), values) for _ in range(DRAWS)]
        share = torch.bincount(values).double() / len(values)
        row = {
            "attribute": concept,
            "images": len(values),
            "heads": len(heads),
            "by_heads": by(some, heads, values),
            "whole_feature": precision_at(F.normalize(some.features, dim=1), values),
            "random_heads": sum(drawn) / DRAWS,
            "true_heads": by(some, true_heads(concept, len(heads)), values),
            "chance": float((share**2).sum()),
        }
        row = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
        record(args.out, [row], machine_last=True)


if __name__ == "__main__":
    main()
