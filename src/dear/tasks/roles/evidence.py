"""Measures what the page about roles shows beyond the map itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dear.clip.model import Clip
from dear.data.batches import over_pixels
from dear.data.images import ImageSet, evenly_spaced
from dear.errors import DearError
from dear.heads.ablate import AblationTask, layer_effects, role_effects
from dear.heads.activations import ActivatingImages, activating_images, attention_maps
from dear.heads.collect import collect_contributions
from dear.heads.roles import RoleMap
from dear.heads.sentences import sentence_embedder
from dear.report.page import thumbnail
from dear.utils.progress import Progress, silent
from dear.utils.text import fill_template

_THUMBNAIL = 104  # pixels per side
_EACH = 4  # images that a head reacts to most, and least


Key = tuple[int, int]


@dataclass(frozen=True)
class HeadImage:
    """One image of a head: its number, its score, and the attention map as digits, row by row."""

    image: int
    score: float
    attention: str


@dataclass(frozen=True)
class HeadEvidence:
    """Everything measured for the page; parts that could not be measured are empty."""

    thumbnails: Mapping[int, str] = field(default_factory=dict)  #: data URLs by image number
    names: Mapping[int, str] = field(default_factory=dict)  #: what to call each image
    #: most and least exciting images of each head, and the phrase that gave the direction
    heads: Mapping[Key, tuple[str | None, tuple[HeadImage, ...], tuple[HeadImage, ...]]] = field(
        default_factory=dict
    )
    side: int = 0  #: patches per side of an attention map
    layers: tuple[Mapping[str, float], ...] = ()  #: rows of `layer_effects`; empty without labels
    roles: tuple[Mapping[str, Any], ...] = ()  #: rows of `role_effects`; empty without labels
    accuracy: float | None = None  #: zero-shot accuracy with nothing ablated
    images: int = 0  #: number of images
    #: phrase to its place in the plane
    plane: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def measure_heads(
    roles: RoleMap,
    clip: Clip | None = None,
    images: ImageSet | None = None,
    heads: Sequence[Key] | None = None,
    limit: int = 1000,
    allow_other: bool = False,
    progress: Progress = silent,
) -> HeadEvidence:
    """Measure what the page shows.

    Args:
        roles: the map.
        clip: its backbone; without it and `images` the page has no images.
        images: to look at; with several classes, layers and roles are ablated too.
        heads: heads whose images are shown; None for all.
        limit: maximum number of images, spread evenly over the set.
        allow_other: accept a map that was made on other weights.
        progress: called with (stage, done, total).

    Raises:
        RoleError: the map belongs to other weights than `clip`'s, or has no such head.
    """
    if clip is not None:
        roles.check(clip, allow_other)
    roles = roles.for_display()
    progress("plane", 0, None)
    plane = phrase_plane(list(roles.evidence.get("concept_of", {})))
    if clip is None or images is None:
        return HeadEvidence(plane=plane)
    chosen = [key for key, _ in roles] if heads is None else list(dict.fromkeys(heads))
    for key in chosen:
        roles[key]  # raises for a head that does not exist
    numbers = evenly_spaced(len(images), limit)
    some, count = images.subset(numbers), len(numbers)
    collected = collect_contributions(clip, some, progress=lambda done: progress("images", done, count))
    activating = {}
    for key in chosen:
        phrase = roles[key].phrases[0] if roles[key].phrases else None
        text = None if phrase is None else clip.encode_text([phrase])[0].float().cpu()
        activating[key] = activating_images(collected, key, text, phrase, _EACH)
    rows = sorted({row for each in activating.values() for row in (*each.most, *each.least)})
    maps, _ = over_pixels(
        some.subset(rows), lambda pixels: attention_maps(clip, pixels, chosen).cpu(), clip, batch=32
    )
    task = None
    if len(images.classes) > 1:
        prompts = [fill_template(images.template, name) for name in images.classes]
        task = AblationTask(collected, some.labels, clip.encode_text(prompts).float().cpu())
    return HeadEvidence(
        thumbnails={numbers[row]: _thumbnail(some, row) for row in rows},
        names={numbers[row]: some.classes[int(some.labels[row])] for row in rows},
        heads=_head_images(activating, numbers, rows, torch.cat(maps, dim=1)),
        side=clip.config.vision.side,
        layers=tuple(layer_effects(task)) if task else (),
        roles=tuple(role_effects(task, roles)) if task else (),
        accuracy=task.accuracy() if task else None,
        images=count,
        plane=plane,
    )


def _head_images(
    activating: dict[Key, ActivatingImages], numbers: list[int], rows: list[int], maps: Tensor
) -> dict[Key, tuple[str | None, tuple[HeadImage, ...], tuple[HeadImage, ...]]]:
    """Per head: its phrase, and the images that activate it most and least, with scores and attention maps.

    `maps` [K, rows, side, side] follows the order of `activating` and `rows`.
    """
    place = {row: at for at, row in enumerate(rows)}

    def images(at: int, scores: Tensor, rows: Sequence[int]) -> tuple[HeadImage, ...]:
        return tuple(
            HeadImage(numbers[row], round(float(scores[row]), 4), _digits(maps[at, place[row]]))
            for row in rows
        )

    return {
        key: (each.phrase, images(at, each.scores, each.most), images(at, each.scores, each.least))
        for at, (key, each) in enumerate(activating.items())
    }


def phrase_plane(phrases: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Phrases in a plane, near each other where their meanings are (t-SNE of sentence embeddings).

    Empty without the extra `roles`, or with too few phrases to place.
    """
    if len(phrases) < 10:
        return {}
    try:
        vectors = sentence_embedder()(phrases)
    except DearError:
        return {}
    from sklearn.manifold import TSNE

    near = min(30.0, (len(phrases) - 1) / 3)
    flat = TSNE(2, perplexity=near, init="pca", random_state=0).fit_transform(vectors.astype(np.float32))
    return {phrase: (float(a), float(b)) for phrase, (a, b) in zip(phrases, flat, strict=True)}


def _digits(attention: Tensor) -> str:
    """An attention map [side, side] as digits from 0 to 9; 9 from the 95th percentile on.

    Relative to the maximum, one patch with most of the attention would leave all others dark.
    """
    share = (attention / attention.quantile(0.95).clamp(min=1e-12)).clamp(max=1)
    return "".join(str(round(value)) for value in (9 * share).flatten().tolist())


def _thumbnail(images: ImageSet, row: int) -> str:
    """A small JPEG of an image's evaluation view, as a data URL."""
    pixels = images.pixels([row], _THUMBNAIL)[0]
    return thumbnail(Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()), _THUMBNAIL)
