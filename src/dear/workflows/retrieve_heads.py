"""Retrieval by heads: images similar in one attribute, on any backbone with a role map, without training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dear._io.progress import Progress
from dear.clip.model import Clip
from dear.data.images import ImageSet, ListedImages
from dear.errors import UsageError
from dear.heads.ablate import collect
from dear.heads.neighbors import ALIKE, SAME, attribute_heads, head_space, shared
from dear.heads.roles import RoleMap
from dear.workflows.options import PathLike
from dear.workflows.predict import ImageLike
from dear.workflows.retrieve import Found, contact_sheet, gallery_of, write_png
from dear.workflows.without import role_map


@dataclass(frozen=True)
class Neighbors:
    """What was found by heads.

    Attributes:
        found: one list per attribute.
        shared: share of images that the lists of two attributes have in common, on average.
        notice: a sentence where attributes cannot be told apart; else None.
    """

    found: tuple[Found, ...]
    shared: float
    notice: str | None


def head_map_of(clip: Clip, roles: PathLike | RoleMap | None = None) -> RoleMap | None:
    """The role map to search by, if it has heads with an attribute of their own."""
    chart = role_map(roles, clip)
    return chart if chart is not None and attribute_heads(chart) else None


def retrieve_by_heads(
    clip: Clip,
    query: ImageLike,
    gallery: PathLike | ImageSet,
    *,
    roles: PathLike | RoleMap | None = None,
    attribute: str | None = None,
    top: int = 8,
    out: PathLike | None = None,
    root: PathLike | None = None,
    progress: Progress | None = None,
) -> Neighbors:
    """The images of a gallery that are most like a query in the heads of one attribute, or of each.

    The query itself is left out if it is in the gallery.

    Args:
        clip: the backbone.
        query: an image.
        gallery: a folder of images, or what `open_data` takes, or an image set.
        roles: role map of the backbone or its file; None: its own.
        attribute: in any case; None: all that have heads.
        top: how many images.
        out: folder for one contact sheet per attribute.
        root: folder of the benchmarks, for the name of a benchmark.
        progress: told ("images", images read, images in all).

    Raises:
        UsageError: no head of the role map has that attribute.
    """
    if top < 1:
        raise UsageError(f"top = {top}: ask for at least one image")
    chart = role_map(roles, clip)
    spaces = {} if chart is None else attribute_heads(chart)
    if chart is None or not spaces:
        raise UsageError(f"{clip.name}: no role map with heads of an attribute; compute one", hint="roles")
    wanted = None if attribute is None else _attribute(attribute, spaces)
    images = gallery_of(gallery, root)
    told = None if progress is None else _counted(progress, len(images))
    seen = collect(clip, images, chart.layers, progress=told)
    own = collect(clip, ListedImages((query,), torch.zeros(1, dtype=torch.long), ("query",)), chart.layers)
    whole = torch.nn.functional.normalize(seen.features, dim=1)
    same = (whole @ torch.nn.functional.normalize(own.features, dim=1)[0]) > SAME
    found = []
    for name, heads in spaces.items():
        space, center = head_space(seen, heads)
        near = space @ head_space(own, heads, center)[0][0]
        found.append(_nearest(name, near.masked_fill(same, -2.0), int((~same).sum()), images, top))
    overlap = shared({one.attribute: one.indices for one in found})
    chosen = tuple(one for one in found if wanted in (None, one.attribute))
    if out is not None:
        for one in chosen:
            write_png(Path(out) / f"{one.attribute.lower()}.png", contact_sheet(query, one, images))
    notice = None
    if len(found) > 1 and overlap >= ALIKE:
        notice = (
            f"attributes can hardly be told apart on {clip.name}: the lists of two attributes share "
            f"{overlap:.0%} of their images"
        )
    return Neighbors(chosen, overlap, notice)


def _attribute(name: str, spaces: dict[str, tuple[tuple[int, int], ...]]) -> str:
    for known in spaces:
        if known.lower() == name.strip().lower():
            return known
    raise UsageError(f"no head of the role map has the role {name!r}; there are {', '.join(spaces)}")


def _nearest(name: str, near: Tensor, available: int, images: ImageSet, top: int) -> Found:
    best = near.topk(min(top, available))
    places = best.indices.tolist()
    keys = tuple(images.key(place) for place in places)
    return Found(name, tuple(places), keys, tuple(best.values.tolist()))


def _counted(progress: Progress, total: int) -> Callable[[int], None]:
    """Progress of images as `collect` tells it."""
    return lambda done: progress("images", done, total)
