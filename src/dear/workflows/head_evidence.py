"""Measures what the page about roles shows beyond the map itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dear._io.image_file import Size
from dear._io.progress import Progress, silent
from dear.clip.model import Clip
from dear.errors import DearError
from dear.heads.ablate import AblationTask, Collected, collect, layer_effects, role_effects
from dear.heads.batches import Images, ImageSource, batches
from dear.heads.embed import sentence_embedder
from dear.heads.explain import ActivatingImages, activating_images, attention_maps
from dear.heads.roles import RoleMap
from dear.report.page import thumbnail
from dear.report.roles_facts import HeadEvidence, Key, Seen

_THUMB = 104  # pixels per side
_LEVELS = "0123456789"


def measure_heads(
    roles: RoleMap,
    clip: Clip | None = None,
    images: Images | None = None,
    heads: Sequence[Key] | None = None,
    limit: int = 1000,
    top: int = 4,
    allow_other: bool = False,
    progress: Progress | None = None,
) -> HeadEvidence:
    """Measure what the page shows.

    Args:
        roles: the map.
        clip: its backbone; without it and `images` the page has no images.
        images: an image set (with labels: layers and roles are ablated too) or normalized pixels.
        heads: heads whose images are shown; None for all.
        limit: most images looked at, spread evenly over the set.
        top: images at either end.
        allow_other: accept a map that was made on other weights.
        progress: called with (stage, done, total).

    Raises:
        RoleError: the map belongs to other weights than `clip`'s, or has no such head.
    """
    if clip is not None:
        roles.check(clip, allow_other)
    progress = progress or silent
    progress("plane", 0, None)
    plane = phrase_plane(list(roles.evidence.get("concept_of", {})))
    if clip is None or images is None:
        return HeadEvidence(plane=plane)
    chosen = [key for key, _ in roles] if heads is None else list(dict.fromkeys(heads))
    for key in chosen:
        roles[key]  # raises for a head that does not exist
    some, numbers = _some(clip, images, limit)
    report = progress
    seen = collect(clip, some, progress=lambda done: report("images", done, len(numbers)))
    found = {}
    for key in chosen:
        phrase = roles[key].phrases[0] if roles[key].phrases else None
        text = None if phrase is None else clip.encode_text([phrase])[0].float().cpu()
        found[key] = activating_images(seen, key, text, phrase, top)
    wanted = sorted({row for each in found.values() for row in (*each.most, *each.least)})
    shown = _shown(found, numbers, wanted, _looks(clip, some, wanted, chosen))
    task = _task(clip, images, numbers, seen)
    return HeadEvidence(
        thumbnails={numbers[row]: _thumbnail(clip, images, numbers[row]) for row in wanted},
        names={numbers[row]: _name(images, numbers[row]) for row in wanted},
        heads=shown,
        side=clip.config.vision.side,
        layers=tuple(layer_effects(task)) if task else (),
        roles=tuple(role_effects(task, roles)) if task else (),
        accuracy=task.accuracy() if task else None,
        images=len(numbers),
        plane=plane,
    )


def _shown(
    found: dict[Key, ActivatingImages], numbers: list[int], wanted: list[int], looks: Tensor
) -> dict[Key, tuple[str | None, tuple[Seen, ...], tuple[Seen, ...]]]:
    """Per head: its phrase, and the images that activate it most and least, with scores and attention maps.

    `looks` [K, rows, side, side] has the heads in the order of `found` and the images in that of `wanted`.
    """
    place = {row: at for at, row in enumerate(wanted)}

    def seen(at: int, scores: Tensor, rows: Sequence[int]) -> tuple[Seen, ...]:
        return tuple(
            Seen(numbers[row], round(float(scores[row]), 4), _digits(looks[at, place[row]])) for row in rows
        )

    return {
        key: (each.phrase, seen(at, each.scores, each.most), seen(at, each.scores, each.least))
        for at, (key, each) in enumerate(found.items())
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


def _some(clip: Clip, images: Images, limit: int) -> tuple[Tensor | ImageSource, list[int]]:
    """At most `limit` of the images, spread evenly, as a set of their own; and their numbers."""
    if not isinstance(images, ImageSource | Tensor):
        images = torch.cat(list(images))
    total = len(images)
    numbers = sorted({place * total // min(limit, total) for place in range(min(limit, total))})
    if isinstance(images, Tensor):
        return images[numbers], numbers
    return _Part(images, numbers), numbers


class _Part:
    """Some images of a set."""

    def __init__(self, source: ImageSource, numbers: list[int]) -> None:
        self.source, self.numbers = source, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        return self.source.pixels([self.numbers[index] for index in indices], size)


def _looks(clip: Clip, some: Tensor | ImageSource, rows: list[int], keys: list[Key]) -> Tensor:
    """Attention map of every chosen head on every wanted image, [K, rows, side, side]."""
    part = some[rows] if isinstance(some, Tensor) else _Part(some, rows)
    return torch.cat([attention_maps(clip, batch, keys).cpu() for batch in batches(clip, part, 32)], dim=1)


def _digits(look: Tensor) -> str:
    """An attention map [side, side] as digits from 0 to 9, relative to its largest value."""
    share = look / look.max().clamp(min=1e-12)
    return "".join(_LEVELS[round(value)] for value in (9 * share).flatten().tolist())


def _task(clip: Clip, images: Images, numbers: list[int], seen: Collected) -> AblationTask | None:
    """The zero-shot question of a labeled set; None for images without labels."""
    labels, classes = getattr(images, "labels", None), getattr(images, "classes", None)
    if not isinstance(labels, Tensor) or not classes or len(classes) < 2:
        return None
    template = getattr(images, "template", "a photo of a {}.")
    words = clip.encode_text([template.format(name) for name in classes]).float().cpu()
    return AblationTask(seen, labels[numbers], words)


def _thumbnail(clip: Clip, images: Images, number: int) -> str:
    """A small JPEG of an image's evaluation view, as a data URL."""
    if isinstance(images, ImageSource):
        pixels = images.pixels([number], _THUMB)[0]
    else:
        assert isinstance(images, Tensor)
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (clip.config.mean, clip.config.std))
        pixels = ((images[number].cpu() * std + mean).clamp(0, 1) * 255).round().to(torch.uint8)
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    return thumbnail(image.resize((_THUMB, _THUMB)), _THUMB)


def _name(images: Images, number: int) -> str:
    """What to call an image: its class where known, else its key or number."""
    labels, classes = getattr(images, "labels", None), getattr(images, "classes", None)
    if isinstance(labels, Tensor) and classes:
        return str(classes[int(labels[number])])
    key = getattr(images, "key", None)
    return str(key(number)) if callable(key) else f"image {number}"
