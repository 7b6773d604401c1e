"""Colors and the plotly style of all pages, the studio and notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

INK, FAINT = "#1f2933", "#e4e7eb"

# Okabe and Ito's colors: people who do not see red or green can distinguish them.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#767676")
SERIES = {
    "zero-shot": "#767676", "auto": "#00456B", "fused": "#0072B2", "decoupled": "#56B4E9",
    "default": "#0072B2", "heads": "#0072B2", "whole feature": "#56B4E9", "random heads": "#767676",
    "chance": "#B8BFC6",
}  # fmt: skip
OTHER_SERIES = "#7A5195"
KIND_COLORS = {"other": "#c9c5d6", "generalization": "#9bd0f2", "mixed": "#eceae3"}
_CONCEPTS = {
    "class": "#5f6b76",
    "Color": "#D55E00",
    "Shape": "#E6A800",
    "Texture": "#009E73",
    "Object": "#0072B2",
    "Location": "#CC79A7",
}
_MORE_CONCEPTS = (
    "#9c8fb5", "#b59c8f", "#8fb5ac", "#a9b58f", "#b58f9f", "#8fa3b5", "#b3ad7d", "#a0a0a0", "#6f8f6f",
    "#8f6f8f",
)  # fmt: skip
_MORE_CORE = ("#7A5CC0", "#8A6D3B")


def concept_colors(core: Sequence[str], others: Iterable[str] = ()) -> dict[str, str]:
    """A color for every concept: strong ones for core concepts, quiet ones for the others.

    >>> concept_colors(["Color", "Smell"], ["Animal"])
    {'Color': '#D55E00', 'Smell': '#7A5CC0', 'Animal': '#9c8fb5'}
    """
    new = [name for name in core if name not in _CONCEPTS]
    strong = {name: _MORE_CORE[place % len(_MORE_CORE)] for place, name in enumerate(new)}
    colors = {name: _CONCEPTS.get(name) or strong[name] for name in core}
    quiet = sorted(set(others) - set(core))
    return colors | {name: _MORE_CONCEPTS[place % len(_MORE_CONCEPTS)] for place, name in enumerate(quiet)}


def attribute_color(name: str) -> str:
    """The color of the class token or an attribute in figures."""
    return _CONCEPTS.get(name, OTHER_SERIES)


def ink_on(color: str) -> str:
    """Black or white, whichever is easier to read on `color` (WCAG contrast).

    >>> ink_on("#0072B2"), ink_on("#E6A800")
    ('#fff', '#111')
    """
    light = _luminance(color)
    return "#fff" if 1.05 / (light + 0.05) > (light + 0.05) / (_luminance("#111111") + 0.05) else "#111"


def _luminance(color: str) -> float:
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def apply_style(figure: go.Figure, height: int, x: str = "", y: str = "", **layout: Any) -> go.Figure:
    """Give a figure the common look: white ground, thin grid, legend above, the page's own font."""
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 10, "r": 10, "t": 40, "b": 10},
        font={"family": "system-ui, sans-serif", "size": 13, "color": INK},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "itemclick": False},
        paper_bgcolor="white",
        plot_bgcolor="white",
        **layout,
    )
    common = {"gridcolor": FAINT, "zeroline": False, "automargin": True, "fixedrange": True}
    figure.update_xaxes(title_font_size=13, **common, **({"title_text": x} if x else {}))
    figure.update_yaxes(title_font_size=13, **common, **({"title_text": y} if y else {}))
    return figure


def label(text: str, limit: int = 28) -> str:
    """A name for an axis: short, and with nothing in it that plotly would take for HTML.

    >>> label("<b>cat</b>"), len(label("x" * 99))
    ('&lt;b&gt;cat&lt;/b&gt;', 28)
    """
    return escape(text if len(text) <= limit else text[: limit - 1] + "…")


def labels(names: Sequence[str]) -> list[str]:
    """Short names that still differ: plotly draws equal ones on top of each other."""
    short = [label(name) for name in names]
    return [text if short.count(text) == 1 else f"{text} ({number + 1})" for number, text in enumerate(short)]
