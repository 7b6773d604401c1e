"""Attribute-conditioned retrieval: images that are similar in one attribute.

Every attribute of an adapted model has a feature space of its own (eq. 11); images are ranked by their cosine
there. On a backbone with a role map, without training, the space is made of the heads of the attribute.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from dear.clip.model import Clip
from dear.data.batches import ImageLike, image_set, name_of, over_batches, pixels_for
from dear.data.images import ImageSet, ListedImages, is_utf8
from dear.data.open import find_benchmark, open_data
from dear.errors import DataError, UsageError
from dear.heads.ablate import collect
from dear.heads.concept_words import find_attribute
from dear.heads.focus import attribute_heads
from dear.heads.neighbors import ALIKE, SAME, head_space, shared
from dear.heads.roles import RoleMap
from dear.images.views import image_paths, open_image
from dear.methods.base import in_precision, unit
from dear.methods.dear import DeAR
from dear.runs.feature_cache import FeatureCache, learned_digest
from dear.runs.model import Model, Run
from dear.shortcuts.without import role_map
from dear.utils.files import PathLike, write_atomic
from dear.utils.progress import Progress, silent

_CELL, _GAP, _LINE = 128, 8, 16


@dataclass(frozen=True)
class Found:
    """What was found in one attribute's space, most alike first."""

    attribute: str
    indices: tuple[int, ...]  #: places in the gallery
    keys: tuple[str, ...]
    similarity: tuple[float, ...]  #: cosine with the query

    @property
    def pairs(self) -> list[tuple[str, float]]:
        """Key and cosine of each image."""
        return list(zip(self.keys, self.similarity, strict=True))


def gallery_of(source: PathLike | ImageSet, root: PathLike | None = None) -> ImageSet:
    """Images to search: every image below a folder (labels do not matter), or what `open_data` takes.

    Of the name of a benchmark, whose folder is in `root`, the test images are taken.
    """
    if isinstance(source, ImageSet):
        return source
    path = Path(source).expanduser()
    benchmark = root is not None and find_benchmark(os.fspath(source)) is not None
    if benchmark or not os.path.isdir(path):
        return open_data(source, "test", root=root)
    files = tuple(path / name for name in sorted(image_paths(path)))
    if not files:
        raise DataError(f"{path}: there is no image in this folder")
    odd = next((file.name for file in files if not is_utf8(file.name)), None)
    if odd is not None:
        raise DataError(f"{path}: the file name {odd!r} is not UTF-8; rename the file")
    labels = torch.zeros(len(files), dtype=torch.long)
    return ListedImages(files, labels, ("image",), name=path.name)


def gallery_features(method: DeAR, images: ImageSet, progress: Progress | None = None) -> Tensor:
    """Unit features of a gallery in every attribute's space, [n, A, E], on the CPU."""
    method, cache = in_precision(method, "auto"), FeatureCache()
    what = learned_digest("attribute features", method)

    def features(some: ImageSet, rows: list[int]) -> Tensor:
        def compute(missing: list[int]) -> Tensor:
            return unit(method.attribute_features(pixels_for(method.clip, some, missing)))

        return cache.rows(what, some, rows, compute)

    parts, _ = over_batches(images, features, method.clip, progress=progress)
    return torch.cat(parts)


def rank(method: DeAR, query: ImageLike, features: Tensor, images: ImageSet, top: int) -> list[Found]:
    """The images most similar to the query in each attribute; `features` as `gallery_features` gives them."""
    pixels = pixels_for(method.clip, image_set([query]), [0])
    own = unit(method.attribute_features(pixels))[0].cpu()  # [A, E]
    return [
        _nearest(attribute, features[:, number] @ own[number], len(images), images, top)
        for number, attribute in enumerate(method.attributes)
    ]


def retrieve(
    run: Run,
    query: ImageLike,
    gallery: PathLike | ImageSet,
    *,
    attribute: str | None = None,
    top: int = 8,
    out: PathLike | None = None,
    backbone: PathLike | Clip | None = None,
    device: str = "auto",
    root: PathLike | None = None,
    progress: Progress | None = None,
) -> list[Found]:
    """Images of a gallery that are most like a query in one attribute, or in each: `dear retrieve`.

    Args:
        run: run folder of a method with attribute features (DeAR), or the method.
        query: an image.
        gallery: a folder of images, or what `open_data` takes (its test split), or an image set.
        attribute: in any case; None: all of them.
        top: how many images.
        out: folder for one contact sheet per attribute, `color.png` and so on.
        backbone: for the run folder, if the backbone's name does not find it.
        device: "auto", "cpu", "cuda", …
        root: folder of the benchmarks, for a gallery that is the name of a benchmark.
        progress: called with ("images", images read, images in all).

    Raises:
        UsageError: the method has no attribute features, or no such attribute.
    """
    method = Model.of(run, backbone, device).method
    if not isinstance(method, DeAR):
        raise UsageError(f"the method {method.name!r} has no features per attribute; use a DeAR run")
    if top < 1:
        raise UsageError(f"top = {top}: ask for at least one image")
    wanted = None if attribute is None else method.attributes[method.attribute_index(attribute)]
    images = gallery_of(gallery, root)
    found = rank(method, query, gallery_features(method, images, progress), images, top)
    chosen = [one for one in found if wanted in (None, one.attribute)]
    _write_sheets(out, query, chosen, images)
    return chosen


