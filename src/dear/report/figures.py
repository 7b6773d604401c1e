"""Plotly figures of adapted models, the same in pages, the studio and notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from torch import Tensor

from dear.report.look import INK, OTHER_SERIES, PALETTE, SERIES, apply_style, attribute_color, label, labels


def class_accuracy(
    before: Mapping[str, float], after: Mapping[str, float] | None = None, most: int = 40
) -> go.Figure:
    """Accuracy of each class before and after: a gray dot, a blue dot and a line between them.

    Args:
        before: class -> accuracy of zero-shot CLIP.
        after: class -> accuracy of the adapted model; None: nothing was adapted.
        most: with more classes, the ones that changed most are shown.
    """
    shown = before if after is None else after
    names = sorted(shown, key=lambda name: -abs(shown[name] - before.get(name, 0.0)))[:most]
    names.sort(key=lambda name: shown[name])
    rows = labels(names)
    figure = go.Figure()
    for row, name in zip(rows, names, strict=True):
        figure.add_scatter(
            x=[100 * before.get(name, 0.0), 100 * shown[name]],
            y=[row, row],
            mode="lines",
            line={"color": "#9fc5dd" if shown[name] >= before.get(name, 0.0) else "#e3a98a", "width": 3},
            hoverinfo="skip",
            showlegend=False,
        )
    series = {"zero-shot": before} if after is None else {"zero-shot": before, "adapted": after}
    for title, values in series.items():
        figure.add_scatter(
            name=title,
            x=[100 * values.get(name, 0.0) for name in names],
            y=rows,
            mode="markers",
            marker={"color": SERIES.get(title, SERIES["fused"]), "size": 11},
            hovertemplate="%{y}: %{x:.1f}%<extra>" + title + "</extra>",
        )
    figure.update_xaxes(range=[-2, 102], ticksuffix="%")
    return apply_style(figure, 90 + 26 * len(rows))


def confusion(table: Tensor, classes: Sequence[str], most: int = 30) -> go.Figure:
    """Truth by answer, as shares of the truth's images.

    Args:
        table: [C, C], images of class i answered as class j.
        classes: their names.
        most: with more classes, the ones with most mistakes (made or drawn) are shown.
    """
    wrong = table.clone().fill_diagonal_(0)
    weight = wrong.sum(dim=0) + wrong.sum(dim=1)
    chosen = sorted(weight.argsort(descending=True, stable=True)[:most].tolist())
    shares = table.double() / table.sum(dim=1, keepdim=True).clamp(min=1)
    part = (100 * shares[chosen][:, chosen]).round(decimals=1).tolist()
    rows = labels([classes[place] for place in chosen])
    figure = go.Figure(
        go.Heatmap(
            x=rows,
            y=rows,
            z=part,
            zmin=0,
            zmax=100,
            colorscale=[[0, "#ffffff"], [0.02, "#e6f0f7"], [1, "#004a78"]],
            text=[[f"{value:.0f}" if value >= 0.5 else "" for value in row] for row in part],
            texttemplate="%{text}" if len(chosen) <= 16 else None,
            xgap=1,
            ygap=1,
            colorbar={"ticksuffix": "%", "thickness": 12},
            hovertemplate="%{y} answered as %{x}: %{z:.1f}%<extra></extra>",
        )
    )
    apply_style(figure, 230 + max(24, 44 - 2 * len(rows)) * len(rows))
    figure.update_xaxes(title="answered", title_standoff=8, tickangle=-45, automargin=True, showgrid=False)
    figure.update_yaxes(
        title="truth", title_standoff=12, automargin=True, autorange="reversed", showgrid=False
    )
    return figure


def fusion_weights(weights: Mapping[str, float]) -> go.Figure:
    """How much the class token and each attribute weigh in the decision; the line is where all started."""
    names = list(weights)
    figure = go.Figure(
        go.Bar(
            x=[label(name) for name in names],
            y=list(weights.values()),
            text=[f"{value:.3f}" for value in weights.values()],
            textposition="outside",
            cliponaxis=False,
            marker={"color": [attribute_color(name) for name in names]},
            hovertemplate="%{x}: %{y:.4f}<extra></extra>",
        )
    )
    figure.add_hline(y=1 / len(names), line={"color": INK, "dash": "dot", "width": 1})
    figure.update_yaxes(title="weight", rangemode="tozero")
    return apply_style(figure, 300)


def accuracy_bars(groups: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """Accuracies side by side: one group of bars per set of classes, one bar per model or mode."""
    series = list(dict.fromkeys(name for group in groups.values() for name in group))
    figure = go.Figure()
    for name in series:
        values = [100 * group[name] if name in group else None for group in groups.values()]
        figure.add_bar(
            name=label(name),
            x=[label(group, 60).replace(", ", ",<br>") for group in groups],
            y=values,
            text=["" if value is None else f"{value:.1f}" for value in values],
            textposition="outside",
            cliponaxis=False,
            marker={"color": SERIES.get(name, OTHER_SERIES)},
            hovertemplate="%{x}: %{y:.1f}%<extra>" + label(name) + "</extra>",
        )
    figure.update_xaxes(tickangle=0)
    figure.update_yaxes(range=[0, 108], ticksuffix="%", dtick=25)
    return apply_style(figure, 320, barmode="group", bargap=0.3)


def changes(groups: Mapping[str, int]) -> go.Figure:
    """One stacked bar: images right before and after, fixed, broken, and wrong before and after."""
    colors = {"kept": "#009E73", "fixed": "#0072B2", "broken": "#D55E00", "missed": "#B8BFC6"}
    words = {"kept": "right both times", "fixed": "fixed", "broken": "broken", "missed": "wrong both times"}
    figure = go.Figure()
    for name, count in groups.items():
        figure.add_bar(
            name=f"{words[name]} ({count})",
            x=[count],
            y=[""],
            orientation="h",
            marker={"color": colors[name]},
            hovertemplate=f"{words[name]}: {count} images<extra></extra>",
        )
    figure.update_xaxes(title="images", range=[0, sum(groups.values())])
    apply_style(figure, 220, barmode="stack")
    return figure.update_layout(legend_traceorder="normal")


def training_curve(lines: Sequence[Mapping[str, float | int]], total: int | None = None) -> go.Figure:
    """Loss and its parts over the steps, from a run's log.

    Args:
        lines: of the log, each with `step`, `loss` and the parts.
        total: steps there will be; the axis ends there.
    """
    skipped = {"step", "epoch", "lr", "rate", "seconds"}
    parts = [name for name in dict.fromkeys(key for line in lines for key in line) if name not in skipped]
    palette = (INK, *PALETTE)
    figure = go.Figure()
    for number, name in enumerate(parts):
        logged = [(line["step"], line[name]) for line in lines if name in line]
        figure.add_scatter(
            name=label(name),
            x=[step for step, _ in logged],
            y=[value for _, value in logged],
            mode="lines+markers" if len(logged) < 30 else "lines",
            line={"color": palette[number % len(palette)], "width": 3 if number == 0 else 1.5},
            hovertemplate="step %{x}: %{y:.3f}<extra>" + label(name) + "</extra>",
        )
    figure.update_xaxes(title="step", range=None if total is None else [0, total])
    figure.update_yaxes(rangemode="tozero")
    return apply_style(figure, 320)


def accuracy_curve(points: Sequence[Mapping[str, float | int]], total: int | None = None) -> go.Figure:
    """Accuracy over the steps of a training, one line per mode.

    Args:
        points: each with `step` and a share of 1 for every mode.
        total: steps there will be; the axis ends there.
    """
    figure = go.Figure()
    for mode in dict.fromkeys(name for point in points for name in point if name != "step"):
        measured = [point for point in points if mode in point]
        figure.add_scatter(
            name=label(mode),
            x=[point["step"] for point in measured],
            y=[100 * point[mode] for point in measured],
            mode="lines+markers",
            line={"color": SERIES.get(mode, OTHER_SERIES), "width": 2},
            hovertemplate="step %{x}: %{y:.1f}%<extra>" + label(mode) + "</extra>",
        )
    figure.update_xaxes(title="step", range=None if total is None else [0, total])
    figure.update_yaxes(range=[0, 102], ticksuffix="%")
    return apply_style(figure, 260)
