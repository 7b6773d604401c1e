"""The page that says why: bars per part, heatmaps, telling heads, answers without something."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dear.report.page import Table, Thumbnail, render, thumbnail
from dear.utils.files import write_atomic

TERMS = {
    "part": "what one piece of the model adds to the score of a class, above the mean of all classes; all "
    "parts of a class sum to its score exactly",
    "role": "heads that look at the same thing, such as the place or the color",
    "heatmap": "the same parts by patch of the image: red speaks for the class, blue against it; what heads "
    "take from other tokens than patches is not in it",
    "without heads": "what the heads of a role add to the image's feature is replaced by its mean over "
    "reference images; nothing else changes, and nothing is trained again",
    "without a concept": "as before for its heads, and the directions of its words are taken out of "
    "the feature",
    "lead lost": "how much of the lead over the other class goes away",
    "MLPs, embedding": "what the layers' other halves and the class token's start add: they belong "
    "to no head",
}

_SIDE = 224
_FOR, _AGAINST = (178, 24, 43), (33, 102, 172)


@dataclass(frozen=True)
class BarRow:
    """A part for both classes; widths are percent of half a row, negative to the left."""

    name: str
    kind: str
    values: tuple[str, str]
    widths: tuple[float, float]


@dataclass(frozen=True)
class ImageFacts:
    """What the page shows of one image."""

    name: str
    sentence: str
    classes: tuple[str, str]  #: explained, and compared with
    images: tuple[Thumbnail, ...]  #: the image and its heatmaps
    bars: tuple[BarRow, ...]
    roles: tuple[Thumbnail, ...]  #: a heatmap per group of heads
    heads: Table
    without: Table | None
    neighbors: tuple[Thumbnail, ...]
    notices: tuple[str, ...]


@dataclass(frozen=True)
class ExplainFacts:
    """Everything on the page."""

    title: str
    lead: str
    images: tuple[ImageFacts, ...]
    notes: Mapping[str, str]


@dataclass(frozen=True)
class SetFacts:
    """Everything on the page of a set."""

    title: str
    lead: str
    tiles: tuple[tuple[str, str], ...]
    table: Table
    unusual: tuple[Thumbnail, ...]
    notices: tuple[str, ...]
    notes: Mapping[str, str]


def write_explain_page(facts: ExplainFacts | SetFacts, out: str | os.PathLike[str]) -> None:
    """Write the page to the file `out`, whole or not at all."""
    template = "explain_set.html" if isinstance(facts, SetFacts) else "explain.html"
    write_atomic(out, render(template, title=facts.title, facts=facts, terms=TERMS))


def overlay(image: Image.Image, values: Tensor, scale: float | None = None) -> Image.Image:
    """An image with a heatmap [S, S] over it: red for, blue against; strongest at `scale`.

    >>> overlay(Image.new("RGB", (8, 8), "white"), torch.eye(2)).size
    (224, 224)
    """
    base = image.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)
    gray = torch.frombuffer(bytearray(base.convert("L").tobytes()), dtype=torch.uint8).float()
    gray = gray.view(_SIDE, _SIDE, 1).expand(-1, -1, 3) * 0.6 + 255 * 0.4
    strongest = float(values.abs().max()) if scale is None else scale
    wide = F.interpolate(values[None, None].float() / max(strongest, 1e-12), (_SIDE, _SIDE), mode="bicubic")[
        0, 0
    ].clamp(-1, 1)
    color = torch.where(wide[..., None] > 0, torch.tensor(_FOR), torch.tensor(_AGAINST)).float()
    alpha = 0.85 * wide.abs()[..., None].sqrt() * (wide.abs()[..., None] > 0.04)
    mixed = (gray * (1 - alpha) + color * alpha).round().clamp(0, 255).to(torch.uint8)
    return Image.frombytes("RGB", (_SIDE, _SIDE), bytes(mixed.contiguous().flatten().tolist()))


def heat(
    image: Image.Image, values: Tensor, text: str, *lines: tuple[str, str], scale: float | None = None
) -> Thumbnail:
    """An overlay as an image of a gallery."""
    return Thumbnail(thumbnail(overlay(image, values, scale), side=_SIDE), text, lines)
