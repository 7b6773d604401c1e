"""Figures of adapted models and of heads as plotly figures, the same in pages, the studio and notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go
import torch
from torch import Tensor

from dear.errors import UsageError
from dear.report.look import INK, OTHER_SERIES, PALETTE, SERIES, apply_style, attribute_color, label, labels

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from torch import Tensor


def class_accuracy(before: Mapping[str, float], after: Mapping[str, float], most: int = 40) -> go.Figure:
    """Accuracy of each class before and after: a gray dot, a blue dot and a line between them.

    Args:
        before: class -> accuracy of zero-shot CLIP.
        after: class -> accuracy of the adapted model.
        most: with more classes, the ones that changed most are shown.
    """
    import plotly.graph_objects as go

    names = sorted(after, key=lambda name: -abs(after[name] - before.get(name, 0.0)))[:most]
    names.sort(key=lambda name: after[name])
    rows = labels(names)
    figure = go.Figure()
    for row, name in zip(rows, names, strict=True):
        figure.add_scatter(
            x=[100 * before.get(name, 0.0), 100 * after[name]],
            y=[row, row],
            mode="lines",
            line={"color": "#9fc5dd" if after[name] >= before.get(name, 0.0) else "#e3a98a", "width": 3},
            hoverinfo="skip",
            showlegend=False,
        )
    for series, values in (("zero-shot", before), ("adapted", after)):
        figure.add_scatter(
            name=series,
            x=[100 * values.get(name, 0.0) for name in names],
            y=rows,
            mode="markers",
            marker={"color": SERIES.get(series, SERIES["fused"]), "size": 11},
            hovertemplate="%{y}: %{x:.1f} %<extra>" + series + "</extra>",
        )
    figure.update_xaxes(range=[-2, 102], ticksuffix=" %")
    return apply_style(figure, 90 + 26 * len(rows))


def confusion(table: Tensor, classes: Sequence[str], most: int = 30) -> go.Figure:
    """Truth by answer, as shares of the truth's images.

    Args:
        table: [C, C], images of class i answered as class j.
        classes: their names.
        most: with more classes, the ones with most mistakes (made or drawn) are shown.
    """
    import plotly.graph_objects as go

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
            colorbar={"ticksuffix": " %", "thickness": 12},
            hovertemplate="%{y} answered as %{x}: %{z:.1f} %<extra></extra>",
        )
    )
    apply_style(figure, 230 + max(24, 44 - 2 * len(rows)) * len(rows))
    figure.update_xaxes(title="answered", tickangle=-45, showgrid=False)
    figure.update_yaxes(title="truth", autorange="reversed", showgrid=False)
    return figure


def fusion_weights(weights: Mapping[str, float]) -> go.Figure:
    """How much the class token and each attribute weigh in the decision; the line is where all started."""
    import plotly.graph_objects as go

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
    import plotly.graph_objects as go

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
            hovertemplate="%{x}: %{y:.1f} %<extra>" + label(name) + "</extra>",
        )
    figure.update_xaxes(tickangle=0)
    figure.update_yaxes(range=[0, 108], ticksuffix=" %", tickvals=[0, 25, 50, 75, 100])
    return apply_style(figure, 320, barmode="group", bargap=0.3)


def changes(groups: Mapping[str, int]) -> go.Figure:
    """One stacked bar: images right before and after, fixed, broken, and wrong before and after."""
    import plotly.graph_objects as go

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
    import plotly.graph_objects as go

    skipped = {"step", "epoch", "lr", "rate", "seconds"}
    parts = [name for name in dict.fromkeys(key for line in lines for key in line) if name not in skipped]
    palette = (INK, *PALETTE)
    figure = go.Figure()
    for number, name in enumerate(parts):
        there = [(line["step"], line[name]) for line in lines if name in line]
        figure.add_scatter(
            name=label(name),
            x=[step for step, _ in there],
            y=[value for _, value in there],
            mode="lines+markers" if len(there) < 30 else "lines",
            line={"color": palette[number % len(palette)], "width": 3 if number == 0 else 1.5},
            hovertemplate="step %{x}: %{y:.3f}<extra>" + label(name) + "</extra>",
        )
    figure.update_xaxes(title="step", range=None if total is None else [0, total])
    figure.update_yaxes(rangemode="tozero")
    return apply_style(figure, 320)


def decision_shares(shares: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """What led to each answer: every attribute's part of the margin over the runner-up.

    Args:
        shares: image -> class token or attribute -> its part; parts to the right spoke for the answer,
            parts to the left for the runner-up.
    """
    import plotly.graph_objects as go

    rows = labels(list(shares))
    names = list(dict.fromkeys(name for parts in shares.values() for name in parts))
    figure = go.Figure()
    for name in names:
        figure.add_bar(
            name="class token" if name == "class" else label(name),
            x=[parts.get(name, 0.0) for parts in shares.values()],
            y=rows,
            orientation="h",
            marker={"color": attribute_color(name)},
            hovertemplate="%{y}: %{x:+.2f}<extra>" + label(name) + "</extra>",
        )
    figure.update_xaxes(title="part of the margin over the runner-up (logits)")
    figure.update_yaxes(autorange="reversed")
    figure.add_vline(x=0, line={"color": INK, "width": 1})
    return apply_style(figure, 130 + 44 * len(rows), barmode="relative", bargap=0.35)


def accuracy_curve(points: Sequence[Mapping[str, float | int]], total: int | None = None) -> go.Figure:
    """Accuracy over the steps of a training, one line per mode.

    Args:
        points: each with `step` and a share of 1 for every mode.
        total: steps there will be; the axis ends there.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    for mode in dict.fromkeys(name for point in points for name in point if name != "step"):
        there = [point for point in points if mode in point]
        figure.add_scatter(
            name=label(mode),
            x=[point["step"] for point in there],
            y=[100 * point[mode] for point in there],
            mode="lines+markers",
            line={"color": SERIES.get(mode, OTHER_SERIES), "width": 2},
            hovertemplate="step %{x}: %{y:.1f} %<extra>" + label(mode) + "</extra>",
        )
    figure.update_xaxes(title="step", range=None if total is None else [0, total])
    figure.update_yaxes(range=[0, 102], ticksuffix=" %")
    return apply_style(figure, 260)


