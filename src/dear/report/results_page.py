"""The results page of a grid: figures and tables in one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from dear.report.page import POLICY

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from dear.bench.tables import Sheet

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2933; background: #fff; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
p.lead { color: #52606d; margin: 0 0 1.5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #e4e7eb; white-space: nowrap; text-align: left; }
thead th { border-bottom: 2px solid #9aa5b1; }
th.n, td.n { text-align: right; }
tbody th { font-weight: 500; }
tr.first th, tr.first td { border-top: 2px solid #cbd2d9; }
tr.published { color: #616e7c; font-style: italic; background: #f7f9fb; }
tr.published th:last-of-type::after { content: "published"; font-size: .75em; font-style: normal; }
tr.published th:last-of-type::after { padding: 0 .35em; border: 1px solid #cbd2d9; border-radius: .6em; }
ul.notes { color: #52606d; font-size: .9rem; padding-left: 1.2rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .9rem; }
dt { color: #52606d; }
dd { margin: 0; overflow-wrap: anywhere; }
.failed { color: #9b1c1c; }
"""


def results_page(
    title: str,
    lead: str,
    figures: Sequence[tuple[str, str, go.Figure]],
    tables: Sequence[tuple[Sheet, Sequence[Sequence[str]]]],
    facts: Mapping[str, str],
    failed: Mapping[str, str] | None = None,
) -> str:
    """The whole page as HTML.

    Args:
        title: heading and window title.
        lead: a sentence below it.
        figures: (heading, sentence, figure), in order.
        tables: sheets with the text of each number, row by row.
        facts: how the numbers came about (command, backbone, versions).
        failed: cells that failed, and why.
    """
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="lead">{escape(lead)}</p>']
    if failed:
        parts.append(f'<h2 class="failed">Failed cells: {len(failed)}</h2>')
        items = "".join(f"<li>{escape(cell)}: {escape(why)}</li>" for cell, why in failed.items())
        parts.append(f'<ul class="notes failed">{items}</ul>')
    for number, (heading, sentence, figure) in enumerate(figures):
        parts.append(f"<section><h2>{escape(heading)}</h2><p>{escape(sentence)}</p>")
        parts.append(_figure_html(figure, first=number == 0))
        parts.append("</section>")
    parts += [_table_html(sheet, cells) for sheet, cells in tables]
    parts.append("<h2>How these numbers were made</h2><dl>")
    parts += [f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items()]
    parts.append("</dl>")
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
    )
    return f"{head}<body>{''.join(parts)}</body></html>\n"


def _figure_html(figure: go.Figure, first: bool) -> str:
    """A figure as HTML; the first one brings plotly's program along, so that the page needs no network."""
    import plotly.io

    html: str = plotly.io.to_html(
        figure,
        full_html=False,
        include_plotlyjs=first,
        config={"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["lasso2d", "select2d"]},
    )
    return html


def _table_html(sheet: Sheet, cells: Sequence[Sequence[str]]) -> str:
    """A sheet as an HTML table that scrolls by itself."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in sheet.labels)
    head += "".join(f'<th scope="col" class="n">{escape(name)}</th>' for name in sheet.columns)
    body = []
    before = None
    for row, numbers in zip(sheet.rows, cells, strict=True):
        kinds = (["published"] if row.published else []) + (
            ["first"] if row.labels[0] != before and before is not None and len(row.labels) > 1 else []
        )
        before = row.labels[0]
        mark = f' class="{" ".join(kinds)}"' if kinds else ""
        labels = "".join(f'<th scope="row">{escape(label)}</th>' for label in row.labels)
        values = "".join(f'<td class="n">{escape(number)}</td>' for number in numbers)
        body.append(f"<tr{mark}>{labels}{values}</tr>")
    notes = "".join(f"<li>{escape(note)}</li>" for note in sheet.notes)
    return (
        f'<h2>{escape(sheet.title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f'<tbody>{"".join(body)}</tbody></table></div><ul class="notes">{notes}</ul>'
    )
