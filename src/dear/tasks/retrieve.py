"""Attribute-conditioned retrieval: images that are similar in one attribute.

Every attribute of a DeAR run has its feature space (eq. 11), where images are ranked by their cosine. On a
backbone with a role map, without training, the space consists of the contributions of the attribute's heads.
"""

from __future__ import annotations

import html
import io
import os
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from dear.clip.model import Clip
from dear.data.batches import image_set, name_of, over_batches, pixels_for
from dear.data.images import ImageSet, ListedImages, is_utf8
from dear.data.open import find_benchmark, open_data
from dear.errors import DataError, UsageError
from dear.heads.collect import collect_contributions
from dear.heads.concept_words import find_attribute
from dear.heads.focus import attribute_heads
from dear.heads.known_roles import resolve_roles
from dear.heads.neighbors import ALIKE, SAME, head_space, mean_overlap
from dear.heads.roles import RoleMap
from dear.images.names import image_paths
from dear.images.open import ImageLike, open_image
from dear.methods.base import Method
from dear.methods.dear import DeAR
from dear.methods.tensors import unit
from dear.runs.feature_cache import FeatureCache, learned_digest
from dear.runs.model import Run
from dear.tasks.load import load_backbone, load_model
from dear.utils.files import PathLike, check_output, write_atomic
from dear.utils.progress import Progress, silent

if TYPE_CHECKING:
    import pandas as pd

_CELL, _GAP, _LINE = 128, 8, 16  # pixels of a contact sheet
_COLUMNS = 5


@dataclass(frozen=True)
class Match:
    """Images of the gallery in one attribute's space, most similar first."""

    attribute: str
    indices: tuple[int, ...]  #: positions in the gallery
    keys: tuple[str, ...]
    similarity: tuple[float, ...]  #: cosine with the query

    @property
    def pairs(self) -> list[tuple[str, float]]:
        """Key and cosine of each image."""
        return list(zip(self.keys, self.similarity, strict=True))