def gates_figure(history: Tensor, title: str = "Gates of the heads") -> go.Figure:
    """A heat map with a row per layer, a column per head, and a slider over the epochs.

    1 (white) leaves a head as it is; heads above it are strengthened, heads below weakened.

    Args:
        history: gates after each epoch [epochs, L, H], as `Purify.history`; or one set [L, H].
        title: above the figure.

    >>> figure = gates_figure(torch.ones(5, 12, 12))
    >>> len(figure.frames)  # the start, then five epochs
    6

    Raises:
        UsageError: there are no gates to show.
    """
    if history.ndim not in (2, 3) or history.numel() == 0:
        raise UsageError(f"gates are [epochs, layers, heads]; got {list(history.shape)}")
    sets = history.detach().double().cpu()
    start = torch.ones_like(sets[:1])  # equal scalars: every gate starts at 1
    sets = sets[None] if sets.ndim == 2 else torch.cat([start, sets])
    layers = [f"layer {layer}" for layer in range(1, sets.shape[1] + 1)]
    heads = [f"head {head}" for head in range(sets.shape[2])]
    reach = max(0.05, float((sets - 1).abs().max()))

    def map_of(gates: Tensor) -> go.Heatmap:
        return go.Heatmap(
            z=gates.tolist(),
            x=heads,
            y=layers,
            zmid=1.0,
            zmin=1 - reach,
            zmax=1 + reach,
            colorscale="RdBu",
            hovertemplate="%{y}, %{x}: %{z:.3f}<extra></extra>",
        )

    names = [str(epoch) for epoch in range(len(sets))]
    frames = [go.Frame(data=[map_of(gates)], name=name) for gates, name in zip(sets, names, strict=True)]
    now = {"mode": "immediate", "frame": {"duration": 0}}
    steps = [{"args": [[name], now], "label": name, "method": "animate"} for name in names]
    figure = go.Figure(data=[map_of(sets[-1])], frames=frames)
    sliders = [{"active": len(names) - 1, "currentvalue": {"prefix": "epoch "}, "steps": steps}]
    height = 190 + 26 * sets.shape[1]
    return apply_style(figure, height, title=title, sliders=sliders if len(names) > 1 else [])


def layer_effects_figure(
    rows: Sequence[Mapping[str, float]], accuracy: float, shown: tuple[int, int]
) -> go.Figure:
    """Zero-shot accuracy with the heads of a layer, or of all layers up to it, replaced by their mean.

    Args:
        rows: of `layer_effects`: `layer`, `accuracy` and `accuracy_up_to`.
        accuracy: with nothing replaced.
        shown: first and last layer of the map, shaded.
    """
    figure = go.Figure()
    layers = [int(row["layer"]) for row in rows]
    for number, (key, name) in enumerate(
        (("accuracy", "this layer replaced"), ("accuracy_up_to", "all layers up to it replaced"))
    ):
        figure.add_scatter(
            name=name,
            x=layers,
            y=[100 * row[key] for row in rows],
            mode="lines+markers",
            line={"color": PALETTE[number], "dash": ("solid", "dash")[number]},
            hovertemplate="layer %{x}: %{y:.1f} %<extra>" + name + "</extra>",
        )
    figure.add_hline(y=100 * accuracy, line={"color": INK, "dash": "dot", "width": 1})
    figure.add_vrect(x0=shown[0] - 0.5, x1=shown[1] + 0.5, fillcolor="#f1ede0", layer="below", line_width=0)
    figure.update_xaxes(tickvals=layers)
    return apply_style(figure, 320, "layer", "zero-shot accuracy (%)")


def phrase_plane_figure(
    places: Mapping[str, tuple[float, float]], concept_of: Mapping[str, str], colors: Mapping[str, str]
) -> go.Figure:
    """Phrases in a plane, colored by concept.

    Args:
        places: phrase -> its place.
        concept_of: phrase -> its concept; phrases without one are left out.
        colors: concept -> color.
    """
    figure = go.Figure()
    for concept in dict.fromkeys(concept_of[phrase] for phrase in places if phrase in concept_of):
        own = [phrase for phrase in places if concept_of.get(phrase) == concept]
        figure.add_scatter(
            name=label(concept),
            x=[places[phrase][0] for phrase in own],
            y=[places[phrase][1] for phrase in own],
            text=[label(phrase, 80) for phrase in own],
            mode="markers",
            marker={"color": colors.get(concept, "#a0a0a0"), "size": 8, "opacity": 0.8},
            hovertemplate="%{text}<extra>" + label(concept) + "</extra>",
        )
    apply_style(figure, 460)
    figure.update_layout(legend={"itemclick": "toggle"})
    figure.update_xaxes(showticklabels=False, showgrid=False)
    return figure.update_yaxes(showticklabels=False, showgrid=False)
