"""Heads against known attributes, for the demo: what they see, and retrieval by them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dear import world
from dear.clip.model import Clip
from dear.heads.collect import HeadContributions, collect_contributions
from dear.heads.explained_variance import explained_variance
from dear.heads.names import Head
from dear.heads.neighbors import head_space, precision_at
from dear.heads.roles import RoleMap
from dear.report.page import Thumbnail, thumbnail
from dear.tasks.demo.facts import PrecisionRow, RetrievalFacts, TruthRow
from dear.tasks.mini.measure import batches
from dear.world import factors as vocabulary

_SEED = 77  # images that neither pretraining nor the discovery of roles used
#: concepts whose value is drawn independently of all others: column among the factors, words of the values
_ATTRIBUTES: dict[str, tuple[int, tuple[str, ...]]] = {
    "Color": (vocabulary.COLOR, tuple(color.words[0] for color in vocabulary.COLORS)),
    "Texture": (vocabulary.TEXTURE, tuple(words[0] for words in vocabulary.TEXTURES)),
    "Location": (vocabulary.PLACE, tuple(phrases[0] for phrases, _ in vocabulary.PLACES)),
}
NEIGHBORS, DRAWS = 8, 5


@dataclass(frozen=True, eq=False)
class KnownImages:
    """Images of shapes whose attributes are known."""

    scenes: world.Scenes  #: what they show
    collected: HeadContributions  #: their features and the heads' contributions
    values: dict[str, Tensor]  #: concept -> int [n], -1 where it is not visible
    heads: dict[str, list[Head]]  #: concept -> its heads, of concepts that have any


def known_images(clip: Clip, roles: RoleMap, number: int) -> KnownImages:
    """Draw images of single shapes and collect the contributions of the heads that have roles."""
    scenes = world.sample(number, torch.Generator().manual_seed(_SEED), kinds=(vocabulary.SHAPE,))
    factors = scenes.factors()
    heads = {name: list(roles.select("core", name)) for name in _ATTRIBUTES}
    return KnownImages(
        scenes,
        collect_contributions(clip, batches(clip, scenes), roles.layers),
        {name: factors[:, column] for name, (column, _) in _ATTRIBUTES.items()},
        {name: keys for name, keys in heads.items() if keys},
    )


def truth_rows(known: KnownImages) -> tuple[TruthRow, ...]:
    """How much of the variance of a concept's heads its attribute explains, compared with all other heads."""
    rows, part = [], known.collected
    for concept, heads in known.heads.items():
        values = known.values[concept]
        shown = values >= 0
        share = explained_variance(part.outputs[shown], part.maps, values[shown])  # [L, H]
        matching = torch.zeros_like(share, dtype=torch.bool)
        for layer, head in heads:
            matching[part.layers.index(layer), head] = True
        rows.append(
            TruthRow(concept, len(heads), float(share[matching].mean()), float(share[~matching].mean()))
        )
    return tuple(rows)


def retrieval_facts(known: KnownImages, roles: RoleMap) -> RetrievalFacts:
    """Precision of retrieval in each concept, with every image as the query."""
    rng, keys = random.Random(1), [key for key, _ in roles]
    unit_features = F.normalize(known.collected.features - known.collected.features.mean(dim=0), dim=-1)
    rows, spaces = [], {}
    for concept, heads in known.heads.items():
        shown = (known.values[concept] >= 0).nonzero()[:, 0]
        values = known.values[concept][shown]
        spaces[concept], _ = head_space(known.collected, heads)
        random_spaces = [head_space(known.collected, rng.sample(keys, len(heads)))[0] for _ in range(DRAWS)]
        by_heads, by_whole, *by_random = (
            precision_at(space[shown], values, NEIGHBORS)
            for space in (spaces[concept], unit_features, *random_spaces)
        )
        chance = float(((torch.bincount(values).double() / len(values)) ** 2).sum())
        rows.append(PrecisionRow(concept, len(heads), by_heads, by_whole, sum(by_random) / DRAWS, chance))
    query = _typical_query(known, spaces, rows)
    most_similar = {
        concept: tuple(_thumbnail(known, place, query, concept) for place in _nearest(space, query))
        for concept, space in spaces.items()
    }
    return RetrievalFacts(
        len(known.scenes), NEIGHBORS, tuple(rows), _thumbnail(known, query, query), most_similar
    )


def _nearest(space: Tensor, query: int) -> list[int]:
    """The places of the images most similar to one of them."""
    near = space @ space[query]
    near[query] = -2.0  # not the query itself
    return near.topk(NEIGHBORS).indices.tolist()


def _typical_query(known: KnownImages, spaces: Mapping[str, Tensor], rows: Sequence[PrecisionRow]) -> int:
    """The image whose own precision is nearest to the means, among photos that show all attributes."""
    shown = torch.stack([values >= 0 for values in known.values.values()]).all(dim=0)
    candidates = (shown & (known.scenes.style == 0) & (known.scenes.count == 1)).nonzero()[:, 0].tolist()

    def distance(query: int) -> float:
        total = 0.0
        for row in rows:
            values = known.values[row.concept]
            right = (values[_nearest(spaces[row.concept], query)] == values[query]).double().mean()
            total += abs(float(right) - row.by_heads)
        return total

    return int(min(candidates, key=distance))


def _thumbnail(known: KnownImages, place: int, query: int, concept: str | None = None) -> Thumbnail:
    """An image with its attributes; with a concept only that one, marked right where the query has it."""
    pixels = world.render(known.scenes[slice(place, place + 1)])[0]  # uint8 [3, S, S]
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy(), "RGB")
    values = {name: int(labels[place]) for name, labels in known.values.items()}
    words = {
        name: _ATTRIBUTES[name][1][value] if value >= 0 else "not visible" for name, value in values.items()
    }
    text = ", ".join(words.values())
    if concept is None:
        lines = tuple(("soft", f"{name.lower()}: {word}") for name, word in words.items())
        return Thumbnail(thumbnail(image), f"the query: {text}", lines)
    same = values[concept] == int(known.values[concept][query])
    line = ("right", f"✓ {words[concept]}") if same else ("wrong", f"✗ {words[concept]}")
    return Thumbnail(thumbnail(image), text, (line,))
