"""Images of scenes: place, then subjects with color and texture, then style.

Everything is vectorized over the batch. Scenes are grouped by place, texture and style, one group after
another; within a group every operation is elementwise or a table lookup, so an image does not depend on
which others are rendered with it. See `exact` for why the bits are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dear.world import factors as F
from dear.world.atlas import REACH, UNIT, atlas
from dear.world.atlas import SIDE as ATLAS_SIDE
from dear.world.exact import column, fraction, rotation
from dear.world.patterns import marks
from dear.world.places import backdrop
from dear.world.scenes import Scenes
from dear.world.styles import OUTLINE, STYLES

SIDE = 64
_CPU_CHUNK = 512  # bounds the memory in use; many short operations would make two threads wait for each other
_INK = (0.09, 0.08, 0.10)
_CHALK = (0.66, 0.66, 0.69)  # used instead of ink on black subjects
_PAPER = (0.96, 0.96, 0.93)

# Half size of a subject's copies, and their centers in pixels from the center of a 64-pixel image, by count.
_LAYOUTS: dict[int, tuple[float, tuple[tuple[float, float], ...]]] = {
    1: (21.0, ((0.0, 0.0),)),
    2: (14.0, ((-15.5, 2.0), (15.5, -2.0))),
    3: (12.5, ((-15.5, -13.0), (15.5, -12.0), (0.0, 14.5))),
    4: (12.0, ((-15.5, -15.0), (15.5, -15.5), (-15.0, 15.5), (15.5, 15.0))),
    5: (10.5, ((-20.0, -19.0), (20.0, -20.0), (0.0, 0.0), (-20.0, 20.0), (20.0, 19.0))),
}


def rows_by_value(ids: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """Pairs of an id that occurs and its rows, with one device synchronization in all."""
    order = ids.argsort(stable=True)
    counts = torch.bincount(ids, minlength=size).tolist()
    start = 0
    for value, count in enumerate(counts):
        if count:
            yield value, order[start : start + count]
            start += count


class Tables(NamedTuple):
    """Lookup tables on a device."""

    palette: Tensor  #: float32 [colors, 3 tones, 3]: body, first and second mark tone of every color
    sizes: Tensor  #: [counts], half sizes by count - 1
    centers: Tensor  #: [counts, 5, 2]
    outline: Tensor  #: [styles]
    detailed: Tensor  #: bool [kinds], whether subjects of a kind have layers besides the body
    paper: Tensor  #: [3], the light layer's tone
    strokes: Tensor  #: [2, 3], the dark layer's tone on any color and on black


@lru_cache(maxsize=8)
def tables(device: str) -> Tables:
    """The tables, made once."""
    centers = torch.zeros(5, 5, 2)
    for count, (_, places) in _LAYOUTS.items():
        centers[count - 1, :count] = torch.tensor(places)
    plain = (F.SHAPE, F.LETTER, F.DIGIT, F.SURFACE, F.VIEW)
    tables = Tables(
        torch.tensor([(color.rgb, *color.marks) for color in F.COLORS]),
        torch.tensor([half for half, _ in _LAYOUTS.values()]),
        centers,
        torch.tensor(OUTLINE),
        torch.tensor([kind not in plain for kind in range(len(F.KINDS))]),
        torch.tensor(_PAPER),
        torch.tensor((_INK, _CHALK)),
    )
    return Tables(*(table.to(device) for table in tables))


@torch.no_grad()
def render(scenes: Scenes) -> Tensor:
    """Render scenes.

    Returns:
        uint8 [B, 3, 64, 64] on the scenes' device.

    >>> from dear.world.scenes import sample
    >>> render(sample(4, torch.Generator().manual_seed(1))).shape
    torch.Size([4, 3, 64, 64])
    """
    if scenes.device.type != "cpu" or len(scenes) <= _CPU_CHUNK:
        return to_bytes(apply_styles(scenes, compose(scenes)))
    pieces = [slice(start, start + _CPU_CHUNK) for start in range(0, len(scenes), _CPU_CHUNK)]
    return torch.cat([render(scenes[piece]) for piece in pieces])


def to_bytes(pixels: Tensor) -> Tensor:
    """Pixels in 0..1 to uint8, rounded to nearest."""
    return (pixels * 255.0 + 0.5).clamp_(0, 255).to(torch.uint8)


def apply_styles(scenes: Scenes, pixels: Tensor) -> Tensor:
    """Finished images [B, 3, side, side] in 0..1, each in its scene's style."""
    result = torch.empty_like(pixels)
    for style, rows in rows_by_value(scenes.style, len(F.STYLES)):
        result[rows] = STYLES[style](pixels[rows], scenes[rows])
    return result


