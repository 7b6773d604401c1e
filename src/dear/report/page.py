"""What every page shares: templates with autoescape, figures, thumbnails, and values that components take."""

from __future__ import annotations

import base64
import functools
import io
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import plotly.io
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL.Image import Image, Resampling

MODE_TERMS = {
    "fused": "the class token and all other learned tokens score together",
    "decoupled": "the class token scores alone",
    "auto": "fused for classes that were trained, decoupled for new ones",
}
"""What the modes of a method mean, in all pages."""


@dataclass(frozen=True)
class Table:
    """A table of plain text for the component `table`."""

    columns: tuple[str, ...]  #: headings
    rows: tuple[tuple[str, ...], ...]  #: texts, one per column
    labels: int = 1  #: how many of the first columns name the row; the others are numbers
    #: CSS class of each row ("published", "best", …), empty where there is none
    classes: tuple[str, ...] = ()

    @property
    def stacks(self) -> bool:
        """Whether a narrow screen shows the cells of a row below each other: side by side they do not fit.

        Tables with many short cells scroll instead.
        """
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        if len(self.columns) > 7:
            return max(widths[1:], default=0) > 24
        return len(self.columns) > 2 and sum(widths) > 44


@dataclass(frozen=True)
class Thumbnail:
    """An image of the component `gallery`."""

    source: str  #: data URL
    text: str  #: what the image shows, for readers who do not see it
    #: (style, text) below it; style is "name", "right", "wrong" or "soft"
    lines: tuple[tuple[str, str], ...] = ()


def render(template: str, **values: Any) -> str:
    """A template of `dear/report/templates` with its values; every value is escaped unless it is Markup.

    Templates draw plotly figures with `draw(figure, text)`.

    >>> "<title>a &lt; b</title>" in render("base.html", title="a < b")
    True
    """
    return _environment().get_template(template).render(draw=Figures().html, **values)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("dear.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = percent
    environment.filters["points"] = lambda value: f"{100 * value:+.1f}"
    environment.globals["asset"] = asset
    return environment


def asset(name: str) -> Markup:
    """A style sheet or script of the package, as it is."""
    source, _, _ = _environment().loader.get_source(_environment(), name)  # type: ignore[union-attr]
    return Markup(source)


class Figures:
    """Turns figures into HTML; the first one brings plotly's program along: the page needs no network."""

    def __init__(self) -> None:
        self._count = 0

    def html(self, figure: go.Figure, text: str) -> Markup:
        """A figure as HTML; `text` says in words what it shows."""
        self._count += 1
        inner = plotly.io.to_html(
            figure,
            full_html=False,
            include_plotlyjs=self._count == 1,
            div_id=f"figure-{self._count}",
            config={"displayModeBar": False, "responsive": True},
        )
        components: Any = _environment().get_template("components.html").module
        drawn: Markup = components.figure(Markup(inner), text)
        return drawn


def thumbnail(image: Image, side: int = 144) -> str:
    """An image as a data URL, its short side at most `side` pixels; small ones are enlarged unblurred."""
    image = image.convert("RGB")
    short = min(image.size)
    if short > side:
        image = image.resize(
            (max(1, image.width * side // short), max(1, image.height * side // short)),
            Resampling.BICUBIC,
        )
    elif short <= side // 2:
        image = image.resize(
            (image.width * (side // short), image.height * (side // short)), Resampling.NEAREST
        )
    file = io.BytesIO()
    image.save(file, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def iframe(page: str) -> str:
    """A whole page for a notebook, in an iframe so that styles do not mix.

    >>> iframe("<p>a</p>").count("&lt;p&gt;")
    1
    """
    frame = Markup('<iframe srcdoc="{}" style="width:100%;height:900px;border:0"></iframe>')
    return str(frame.format(page))


def percent(value: float) -> str:
    """A share of 1 for people.

    >>> percent(0.8571)
    '85.7%'
    """
    return f"{100 * value:.1f}%"
