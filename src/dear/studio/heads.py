"""The Heads tab: the map of heads, and for one head its role, its images and where it looks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dear.data.batches import image_set, over_pixels, pixels_for
from dear.data.images import ImageSet, even_subset
from dear.errors import UsageError
from dear.heads.activations import activating_images, attention_maps
from dear.heads.collect import HeadContributions, collect_contributions
from dear.heads.role import Role
from dear.heads.roles import RoleMap
from dear.images.views import square
from dear.report.head_map import describe_role, head_map, kind_meanings
from dear.report.page import render
from dear.studio.state import StudioState, gallery_html, name_of
from dear.tasks.roles.quality import specialization_notice
from dear.utils.progress import Progress, silent

Key = tuple[int, int]
_IMAGES, _SHOWN = 400, 6


class HeadViewer:
    """Computes what the tab shows; the images run through the backbone once."""

    def __init__(self, state: StudioState) -> None:
        self.state = state
        self._cached: tuple[RoleMap, ImageSet, HeadContributions] | None = None
        self._source: ImageSet | None = None

    def collect(self, progress: Progress | None = None) -> tuple[RoleMap, ImageSet, HeadContributions]:
        """The role map, the images, and what every head adds to each of them."""
        with self.state.roles_lock:
            roles = self.state.find_roles(progress)
            every = self.state.images
            if self._cached is None or self._cached[0] is not roles or self._source is not every:
                some = even_subset(every, _IMAGES)
                report = progress or silent
                collected = collect_contributions(
                    self.state.clip,
                    some,
                    roles.layers,
                    progress=lambda done: report("images", done, len(some)),
                )
                self._cached, self._source = (roles, some, collected), every
            return self._cached

    def view(self, key: Key, progress: Progress | None = None) -> HeadView:
        """Everything the tab shows about one head."""
        roles, images, collected = self.collect(progress)
        role, clip = roles.for_display()[key], self.state.clip
        phrase = role.phrases[0] if role.phrases else None
        text = None if phrase is None else clip.encode_text([phrase])[0].float().cpu()
        active = activating_images(collected, key, text, phrase, _SHOWN)
        most, least = (
            [(images.image(row), name_of(images, row)) for row in rows]
            for rows in (active.most, active.least)
        )
        parts, _ = over_pixels(
            images.subset(active.most), lambda pixels: attention_maps(clip, pixels, [key])[0].cpu(), clip
        )
        maps = torch.cat(parts)
        attention = [(overlay(image, one), name) for (image, name), one in zip(most, maps, strict=True)]
        return HeadView(key, *describe_role(roles, key), role, phrase, most, attention, least)

    def attention(self, key: Key, image: Image.Image) -> Image.Image:
        """Where a head looks in an image."""
        self.state.find_roles()[key]  # raises for a head that does not exist
        clip = self.state.clip
        maps = attention_maps(clip, pixels_for(clip, image_set([image]), [0]), [key])
        return overlay(image, maps[0, 0].cpu())


@dataclass(frozen=True)
class HeadView:
    """What the tab shows of a head: its role, and images with their names."""

    key: Key
    title: str  #: the role in a few words
    meaning: str  #: a sentence about heads with this role
    role: Role
    phrase: str | None  #: images are ordered along it; None: along the strongest direction
    most: list[tuple[Image.Image, str]]  #: images that activate it most
    attention: list[tuple[Image.Image, str]]  #: the same with its attention map
    least: list[tuple[Image.Image, str]]  #: images that activate it least


def overlay(image: Image.Image, attention: Tensor, side: int = 224) -> Image.Image:
    """An image's center square with an attention map [h, w] over it: bright and warm where the head looks."""
    base = np.asarray(square(image, side), dtype=np.float32) / 255  # [side, side, 3]
    share = (attention / attention.max().clamp(min=1e-12)).clamp(0, 1).sqrt()  # one patch often leads by far
    small = Image.fromarray((255 * share).round().to(torch.uint8).numpy())
    heat = np.asarray(small.resize((side, side), Image.Resampling.BICUBIC), dtype=np.float32)[..., None] / 255
    gray = base.mean(axis=2, keepdims=True) * 0.55
    warm = _warm(heat[..., 0].astype(np.float32))
    mixed: NDArray[np.float32] = gray * (1 - heat) + (0.45 * base + 0.55 * warm) * heat
    return Image.fromarray((255 * mixed.clip(0, 1)).astype(np.uint8))


def _warm(heat: NDArray[np.float32]) -> NDArray[np.float32]:
    """Dark violet over orange to light yellow, [h, w] -> [h, w, 3]: rises in lightness, so it prints."""
    stops = np.array([0.0, 0.5, 1.0], dtype=np.float32)
    colors = np.array([[0.25, 0.0, 0.4], [0.9, 0.4, 0.1], [1.0, 0.98, 0.6]], dtype=np.float32)
    return np.stack([np.interp(heat, stops, colors[:, c]) for c in range(3)], axis=-1).astype(np.float32)


def parse_key(text: str, roles: RoleMap) -> Key:
    """The head that "12-7" or "12, 7" names."""
    parts = text.replace(",", "-").split("-")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
        raise UsageError(f"{text!r} is not a head; write layer and head as 12-7")
    key = (int(parts[0]), int(parts[1]))
    roles[key]
    return key


def first_key(roles: RoleMap) -> Key:
    """The head to show first: the last core head with the lowest entropy, or the last head of all."""
    core = roles.select("core") or tuple(key for key, _ in roles)
    return min(reversed(core), key=lambda key: roles[key].entropy or 0.0)


def map_html(roles: RoleMap, chosen: Key | None = None) -> str:
    """The map as a table of buttons that carry `data-head`, with a legend; arrow keys move between them."""
    name = "" if chosen is None else f"{chosen[0]}-{chosen[1]}"
    values = {"map": head_map(roles), "kinds": kind_meanings(), "notice": specialization_notice(roles)}
    return render("studio/map.html", chosen=name, **values)


def describe_html(view: HeadView) -> str:
    """Role, entropy, shares of concepts and phrases of a head, in words."""
    role = view.role
    return render(
        "studio/head.html",
        key=view.key,
        title=view.title,
        meaning=view.meaning,
        entropy="not measured" if role.entropy is None else f"{role.entropy:.2f} bits",
        phrase=view.phrase,
        shares=list(role.shares.items())[:6],
        phrases=role.phrases,
    )


def galleries_html(view: HeadView) -> list[str]:
    """The images that activate a head most, where it looks in them, and those that activate it least."""
    return [
        gallery_html("Images that activate it most", view.most),
        gallery_html("Where it looks in them", view.attention, "where the head looks in: "),
        gallery_html("Images that activate it least", view.least),
    ]
