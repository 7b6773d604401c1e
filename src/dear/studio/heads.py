"""The Heads tab: the map of heads, and for one head its role, its images and where it looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.heads.ablate import Collected, collect
from dear.heads.batches import batches
from dear.heads.explain import excitement, gaze
from dear.heads.names import KIND_TITLES, KINDS
from dear.heads.roles import Role, RoleMap
from dear.report.figures import ATTRIBUTES
from dear.studio.desk import Desk, Tell

Key = tuple[int, int]
KIND_COLORS = {"other": "#b9b4c7", "generalization": "#7cc3ee", "mixed": "#eceae3"}
_DARK = {"#D55E00", "#009E73", "#0072B2"}
_LOOKED_AT, _SHOWN = 400, 6


class Viewer:
    """Answers about heads; the images run through the backbone once."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self._kept: tuple[RoleMap, ImageSet, Collected] | None = None

    def collected(self, tell: Tell | None = None) -> tuple[RoleMap, ImageSet, Collected]:
        """The role map, the images looked at, and what every head adds to each of them."""
        roles = self.desk.find_roles(tell)
        with self.desk.lock:
            if self._kept is None or self._kept[0] is not roles:
                every = self.desk.images
                some = every.subset(_spread(len(every), _LOOKED_AT))
                say = tell or (lambda what, done, total: None)
                kept = collect(
                    self.desk.clip, some, roles.layers, progress=lambda done: say("images", done, len(some))
                )
                self._kept = (roles, some, kept)
            return self._kept

    def view(self, key: Key, tell: Tell | None = None) -> HeadView:
        """Everything the tab shows about one head."""
        roles, images, kept = self.collected(tell)
        role, clip = roles[key], self.desk.clip
        phrase = role.phrases[0] if role.phrases else None
        text = None if phrase is None else clip.encode_text([phrase])[0].float().cpu()
        found = excitement(kept, key, text, phrase, _SHOWN)
        rows = [*found.most, *found.least]
        looks = torch.cat([gaze(clip, part, [key])[0].cpu() for part in batches(clip, images.subset(rows))])
        shown = [overlay(images.image(row), look) for row, look in zip(rows, looks, strict=True)]
        plain = [images.image(row) for row in rows]
        middle = len(found.most)
        return HeadView(key, role, phrase, plain[:middle], shown[:middle], plain[middle:], shown[middle:])

    def look(self, key: Key, image: Image.Image) -> Image.Image:
        """Where a head looks in a given image."""
        self.desk.find_roles()[key]  # a head that does not exist is told here
        return overlay(image, gaze(self.desk.clip, self.desk.pixels([image]), [key])[0, 0].cpu())


@dataclass(frozen=True)
class HeadView:
    """A head as the tab shows it: images that excite it most and least, plain and with its gaze on them."""

    key: Key
    role: Role
    phrase: str | None
    most: list[Image.Image]
    most_seen: list[Image.Image]
    least: list[Image.Image]
    least_seen: list[Image.Image]


def overlay(image: Image.Image, look: Tensor, side: int = 224) -> Image.Image:
    """An image's center square with a gaze [h, w] over it: bright and warm where the head looks."""
    from dear._io.image_file import square

    base = np.asarray(square(image, side), dtype=np.float32) / 255  # [side, side, 3]
    share = (look / look.max().clamp(min=1e-12)).clamp(0, 1).sqrt()  # one patch often leads by far
    small = Image.fromarray((255 * share).round().to(torch.uint8).numpy())
    heat = np.asarray(small.resize((side, side), Image.Resampling.BICUBIC), dtype=np.float32)[..., None] / 255
    grey = base.mean(axis=2, keepdims=True) * 0.55
    warm = _warm(heat[..., 0].astype(np.float32))
    mixed: NDArray[np.float32] = grey * (1 - heat) + (0.45 * base + 0.55 * warm) * heat
    return Image.fromarray((255 * mixed.clip(0, 1)).astype(np.uint8))


def _warm(heat: NDArray[np.float32]) -> NDArray[np.float32]:
    """Dark violet over orange to light yellow, [h, w] -> [h, w, 3]: rises in lightness, so it prints."""
    stops = np.array([0.0, 0.5, 1.0], dtype=np.float32)
    colors = np.array([[0.25, 0.0, 0.4], [0.9, 0.4, 0.1], [1.0, 0.98, 0.6]], dtype=np.float32)
    return np.stack([np.interp(heat, stops, colors[:, c]) for c in range(3)], axis=-1).astype(np.float32)