def compose(scenes: Scenes, tones: Tensor | None = None) -> Tensor:
    """Place and subjects, before any style.

    Args:
        scenes: what to draw.
        tones: a palette [colors, 3, 3] to use instead of the world's.

    Returns:
        float32 [B, 3, side, side] in 0..1.
    """
    device = scenes.device
    pixels = torch.empty(len(scenes), 3, SIDE, SIDE, device=device)
    for place, rows in rows_by_value(scenes.place, len(F.PLACES)):
        pixels[rows] = backdrop(place, scenes[rows], SIDE)
    coat = _coat(scenes, tables(str(device)).palette if tones is None else tones)
    # Most scenes have one copy, so the later rounds draw few.
    _draw_copy(pixels, coat, scenes, 0)
    multiple = (scenes.count > 1).nonzero().flatten()
    if len(multiple):
        for copy in range(1, len(F.COUNTS)):
            rows = multiple[scenes.count[multiple] > copy]
            part = pixels[rows]
            _draw_copy(part, coat[rows], scenes[rows], copy)
            pixels[rows] = part
    return pixels


def paste(pixels: Tensor, scenes: Scenes, corner: Tensor) -> None:
    """Draw each scene's subject into a corner of `pixels` [B, 3, side, side], in place.

    Args:
        pixels: images in 0..1.
        scenes: what to draw; place and count do not matter.
        corner: int64 [B], 0 to 3: top left, top right, bottom left, bottom right.
    """
    half = torch.full_like(scenes.variation("size"), SIDE / 4)
    right, low = (corner % 2).to(half), (corner // 2).to(half)
    placement = (half, SIDE / 4 + right * SIDE / 2, SIDE / 4 + low * SIDE / 2)
    _draw(pixels, _coat(scenes, tables(str(scenes.device)).palette), scenes, placement, 0)


def _coat(scenes: Scenes, tones: Tensor) -> Tensor:
    """float32 [B, 3, side, side]: color and texture as if they filled the whole image."""
    body = tones[scenes.color, 0]  # [B, 3]
    jitter = torch.stack([scenes.variation(name) for name in ("red", "green", "blue")], dim=1)
    bright = 0.88 + 0.2 * scenes.variation("bright")[:, None]
    body = (body + (jitter - 0.5) * 0.08) * bright
    dark_marks = (scenes.variation("mark") < 0.5)[:, None]
    mark = torch.where(dark_marks, tones[scenes.color, 1], tones[scenes.color, 2]) * bright
    coat = body.view(-1, 3, 1, 1).expand(-1, 3, SIDE, SIDE).contiguous()
    for texture, rows in rows_by_value(scenes.texture, len(F.TEXTURES)):
        weight = marks(texture, scenes[rows], SIDE)
        if weight is not None:
            low, high = body[rows].view(-1, 3, 1, 1), mark[rows].view(-1, 3, 1, 1)
            coat[rows] = low + (high - low) * weight.unsqueeze(1)
    return coat


def _draw_copy(pixels: Tensor, coat: Tensor, scenes: Scenes, copy: int) -> None:
    """Draw one copy of every scene's subject onto `pixels` [b, 3, side, side]."""
    lookup, row = tables(str(scenes.device)), scenes.count - 1
    single, size = scenes.count == 1, scenes.variation("size")
    half = lookup.sizes[row] * torch.where(single, 0.78 + 0.44 * size, 0.9 + 0.16 * size)
    center = lookup.centers[row, copy]  # [b, 2]
    room = torch.where(single, (31.0 - half).clamp_min(0) * 0.9, 1.5)
    cx = 32.0 + center[:, 0] + (scenes.variation("x") - 0.5) * 2.0 * room
    cy = 32.0 + center[:, 1] + (scenes.variation("y") - 0.5) * 2.0 * room
    _draw(pixels, coat, scenes, (half, cx, cy), copy)


def _draw(
    pixels: Tensor, coat: Tensor, scenes: Scenes, placement: tuple[Tensor, Tensor, Tensor], copy: int
) -> None:
    """Draw every scene's subject; `placement` is half size and center x and y, each [b], in pixels."""
    half, cx, cy = placement
    device = str(scenes.device)
    lookup, sprites, kind = tables(device), atlas(device), scenes.kind
    # Copies lean a little differently; letters and figures stay upright enough to be read.
    turn = scenes.variation("turn")
    lean = (turn if copy == 0 else fraction(turn + copy * 0.37)) - 0.5
    cos, sin = rotation(lean * torch.where(kind == F.SHAPE, 0.34, 0.2))
    flips = (scenes.variation("flip") < 0.5) & (kind != F.LETTER) & (kind != F.DIGIT) & (kind != F.FACE)
    mirror = torch.where(flips, -1.0, 1.0)

    axis = torch.arange(SIDE, device=scenes.device, dtype=torch.float32) + 0.5
    dx, dy = axis - cx[:, None], axis - cy[:, None]  # [b, side]
    grain = ATLAS_SIDE / (2 * REACH) / half[:, None]
    middle = ATLAS_SIDE / 2
    right, down = dx * (cos[:, None] * grain), dy * (sin[:, None] * grain)
    across = (right[:, None, :] + down[:, :, None]) * column(mirror) + middle
    right, down = dx * (sin[:, None] * grain), dy * (cos[:, None] * grain) + middle
    along = down[:, :, None] - right[:, None, :]
    top = ATLAS_SIDE - 1
    index = along.clamp_(0, top).int().mul_(ATLAS_SIDE).add_(across.clamp_(0, top).int())
    index.add_(column(scenes.subject.int() * (ATLAS_SIDE * ATLAS_SIDE)))
    words = sprites.words.index_select(0, index.flatten()).view(-1, SIDE, SIDE, 1)
    layers = words.view(torch.uint8)  # [b, side, side, 4], distances in steps

    # Coverage of a pixel: half at the edge, falling over one pixel.
    slope, level = UNIT * half, 0.5 + 128 * UNIT * half
    outline = level + lookup.outline[scenes.style]
    nearest = layers.amin(-1).float()
    ink = (column(outline) - nearest * column(slope)).clamp_(0, 1)
    ink *= column(torch.where(kind == F.SURFACE, 0.0, 0.62))
    black = column(scenes.color == F.row("color", "black"))
    for channel in range(3):
        layer = pixels[:, channel]
        layer += (torch.where(black, _CHALK[channel], _INK[channel]) - layer) * ink

    cover = (column(level) - layers[..., 0].float() * column(slope)).clamp_(0, 1)
    light_x = (scenes.variation("light_x") - 0.5)[:, None] * 0.30 / half[:, None]
    light_y = -(0.04 + 0.12 * scenes.variation("light_y"))[:, None] / half[:, None]
    shade = (dx * light_x + 1.0)[:, None, :] + (dy * light_y)[:, :, None]
    shade = shade.clamp_(0.75, 1.25).unsqueeze(1)
    pixels += (coat * shade - pixels) * cover.unsqueeze(1)

    rows = lookup.detailed[kind].nonzero().flatten()
    if len(rows):
        part, details = pixels[rows], layers[rows]
        tint = sprites.tints[scenes.subject[rows]]
        slope, level = column(slope[rows]), column(level[rows])
        strokes = lookup.strokes[black[rows].view(-1).long()]
        for number, color in ((1, tint), (2, lookup.paper.expand_as(tint)), (3, strokes)):
            cover = (level - details[..., number].float() * slope).clamp_(0, 1)
            for channel in range(3):
                layer = part[:, channel]
                layer += (column(color[:, channel]) - layer) * cover
        pixels[rows] = part