@dataclass(frozen=True, eq=False)
class Retrieval(Sequence[Match]):
    """The images most similar to a query, one `Match` per attribute."""

    query: ImageLike
    by: str  #: "heads" or "features"
    matches: tuple[Match, ...]
    images: ImageSet  #: the gallery
    overlap: float | None = None  #: mean share of images that the lists of two attributes have in common
    notice: str | None = None  #: where attributes can hardly be distinguished, or their names say little

    @overload
    def __getitem__(self, index: int) -> Match: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Match, ...]: ...
    def __getitem__(self, index: int | slice) -> Match | tuple[Match, ...]:
        return self.matches[index]

    def __len__(self) -> int:
        return len(self.matches)

    def __repr__(self) -> str:
        attributes = ", ".join(match.attribute for match in self.matches)
        return f"<Retrieval: by {self.by}, {attributes}>"

    def to_frame(self) -> pd.DataFrame:
        """One row per attribute and image: attribute, rank from 1, image, cosine."""
        import pandas as pd

        rows = [
            (match.attribute, rank, key, cosine)
            for match in self.matches
            for rank, (key, cosine) in enumerate(match.pairs, start=1)
        ]
        return pd.DataFrame(rows, columns=["attribute", "rank", "image", "cosine"])

    def sheets(self) -> dict[str, bytes]:
        """One contact sheet per attribute: file name and PNG file."""
        files = {}
        for match in self.matches:
            sheet = io.BytesIO()
            contact_sheet(self.query, match, self.images).save(sheet, "PNG")
            files[f"{match.attribute.lower()}.png"] = sheet.getvalue()
        return files

    def write_sheets(self, folder: PathLike) -> None:
        """Write one contact sheet per attribute, `color.png` and so on."""
        for name, sheet in self.sheets().items():
            write_atomic(Path(folder) / name, sheet)

    def _repr_html_(self) -> str:
        """For notebooks: the contact sheets."""
        notice = "" if self.notice is None else f"<p>{html.escape(self.notice)}</p>"
        return notice + "".join(
            f'<p><img alt="{html.escape(name)}" src="data:image/png;base64,{b64encode(sheet).decode()}"></p>'
            for name, sheet in self.sheets().items()
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        attributes = {
            match.attribute: [{"image": key, "cosine": cosine} for key, cosine in match.pairs]
            for match in self.matches
        }
        return {
            "query": name_of(self.query),
            "by": self.by,
            "notice": self.notice,
            "attributes": attributes,
        }


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
    method, cache = method.in_precision("auto"), FeatureCache()
    what = learned_digest("attribute features", method)

    def features(some: ImageSet, rows: list[int]) -> Tensor:
        def compute(missing: list[int]) -> Tensor:
            return unit(method.attribute_features(pixels_for(method.clip, some, missing)))

        return cache.rows(what, some, rows, compute)

    parts, _ = over_batches(images, features, method.clip, progress=progress)
    return torch.cat(parts)


def rank(method: DeAR, query: ImageLike, features: Tensor, images: ImageSet, top: int) -> list[Match]:
    """The images most similar to the query in each attribute; `features` from `gallery_features`."""
    pixels = pixels_for(method.clip, image_set([query]), [0])
    query_AE = unit(method.attribute_features(pixels))[0].cpu()
    return [
        _nearest(attribute, features[:, number] @ query_AE[number], len(images), images, top)
        for number, attribute in enumerate(method.attributes)
    ]


def retrieve(
    run: Run | None = None,
    *,
    query: ImageLike,
    gallery: PathLike | ImageSet,
    by: str | None = None,
    roles: PathLike | RoleMap | None = None,
    attribute: str | None = None,
    top: int = 8,
    out: PathLike | None = None,
    backbone: PathLike | Clip | None = None,
    data_root: PathLike | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> Retrieval:
    """Images of a gallery that are most similar to a query in one attribute, or in each: `dear retrieve`.

    Args:
        run: run folder, archive, `hf://owner/name`, method or model; None: the heads of `backbone` are
            searched.
        query: an image.
        gallery: a folder of images, or what `open_data` takes (its test split), or an image set.
        by: "heads": the contributions of the heads with that role, the query itself is left out; "features":
            the attribute features of a DeAR run. None: heads where the role map has any, else features.
        roles: role map for the search by heads; None: the backbone's own.
        attribute: in any case; None: all of them.
        top: number of images.
        out: folder for one contact sheet per attribute, `color.png` and so on.
        backbone: the backbone to search with, or for a run folder, if the backbone moved.
        data_root: folder of the benchmarks, for a gallery that is the name of a benchmark.
        device: "auto", "cpu", "cuda", …
        progress: called with ("images", images read, images in all).

    Raises:
        UsageError: neither a run nor a backbone is named; the method has no attribute features; no head
            has that attribute.

    Example:
        >>> import dear
        >>> images = dear.open_data("world:scenes").subset(range(12))
        >>> image = images.image(3)
        >>> dear.retrieve(query=image, gallery=images, backbone="mini", attribute="location", top=2)
        <Retrieval: by heads, Location>
    """
    if by not in (None, "heads", "features"):
        raise UsageError(f"by must be heads or features, got {by!r}")
    if top < 1:
        raise UsageError(f"top must be at least 1, got {top}")
    if run is None and (by == "features" or backbone is None):
        raise UsageError(
            "retrieve needs run, or backbone to search by its heads, got neither", hint="backbone"
        )
    check_output(out, folder=True)
    open_image(query)  # a query that cannot be read is refused before the gallery is
    method = None if run is None else load_model(run, backbone, device).method
    clip = load_backbone(backbone, device) if method is None else method.clip
    by_heads = by == "heads" or method is None or (by is None and has_attribute_heads(clip, roles))
    if method is None or by_heads:
        result = _by_heads(clip, query, gallery, roles, attribute, top, data_root, progress or silent)
    else:
        result = _by_features(method, query, gallery, attribute, top, data_root, progress)
    if out is not None:
        result.write_sheets(out)
    return result


def _by_features(
    method: Method,
    query: ImageLike,
    gallery: PathLike | ImageSet,
    attribute: str | None,
    top: int,
    root: PathLike | None,
    progress: Progress | None,
) -> Retrieval:
    if not isinstance(method, DeAR):
        raise UsageError(f"the method {method.name!r} has no features per attribute; use a DeAR run")
    only = None if attribute is None else method.attributes[method.attribute_index(attribute)]
    images = gallery_of(gallery, root)
    matches = rank(method, query, gallery_features(method, images, progress), images, top)
    result = Retrieval(query, "features", tuple(matches), images)
    return _select(result, only, method.clip.name, names_caveat(method))


def names_caveat(method: Method) -> str:
    """A sentence where a method's attributes are named after a role map close to chance; else empty."""
    caveat = "" if method.roles is None else method.roles.caveat()
    return caveat and f"{caveat} The names of the attributes say little."


def contact_sheet(query: ImageLike, match: Match, images: ImageSet) -> Image.Image:
    """The query and its matches in a grid, with the cosines below."""
    cells: list[tuple[Image.Image, str]] = [(open_image(query), f"query: {Path(name_of(query)).name}")]
    for index, similarity in zip(match.indices, match.similarity, strict=True):
        cells.append((images.image(index), f"{similarity:.3f} {Path(images.key(index)).name}"))
    columns = min(_COLUMNS, len(cells))
    rows = -(-len(cells) // columns)
    wide, tall = _CELL + _GAP, _CELL + _LINE + _GAP
    sheet = Image.new("RGB", (columns * wide + _GAP, rows * tall + _LINE + 2 * _GAP), "white")
    pen = ImageDraw.Draw(sheet)
    pen.text((_GAP, _GAP // 2), f"most similar in {match.attribute}", fill="black")
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


def has_attribute_heads(clip: Clip, roles: PathLike | RoleMap | None = None) -> bool:
    """Whether the role map of a backbone has heads of an attribute to search images by."""
    known = resolve_roles(roles, clip)
    return known is not None and bool(attribute_heads(known))


def _by_heads(
    clip: Clip,
    query: ImageLike,
    gallery: PathLike | ImageSet,
    roles: PathLike | RoleMap | None,
    attribute: str | None,
    top: int,
    root: PathLike | None,
    progress: Progress,
) -> Retrieval:
    known = resolve_roles(roles, clip)
    spaces = {} if known is None else attribute_heads(known)
    if known is not None and known.caveat():
        raise UsageError(f"{known.caveat()} A search by attribute needs heads that know attributes.")
    if known is None or not spaces:
        raise UsageError(f"{clip.name}: no role map with heads of an attribute; compute one", hint="roles")
    only = None if attribute is None else find_attribute(attribute, spaces)
    images = gallery_of(gallery, root)
    searched = collect_contributions(
        clip, images, known.layers, progress=lambda done: progress("images", done, len(images))
    )
    query_set = ListedImages((query,), torch.zeros(1, dtype=torch.long), ("query",))
    one = collect_contributions(clip, query_set, known.layers)
    same = (F.normalize(searched.features, dim=1) @ F.normalize(one.features, dim=1)[0]) > SAME
    matches = []
    for name, heads in spaces.items():
        space, center = head_space(searched, heads)
        near = space @ head_space(one, heads, center)[0][0]
        matches.append(_nearest(name, near.masked_fill(same, -2.0), int((~same).sum()), images, top))
    return _select(Retrieval(query, "heads", tuple(matches), images), only, clip.name, "")


def _select(result: Retrieval, only: str | None, name: str, caveat: str) -> Retrieval:
    """The matches of one attribute, or all; the notice says where attributes can hardly be distinguished.

    `caveat` is a sentence about their names, or empty.
    """
    overlap = mean_overlap({match.attribute: match.indices for match in result.matches})
    notices = [caveat] if caveat else []
    longest = max(len(match.indices) for match in result.matches)
    small = 2 * longest > len(result.images)  # lists of a small gallery share images by chance
    if len(result.matches) > 1 and overlap >= ALIKE and not small:
        notices.append(
            f"attributes can hardly be distinguished on {name}: the lists of two attributes share "
            f"{overlap:.1%} of their images"
        )
    matches = tuple(match for match in result.matches if only in (None, match.attribute))
    return replace(result, matches=matches, overlap=overlap, notice=" ".join(notices) or None)


def _nearest(name: str, near: Tensor, available: int, images: ImageSet, top: int) -> Match:
    best = near.topk(min(top, available))
    places = best.indices.tolist()
    keys = tuple(images.key(place) for place in places)
    return Match(name, tuple(places), keys, tuple(best.values.tolist()))