def parse_key(text: str, roles: RoleMap) -> Key:
    """The head that "12-7" or "12, 7" names.

    Raises:
        UsageError: it names none.
        RoleError: the map has no such head.
    """
    parts = text.replace(",", "-").split("-")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
        raise UsageError(f"{text!r} is not a head; write layer and head as 12-7")
    key = (int(parts[0]), int(parts[1]))
    roles[key]
    return key


def first_key(roles: RoleMap) -> Key:
    """A head worth starting with: the last core head with the lowest entropy, or the last head of all."""
    core = roles.select("core") or tuple(key for key, _ in roles)
    return min(reversed(core), key=lambda key: roles[key].entropy or 0.0)


def map_html(roles: RoleMap, chosen: Key | None = None) -> str:
    """The map as a table of buttons: one row a layer, one button a head, colored by role.

    Each button carries `data-head`; arrow keys move between them (see `app`).
    """
    head = "".join(f'<th scope="col">{number}</th>' for number in range(roles.heads))
    rows = []
    for layer in reversed(roles.layers):
        cells = "".join(_cell((layer, number), roles[layer, number], chosen) for number in range(roles.heads))
        rows.append(f'<tr><th scope="row">{layer}</th>{cells}</tr>')
    legend = [(f"Core: {name}", ATTRIBUTES.get(name, "#7A5195")) for name in roles.core]
    legend += [(KIND_TITLES[kind], KIND_COLORS[kind]) for kind in KINDS if kind != "core"]
    items = "".join(f'<li><i style="background:{color}"></i>{escape(name)}</li>' for name, color in legend)
    return (
        '<div class="dear-map"><table aria-label="Heads by layer; choose one"><thead><tr>'
        f'<th scope="col"><span class="dear-hidden">layer</span></th>{head}</tr></thead>'
        f'<tbody>{"".join(rows)}</tbody></table></div><ul class="dear-legend">{items}</ul>'
    )


def _cell(key: Key, role: Role, chosen: Key | None) -> str:
    color = ATTRIBUTES.get(str(role.concept), "#7A5195") if role.kind == "core" else KIND_COLORS[role.kind]
    ink = "#fff" if color in _DARK else "#111"
    words = KIND_TITLES[role.kind] + (f", {role.concept}" if role.concept else "")
    pressed = "true" if key == chosen else "false"
    return (
        f'<td><button type="button" data-head="{key[0]}-{key[1]}" aria-pressed="{pressed}" '
        f'style="background:{color};color:{ink}" title="{escape(words)}" '
        f'aria-label="layer {key[0]}, head {key[1]}: {escape(words)}">'
        f"{escape(role.concept or role.kind)}</button></td>"
    )


def describe_html(view: HeadView) -> str:
    """Role, entropy, shares of concepts and phrases of a head, in words."""
    role = view.role
    title = KIND_TITLES[role.kind] + (f": {role.concept}" if role.concept else "")
    entropy = "not measured" if role.entropy is None else f"{role.entropy:.2f} bits"
    shares = "".join(
        f"<li><span>{escape(name)}</span><meter min=0 max=1 value={share:.3f}>{share:.0%}</meter></li>"
        for name, share in list(role.shares.items())[:6]
    )
    phrases = "".join(f"<li>{escape(phrase)}</li>" for phrase in role.phrases)
    along = (
        f"Images are ordered along the head’s first phrase, “{escape(view.phrase)}”."
        if view.phrase
        else "Images are ordered along the direction in which the head’s output varies most."
    )
    listed = f"<h4>Its phrases</h4><ol>{phrases}</ol>" if phrases else ""
    return (
        f'<div class="dear-head"><h3>Layer {view.key[0]}, head {view.key[1]}: {escape(title)}</h3>'
        f"<p>Concept Entropy {entropy}. {along}</p>"
        + (f'<ul class="dear-shares">{shares}</ul>' if shares else "")
        + f"{listed}</div>"
    )


def _spread(total: int, most: int) -> Sequence[int]:
    """At most `most` numbers below `total`, evenly apart."""
    count = min(total, most)
    return [place * total // count for place in range(count)]
