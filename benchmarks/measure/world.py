"""What the benchmarks of shortcuts share: the world's images seen by `mini`, examples, true heads, scores."""

from __future__ import annotations

import json
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

import dear
from dear.clip.factory import EMBEDDED
from dear.clip.model import Clip
from dear.data import few_shot
from dear.data.world_images import WorldImages, world_task
from dear.heads.collect import HeadContributions, collect_contributions
from dear.heads.known_roles import known_roles
from dear.images.views import normalize
from dear.world import factors as W
from dear.world.renderer import apply_styles, compose, paste, to_bytes
from dear.world.scenes import sample
from dear.world.shortcuts import KINDS, PLACES

BALANCED = "0.17"  #: correlation at which all values are equally frequent in every class


@lru_cache(maxsize=2)
def backbone(device: str = "cpu") -> Clip:
    return dear.load("mini", device=device)


def rows(collected: HeadContributions, places: Tensor) -> HeadContributions:
    """Some images of what was collected."""
    return collected.subset(places)


@lru_cache(maxsize=40)
def seen(name: str, split: str, device: str = "cpu") -> HeadContributions:
    """Contributions of all images of a split, one pass; test images know no correlation."""
    if split == "test" and "@" in name:
        return seen(name.partition("@")[0], split, device)
    roles = known_roles(backbone(device))
    assert roles is not None
    return collect_contributions(backbone(device), world_task(name, split), roles.layers)


def draw_of(name: str, seed: int) -> tuple[WorldImages, Tensor]:
    """The few-shot draw and its places in the training split."""
    images = world_task(name, "train")
    drawn = few_shot(images, 16, seed)
    place = {images.key(index): index for index in range(len(images))}
    return drawn, torch.tensor([place[drawn.key(index)] for index in range(len(drawn))])  # type: ignore[return-value]


@lru_cache(maxsize=40)
def example_features(kind: str, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Features [30, E] and values [30] of examples: five per value, each on another class that is not asked.

    The same five classes serve every value: a class that goes with one value would be removed with it.
    """
    shortcut, clip = KINDS[kind], backbone(device)
    about_places = shortcut.classes == PLACES
    generator = torch.Generator().manual_seed(1000 + seed)
    kinds = (W.LETTER if about_places else W.ANIMAL,)
    drawn = sample(30, generator, kinds=kinds, avoid_held_out=False)
    if about_places:
        asked = {W.row("place", name) for name in PLACES}
        others = [row for row in range(len(W.PLACES)) if row not in asked]
    else:
        asked = {W.row("subject", name) for name in shortcut.classes}
        others = [W.row("subject", name) for name in W.ANIMALS if W.row("subject", name) not in asked]
    values = torch.arange(30) % 6
    own = torch.tensor(shortcut.values)[values]
    fixed = {
        "place" if about_places else "subject": torch.tensor(others)[
            torch.arange(30) // len(shortcut.values)
        ],
        "style": torch.zeros_like(drawn.style),
        "count": torch.ones_like(drawn.count),
    }
    if shortcut.factor != "letter":
        fixed[shortcut.factor] = own
    scenes = drawn.replace(**fixed)
    pixels = compose(scenes)
    if shortcut.factor == "letter":
        white, plain = torch.full_like(own, W.row("color", "white")), torch.full_like(own, W.PLAIN)
        paste(pixels, scenes.replace(subject=own, color=white, texture=plain), torch.arange(30) % 4)
    raw = to_bytes(apply_styles(scenes, pixels).clamp(0, 1)).to(clip.device)
    return clip.encode_image(normalize(raw, clip.config.mean, clip.config.std)).cpu().float(), values


def true_heads(concept: str, count: int) -> list[tuple[int, int]]:
    """The heads whose contribution the concept's factor explains best."""
    table = json.loads((EMBEDDED / "mini" / "head_truth.json").read_text())["heads"]
    ranked = sorted(table, key=lambda row: -row["explained"][concept])
    return [(row["layer"], row["head"]) for row in ranked[:count]]


def scored(answers: Tensor, labels: Tensor, values: tuple[str, ...]) -> tuple[float, float]:
    """Accuracy, and accuracy in the worst group of class and value."""
    right = (answers == labels).tolist()
    groups: dict[tuple[int, str], list[bool]] = {}
    for label, value, hit in zip(labels.tolist(), values, right, strict=True):
        groups.setdefault((label, value), []).append(hit)
    return sum(right) / len(right), min(sum(hits) / len(hits) for hits in groups.values())


def probe(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A logistic regression on unit features."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=100, max_iter=300).fit(F.normalize(features, dim=-1).numpy(), labels.numpy())
    return torch.from_numpy(model.coef_).float(), torch.from_numpy(model.intercept_).float()
