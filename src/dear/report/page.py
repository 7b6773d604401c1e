"""What every page shares: the frame, its style, figures and thumbnails, all in one file."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from PIL.Image import Image, Resampling

if TYPE_CHECKING:
    import plotly.graph_objects as go

STYLE = """
:root { color-scheme: light; --ink: #1f2933; --soft: #52606d; --line: #e4e7eb; --blue: #0072b2; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: #fff; margin: 0 auto;
  max-width: 68rem; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.75rem 0 .25rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
p { margin: .25rem 0 .75rem; max-width: 46rem; } p.lead, .soft { color: var(--soft); }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0; padding: 0; list-style: none; }
.tiles li { flex: 1 1 9rem; border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
.tiles b { display: block; font-size: 1.6rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: .85rem; }
.images { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); gap: .9rem;
  padding: 0; margin: .75rem 0; list-style: none; }
.images img { width: 100%; aspect-ratio: 1; object-fit: cover; border-radius: .4rem; display: block;
  background: #f1f3f5; }
.images p { margin: .3rem 0 0; font-size: .85rem; line-height: 1.35; overflow-wrap: anywhere; }
.right { color: #00664b; } .wrong { color: #a33b00; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: left; }
thead th { border-bottom: 2px solid #9aa5b1; } .n { text-align: right; white-space: nowrap; }
tbody th { font-weight: 500; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .9rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--blue); padding: .25rem 0; }
summary:focus-visible, a:focus-visible { outline: 3px solid #56b4e9; outline-offset: 2px; }
@media (max-width: 30rem) { body { padding: 1rem .8rem 3rem; } h1 { font-size: 1.35rem; } }
@media print { body { max-width: none; } h2 { break-after: avoid; } figure, tr, .images li {
  break-inside: avoid; } }
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


def document(title: str, parts: Iterable[str], style: str = "") -> str:
    """A whole HTML page around `parts`, which are HTML already; it may load nothing from anywhere.

    >>> "<title>a &lt; b</title>" in document("a < b", [])
    True
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def section(heading: str, sentence: str, *parts: str) -> str:
    """A heading, a sentence of plain text below it, and HTML."""
    return f"<section><h2>{escape(heading)}</h2><p>{escape(sentence)}</p>{''.join(parts)}</section>"


class Figures:
    """Turns figures to HTML; the first brings plotly's program along, so that the page needs no network."""

    def __init__(self) -> None:
        self._count = 0

    def html(self, figure: go.Figure, label: str) -> str:
        """A figure as HTML; `label` says in words what it shows."""
        import plotly.io

        self._count += 1
        inner: str = plotly.io.to_html(
            figure,
            full_html=False,
            include_plotlyjs=self._count == 1,
            div_id=f"figure-{self._count}",
            config={"displayModeBar": False, "responsive": True},
        )
        return f'<figure style="margin:0" role="img" aria-label="{escape(label)}">{inner}</figure>'


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


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table of plain text: the first column names the row, the others are numbers."""
    cells = "".join(
        f'<th scope="col"{" class=n" if place else ""}>{escape(name)}</th>' for place, name in enumerate(head)
    )
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f'<td class="n">{escape(value)}</td>' for value in row[1:])
        + "</tr>"
        for row in rows
    )
    words = f"<caption>{escape(caption)}</caption>" if caption else ""
    inner = f"{words}<thead><tr>{cells}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table>{inner}</table></div>'


def percent(value: float) -> str:
    r"""A share of 1 for people.

    >>> percent(0.8571)
    '85.7\xa0%'
    """
    return f"{100 * value:.1f}\N{NO-BREAK SPACE}%"
