"""The demo's parts about attributes: variance that attributes explain in heads, and retrieval by heads."""

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
from dear.heads.ablate import Collected, Key, collect
from dear.heads.neighbors import head_space, precision_at
from dear.heads.roles import RoleMap
from dear.heads.truth import explained_variance
from dear.report.demo_facts import PrecisionRow, RetrievalFacts, TruthRow
from dear.report.page import Thumbnail, thumbnail
from dear.world import factors as vocabulary
from dear.world.measure import batches

NEIGHBORS, DRAWS = 8, 5
_SEED = 77  # images that neither pretraining nor the discovery of roles used
_COLUMNS = {"Color": vocabulary.COLOR, "Texture": vocabulary.TEXTURE, "Location": vocabulary.PLACE}
"""Concepts whose value is drawn independently of all others, and where it stands among the factors."""


@dataclass(frozen=True, eq=False)
class KnownImages:
    """Images of shapes whose attributes are known.

    Attributes:
        scenes: what they show.
        collected: their features and the heads' contributions.
        values: int [n, factors], -1 where an attribute is not visible.
    """

    scenes: world.Scenes
    collected: Collected
    values: Tensor


def known_images(clip: Clip, roles: RoleMap, number: int) -> KnownImages:
    """Draw images of single shapes and collect the contributions of the heads that have roles."""
    rng = torch.Generator().manual_seed(_SEED)
    scenes = world.sample(number, rng, kinds=(vocabulary.SHAPE,))
    return KnownImages(scenes, collect(clip, batches(clip, scenes), roles.layers), scenes.factors())


def truth_rows(known: KnownImages, roles: RoleMap) -> tuple[TruthRow, ...]:
    """How much of the variance of a concept's heads its attribute explains, beside all other heads."""
    rows = []
    for concept, column, heads in _concepts(roles):
        shown = known.values[:, column] >= 0
        part = known.collected
        share = explained_variance(part.outputs[shown], part.maps, known.values[shown, column])  # [L, H]
        own = torch.zeros_like(share, dtype=torch.bool)
        for layer, head in heads:
            own[part.layers.index(layer), head] = True
        rows.append(TruthRow(concept, len(heads), float(share[own].mean()), float(share[~own].mean())))
    return tuple(rows)


def retrieval_facts(known: KnownImages, roles: RoleMap) -> RetrievalFacts:
    """Precision of retrieval in each concept, with every image as the query."""
    rng, keys = random.Random(1), [key for key, _ in roles]
    whole = known.collected.features - known.collected.features.mean(dim=0)
    rows, spaces = [], {}
    for concept, column, heads in _concepts(roles):
        shown = (known.values[:, column] >= 0).nonzero()[:, 0]
        values = known.values[shown, column]

        def by(space: Tensor, shown: Tensor = shown, values: Tensor = values) -> float:
            return precision_at(space[shown], values, NEIGHBORS)

        spaces[concept], _ = head_space(known.collected, heads)
        draws = [by(head_space(known.collected, rng.sample(keys, len(heads)))[0]) for _ in range(DRAWS)]
        share = torch.bincount(values).double() / len(values)
        rows.append(
            PrecisionRow(
                concept,
                len(heads),
                by(spaces[concept]),
                by(F.normalize(whole, dim=-1)),
                sum(draws) / DRAWS,
                float((share**2).sum()),
            )
        )
    query = _typical(known, spaces, rows)
    found = {
        concept: tuple(_shown(known, place, query, concept) for place in _nearest(space, query))
        for concept, space in spaces.items()
    }
    return RetrievalFacts(len(known.scenes), NEIGHBORS, tuple(rows), _shown(known, query, query), found)


def _nearest(space: Tensor, query: int) -> list[int]:
    """The places of the images most similar to one of them."""
    near = space @ space[query]
    near[query] = -2.0  # not the query itself
    return near.topk(NEIGHBORS).indices.tolist()


def _typical(known: KnownImages, spaces: Mapping[str, Tensor], rows: Sequence[PrecisionRow]) -> int:
    """The image whose own precision is nearest to the means, among photos that show all attributes."""
    shown = (known.values[:, list(_COLUMNS.values())] >= 0).all(dim=1)
    candidates = (shown & (known.scenes.style == 0) & (known.scenes.count == 1)).nonzero()[:, 0].tolist()

    def distance(query: int) -> float:
        total = 0.0
        for row in rows:
            values = known.values[:, _COLUMNS[row.concept]]
            right = (values[_nearest(spaces[row.concept], query)] == values[query]).double().mean()
            total += abs(float(right) - row.by_heads)
        return total

    return int(min(candidates, key=distance))


def _concepts(roles: RoleMap) -> list[tuple[str, int, list[Key]]]:
    """(concept, column of its attribute, its heads) of the concepts that have heads."""
    found = [(name, column, list(roles.select("core", name))) for name, column in _COLUMNS.items()]
    return [row for row in found if row[2]]


def _word(known: KnownImages, place: int, concept: str) -> str:
    value = int(known.values[place, _COLUMNS[concept]])
    if value < 0:
        return "not visible"
    if concept == "Color":
        return vocabulary.COLORS[value].words[0]
    if concept == "Texture":
        return vocabulary.TEXTURES[value][0]
    return vocabulary.PLACES[value][0][0]


def _shown(known: KnownImages, place: int, query: int, concept: str | None = None) -> Thumbnail:
    """An image with its attributes; with a concept only that one, marked right where the query has it."""
    pixels = world.render(known.scenes[slice(place, place + 1)])[0]  # uint8 [3, S, S]
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy(), "RGB")
    words = {name: _word(known, place, name) for name in _COLUMNS}
    text = ", ".join(words.values())
    if concept is None:
        lines = tuple(("soft", f"{name.lower()}: {word}") for name, word in words.items())
        return Thumbnail(thumbnail(image), f"the query: {text}", lines)
    same = words[concept] == _word(known, query, concept)
    line = ("right", f"✓ {words[concept]}") if same else ("wrong", f"✗ {words[concept]}")
    return Thumbnail(thumbnail(image), text, (line,))
