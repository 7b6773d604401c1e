"""Scenes: the contents of a batch of images as tensors, and how scenes are sampled.

One call to the generator draws everything a batch needs, and categories come from comparing uniform numbers
with tables: the same seed draws the same scenes on any machine. A CPU generator can feed any device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dear.world import factors as F

# Unnamed variation: columns of `Scenes.nuisance`, each uniform in 0..1.
NUISANCES = (
    *("size", "x", "y", "turn", "flip", "light_x", "light_y", "bright"),
    *("red", "green", "blue", "mark", "period", "pattern_turn", "pattern_swap", "pattern_x", "pattern_y"),
    *("place_0", "place_1", "place_2", "place_3", "place_4", "place_5", "place_6", "place_7"),
    *("noise_x", "noise_y", "style_0", "style_1"),
)
_DRAWS = (
    "kind",
    "subject",
    "color",
    "texture",
    "textured",
    "place",
    "multiple",
    "count",
    "style",
    "plain_if_multiple",
)
PHOTO_SHARE = 0.5
ABSENT = -1


@dataclass(frozen=True)
class Scenes:
    """A batch of scenes, all tensors on one device."""

    subject: Tensor  #: int64 [B], row of `factors.SUBJECT_NAMES`
    color: Tensor  #: int64 [B]
    texture: Tensor  #: int64 [B]
    place: Tensor  #: int64 [B]
    count: Tensor  #: int64 [B], how many of the subject, from 1
    style: Tensor  #: int64 [B]
    nuisance: Tensor  #: float32 [B, len(NUISANCES)]

    def __len__(self) -> int:
        """Number of scenes."""
        return int(self.subject.shape[0])

    def __getitem__(self, rows: slice | Tensor) -> Scenes:
        """Some of the scenes, in the order of `rows`."""
        return Scenes(*(getattr(self, field.name)[rows] for field in fields(self)))

    @property
    def device(self) -> torch.device:
        """Where the scenes are."""
        return self.subject.device

    @property
    def kind(self) -> Tensor:
        """int64 [B], row of `factors.KINDS`."""
        return _tables(str(self.device)).kind_of[self.subject]

    def to(self, device: torch.device | str) -> Scenes:
        """The same scenes on another device."""
        return Scenes(*(getattr(self, field.name).to(device) for field in fields(self)))

    def replace(self, **values: Tensor) -> Scenes:
        """The same scenes with some tensors replaced."""
        return Scenes(*(values.get(field.name, getattr(self, field.name)) for field in fields(self)))

    def variation(self, name: str) -> Tensor:
        """float32 [B]: one column of the unnamed variation."""
        return self.nuisance[:, NUISANCES.index(name)]

    def factors(self) -> Tensor:
        """int64 [B, F]: the value of every factor, -1 where the image cannot show it.

        Columns follow `factors.FACTORS`; count is stored from 0 ("one" is 0). A surface has no place, a
        view no color or texture, a sketch no color, and only what can be drawn several times has a count.
        """
        tables, kind = _tables(str(self.device)), self.kind
        view, surface = kind == F.VIEW, kind == F.SURFACE
        hidden = tables.colorless[self.style]
        values = [
            kind,
            self.subject,
            self.color.masked_fill(view | hidden, ABSENT),
            self.texture.masked_fill(view | (tables.textured[kind] <= 0), ABSENT),
            self.place.masked_fill(surface, ABSENT),
            (self.count - 1).masked_fill(tables.multiple[kind] <= 0, ABSENT),
            self.style,
        ]
        return torch.stack(values, dim=1)


class _Tables(NamedTuple):
    """Lookup tables on a device, by kind or by style."""

    kind_of: Tensor  # by subject
    first: Tensor
    size: Tensor
    kind_edges: Tensor
    textured: Tensor
    multiple: Tensor
    colorless: Tensor
    coarse: Tensor
    dull: Tensor


@lru_cache(maxsize=8)
def _tables(device: str) -> _Tables:
    shares = torch.tensor([kind.share for kind in F.KINDS], dtype=torch.float64).cumsum(0)
    styles = range(len(F.STYLES))
    tables = _Tables(
        torch.tensor(F.SUBJECT_KIND),
        torch.tensor(F.KIND_FIRST),
        torch.tensor(F.KIND_SIZES),
        (shares / shares[-1])[:-1].float(),
        torch.tensor([kind.textured for kind in F.KINDS]),
        torch.tensor([kind.multiple for kind in F.KINDS]),
        torch.tensor([style in F.COLORLESS_STYLES for style in styles]),
        torch.tensor([style in F.COARSE_STYLES for style in styles]),
        torch.tensor([style in (*F.COARSE_STYLES, F.NEON) for style in styles]),
    )
    return _Tables(*(table.to(device) for table in tables))


def is_held_out(scenes: Scenes) -> Tensor:
    """Whether each scene [B] combines color, texture, shape and place as pretraining never does.

    A fixed integer hash names about one composition in ten; only scenes of shapes can be held out.

    >>> scenes = sample(256, torch.Generator().manual_seed(0))
    >>> bool(is_held_out(scenes).any())
    False
    """
    return _is_held_out(scenes.subject, scenes.color, scenes.texture, scenes.place)


def _is_held_out(subject: Tensor, color: Tensor, texture: Tensor, place: Tensor) -> Tensor:
    key = ((subject * 16 + color) * 16 + texture) * 16 + place
    key = (key * 40503 + 12345) % 1048573
    key = (key * key + 7919 * key) % 1048573
    return (key % 10 == 0) & (subject < F.KIND_SIZES[F.SHAPE])


def _to_integers(uniform: Tensor, size: Tensor | int) -> Tensor:
    """Uniform numbers in 0..1 to integers below `size`."""
    top = size - 1
    index = (uniform * size).floor().long()
    return torch.minimum(index, top) if isinstance(top, Tensor) else index.clamp_max(top)


def sample(
    number: int,
    generator: torch.Generator,
    device: torch.device | str | None = None,
    *,
    kinds: tuple[int, ...] | None = None,
    avoid_held_out: bool = True,
) -> Scenes:
    """Draw scenes for pretraining.

    Args:
        number: of scenes (B).
        generator: source of randomness; a CPU generator draws the same scenes on every machine.
        device: where the scenes go (default: the generator's device).
        kinds: only these kinds (rows of `factors.KINDS`), equally often; default: all by their shares.
        avoid_held_out: leave out the compositions that `is_held_out` names.
    """
    source = generator.device
    uniform = torch.rand(number, len(_DRAWS) + len(NUISANCES), generator=generator, device=source)
    if device is not None:
        uniform = uniform.to(device)
    draw = {name: uniform[:, i] for i, name in enumerate(_DRAWS)}
    tables = _tables(str(uniform.device))
    if kinds is None:
        kind = torch.bucketize(draw["kind"].contiguous(), tables.kind_edges, right=True)
    else:
        kind = torch.tensor(kinds, device=uniform.device)[_to_integers(draw["kind"], len(kinds))]
    subject = tables.first[kind] + _to_integers(draw["subject"], tables.size[kind])
    color = _to_integers(draw["color"], len(F.COLORS))
    place = _to_integers(draw["place"], len(F.PLACES))
    other_style = (draw["style"] - PHOTO_SHARE) / (1 - PHOTO_SHARE)
    style = torch.where(
        other_style < 0, F.PHOTO, 1 + _to_integers(other_style.clamp_min(0), len(F.STYLES) - 1)
    )
    # A surface is all pattern: styles that hide patterns would leave nothing to see.
    style = torch.where((kind == F.SURFACE) & tables.dull[style], F.PHOTO, style)
    multiple = draw["multiple"] < tables.multiple[kind]
    count = torch.where(multiple, 2 + _to_integers(draw["count"], len(F.COUNTS) - 1), 1)
    # Small copies and coarse styles show a pattern badly: there most subjects stay plain.
    textured = (draw["textured"] < tables.textured[kind]) & ~(multiple & (draw["plain_if_multiple"] < 0.7))
    textured &= ~tables.coarse[style]
    texture = torch.where(textured, 1 + _to_integers(draw["texture"], len(F.TEXTURES) - 1), F.PLAIN)
    if avoid_held_out:
        place = _allowed_place(subject, color, texture, place)
    return Scenes(subject, color, texture, place, count, style, uniform[:, len(_DRAWS) :].contiguous())


def _allowed_place(subject: Tensor, color: Tensor, texture: Tensor, place: Tensor) -> Tensor:
    """The first place from the drawn one on (cyclic) whose composition is not held out."""
    result, settled = place, torch.zeros_like(place, dtype=torch.bool)
    for step in range(len(F.PLACES)):
        candidate = (place + step) % len(F.PLACES)
        allowed = ~_is_held_out(subject, color, texture, candidate) & ~settled
        result = torch.where(allowed, candidate, result)
        settled |= allowed
    return result