def contact_sheet(query: ImageLike, found: Found, images: ImageSet, columns: int = 5) -> Image.Image:
    """The query and what was found, side by side with the cosines below."""
    cells: list[tuple[Image.Image, str]] = [(open_image(query), f"query: {Path(name_of(query)).name}")]
    for index, similarity in zip(found.indices, found.similarity, strict=True):
        cells.append((images.image(index), f"{similarity:.3f} {Path(images.key(index)).name}"))
    columns = min(columns, len(cells))
    rows = -(-len(cells) // columns)
    wide, tall = _CELL + _GAP, _CELL + _LINE + _GAP
    sheet = Image.new("RGB", (columns * wide + _GAP, rows * tall + _LINE + 2 * _GAP), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((_GAP, _GAP // 2), f"most alike in {found.attribute}", fill="black")
    for place, (image, words) in enumerate(cells):
        x, y = place % columns * wide + _GAP, place // columns * tall + _LINE + _GAP
        sheet.paste(ImageOps.pad(image, (_CELL, _CELL), color="white"), (x, y))
        if place == 0:
            pen.rectangle((x - 2, y - 2, x + _CELL + 1, y + _CELL + 1), outline="black", width=2)
        pen.text((x, y + _CELL + 1), _short(words, pen), fill="black")
    return sheet


def _short(words: str, pen: ImageDraw.ImageDraw) -> str:
    """Words cut to the width of a cell; letters the built-in font lacks become question marks."""
    words = words.encode("latin-1", "replace").decode("latin-1")
    while len(words) > 1 and pen.textlength(words) > _CELL:
        words = words[:-1]
    return words


@dataclass(frozen=True)
class Neighbors:
    """What was found by heads."""

    found: tuple[Found, ...]  #: one list per attribute
    shared: float  #: share of images that the lists of two attributes have in common, on average
    notice: str | None  #: a sentence where attributes cannot be told apart; else None


def head_map_of(clip: Clip, roles: PathLike | RoleMap | None = None) -> RoleMap | None:
    """The role map to search by, if it has heads with an attribute of their own."""
    found = role_map(roles, clip)
    return found if found is not None and attribute_heads(found) else None


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
    progress: Progress = silent,
) -> Neighbors:
    """The images of a gallery that are most like a query in the heads of one attribute, or of each.

    The query itself is left out if it is in the gallery. `roles` is a role map instead of the backbone's own;
    the other parameters are those of `retrieve`.

    Raises:
        UsageError: no head of the role map has that attribute.
    """
    if top < 1:
        raise UsageError(f"top = {top}: ask for at least one image")
    known = role_map(roles, clip)
    spaces = {} if known is None else attribute_heads(known)
    if known is not None and known.caveat():
        raise UsageError(f"{known.caveat()} A search by attribute needs heads that know attributes.")
    if known is None or not spaces:
        raise UsageError(f"{clip.name}: no role map with heads of an attribute; compute one", hint="roles")
    wanted = None if attribute is None else find_attribute(attribute, spaces)
    images = gallery_of(gallery, root)
    seen = collect(clip, images, known.layers, progress=lambda done: progress("images", done, len(images)))
    own = collect(clip, ListedImages((query,), torch.zeros(1, dtype=torch.long), ("query",)), known.layers)
    same = (F.normalize(seen.features, dim=1) @ F.normalize(own.features, dim=1)[0]) > SAME
    found = []
    for name, heads in spaces.items():
        space, center = head_space(seen, heads)
        near = space @ head_space(own, heads, center)[0][0]
        found.append(_nearest(name, near.masked_fill(same, -2.0), int((~same).sum()), images, top))
    overlap = shared({one.attribute: one.indices for one in found})
    chosen = tuple(one for one in found if wanted in (None, one.attribute))
    _write_sheets(out, query, chosen, images)
    notice = None
    if len(found) > 1 and overlap >= ALIKE:
        notice = (
            f"attributes can hardly be told apart on {clip.name}: the lists of two attributes share "
            f"{overlap:.1%} of their images"
        )
    return Neighbors(chosen, overlap, notice)


def _write_sheets(out: PathLike | None, query: ImageLike, found: Sequence[Found], images: ImageSet) -> None:
    """One contact sheet per attribute, where a folder is named."""
    for one in found if out is not None else ():
        sheet = io.BytesIO()
        contact_sheet(query, one, images).save(sheet, "PNG")
        write_atomic(Path(out or "") / f"{one.attribute.lower()}.png", sheet.getvalue())


def _nearest(name: str, near: Tensor, available: int, images: ImageSet, top: int) -> Found:
    best = near.topk(min(top, available))
    places = best.indices.tolist()
    keys = tuple(images.key(place) for place in places)
    return Found(name, tuple(places), keys, tuple(best.values.tolist()))
