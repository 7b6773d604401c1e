"""Figures of a grid's results: bars, few-shot curves, fusion weights, base against novel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dear.report.look import FAINT, INK, PALETTE, apply_style

if TYPE_CHECKING:
    from dear.bench.tables import Figure, Line

DASHES = ("solid", "dash", "dot", "dashdot")
MARKS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star", "pentagon")
PATTERNS = ("", "/", "x", ".")  # from the ninth series on colors come again, with a pattern
FILLINGS = ("", "-open", "-dot", "-open-dot")
HEADINGS = {
    "hm": "HM of base and novel (%)",
    "accuracy": "Accuracy (%)",
    "target": "Accuracy on the unseen domain (%)",
}


def series_name(line: Line) -> str:
    """Name of a series: the method, and its mode where it has several; nothing that plotly takes for HTML.

    >>> from dear.bench.tables import Line
    >>> series_name(Line("dear", "fused", "x", 16, {})), series_name(Line("coop", "default", "x", 16, {}))
    ('dear, fused', 'coop')
    """
    return escape(line.method if line.mode == "default" else f"{line.method}, {line.mode}")


def short_name(dataset: str) -> str:
    """A dataset's name for an axis: without `world:`, and nothing that plotly takes for HTML.

    >>> short_name("world:textures"), short_name("EuroSAT"), short_name("<b>")
    ('textures', 'EuroSAT', '&lt;b&gt;')
    """
    return escape(dataset.removeprefix("world:"))


def _spreads(measured: Sequence[tuple[object, Figure]]) -> list[float | None]:
    """Standard deviations in percent; None, drawn as nothing, where there is one seed."""
    return [None if value.std is None else 100 * value.std for _, value in measured]


def bars(lines: Sequence[Line], column: str) -> go.Figure:
    """One group of bars per dataset, one bar per method; `column` is a key of HEADINGS."""
    figure = go.Figure()
    for number, (name, rows) in enumerate(_series(lines).items()):
        figures = [(line.dataset, line.figure(column)) for line in rows]
        measured = [(dataset, value) for dataset, value in figures if value is not None]
        color, pattern = PALETTE[number % len(PALETTE)], PATTERNS[number // len(PALETTE) % len(PATTERNS)]
        figure.add_bar(
            name=name,
            x=[short_name(dataset) for dataset, _ in measured],
            y=[100 * value.mean for _, value in measured],
            error_y={"array": _spreads(measured), "color": INK, "thickness": 1},
            marker={
                "color": color,
                "pattern": {"shape": pattern, "bgcolor": color, "fgcolor": "white", "size": 5},
            },
            hovertemplate="%{x}<br>" + name + ": %{y:.2f}<extra></extra>",
        )
    figure.update_layout(barmode="group", bargap=0.25)
    return apply_style(figure, 380, "", HEADINGS[column])


def base_novel_scatter(lines: Sequence[Line]) -> go.Figure:
    """Novel against base accuracy: one color per method, one shape per dataset, with curves of equal HM.

    The first method's points carry the datasets' names.
    """
    figure = go.Figure()
    for hm in range(10, 100, 10):
        base = [hm / 2 + 0.25 + 0.25 * step for step in range(int((100 - hm / 2 - 0.25) / 0.25) + 1)]
        novel = [hm * b / (2 * b - hm) for b in base]
        shown = [(b, n) for b, n in zip(base, novel, strict=True) if 0 <= n <= 100]
        figure.add_scatter(
            x=[b for b, _ in shown],
            y=[n for _, n in shown],
            mode="lines",
            line={"color": FAINT, "width": 1},
            hoverinfo="skip",
            showlegend=False,
        )
    places = {name: i for i, name in enumerate(dict.fromkeys(line.dataset for line in lines))}
    points: list[tuple[float, float]] = []
    for number, (name, rows) in enumerate(_series(lines).items()):
        pairs = [(line, line.figure("base"), line.figure("novel")) for line in rows]
        measured = [
            (line, b.mean * 100, n.mean * 100) for line, b, n in pairs if b is not None and n is not None
        ]
        points += [(b, n) for _, b, n in measured]
        filling = FILLINGS[number // len(PALETTE) % len(FILLINGS)]
        figure.add_scatter(
            name=name,
            x=[b for _, b, _ in measured],
            y=[n for _, _, n in measured],
            mode="markers+text" if number == 0 else "markers",
            textposition="top center",
            textfont={"size": 11, "color": "#616e7c"},
            text=[short_name(line.dataset) for line, _, _ in measured],
            marker={
                "color": PALETTE[number % len(PALETTE)],
                "symbol": [MARKS[places[line.dataset] % len(MARKS)] + filling for line, _, _ in measured],
                "size": 11,
                "line": {"color": "white", "width": 1} if not filling else {"width": 2},
            },
            hovertemplate="%{text}<br>base %{x:.2f}, novel %{y:.2f}<extra>" + name + "</extra>",
        )
    apply_style(figure, 460, "Base accuracy (%)", "Novel accuracy (%)")
    for axis, place in ((figure.update_xaxes, 0), (figure.update_yaxes, 1)):
        values = [point[place] for point in points] or [0.0, 100.0]
        axis(range=[max(0, min(values) - 5), min(100, max(values) + 5)])
    return figure


def shot_curves(lines: Sequence[Line]) -> go.Figure:
    """Accuracy against shots (logarithmic): one panel per dataset, one curve per method."""
    datasets = list(dict.fromkeys(line.dataset for line in lines))
    wide = min(3, len(datasets))
    tall = -(-len(datasets) // wide)
    figure = make_subplots(
        tall, wide, subplot_titles=[short_name(name) for name in datasets], horizontal_spacing=0.07
    )
    shots = sorted({line.shots for line in lines})
    for number, (name, rows) in enumerate(_series(lines).items()):
        for place, dataset in enumerate(datasets):
            at = sorted((line.shots, line.figure("accuracy")) for line in rows if line.dataset == dataset)
            measured = [(count, value) for count, value in at if value is not None]
            figure.add_scatter(
                name=name,
                legendgroup=name,
                showlegend=place == 0,
                x=[count for count, _ in measured],
                y=[100 * value.mean for _, value in measured],
                error_y={"array": _spreads(measured), "thickness": 1},
                mode="lines+markers",
                line={"color": PALETTE[number % len(PALETTE)], "dash": DASHES[number // len(PALETTE) % 4]},
                hovertemplate="%{x} shots: %{y:.2f}<extra>" + name + "</extra>",
                row=place // wide + 1,
                col=place % wide + 1,
            )
    apply_style(figure, 140 + 260 * tall, "", "")
    figure.update_layout(legend={"y": 1 + 0.12 / tall}, margin={"t": 90})
    figure.update_xaxes(type="log", tickvals=shots, ticktext=[str(count) for count in shots], title="shots")
    figure.update_yaxes(title="accuracy (%)", col=1)
    return figure


def fusion_heat_map(weights: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """Learned fusion weights by dataset: a column for the class token and one per attribute."""
    tokens = list(dict.fromkeys(token for row in weights.values() for token in row))
    names = [short_name(name) for name in weights]
    values = [[row.get(token) for token in tokens] for row in weights.values()]
    figure = go.Figure(
        go.Heatmap(
            x=[escape(token) for token in tokens],
            y=names,
            z=values,
            text=[["" if v is None else f"{v:.3f}" for v in row] for row in values],
            texttemplate="%{text}",
            colorscale="Blues",
            zmin=0,  # weights near one sixth must look alike
            zmax=max(0.5, *(v for row in values for v in row if v is not None)),
            colorbar={"title": "weight"},
            xgap=2,
            ygap=2,
            hovertemplate="%{y}, %{x}: %{z:.4f}<extra></extra>",
        )
    )
    apply_style(figure, 120 + 44 * len(names), "", "")
    figure.update_xaxes(showgrid=False, side="top")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def _series(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Lines by the name of their series, in order."""
    names = dict.fromkeys(series_name(line) for line in lines)
    return {name: [line for line in lines if series_name(line) == name] for name in names}
