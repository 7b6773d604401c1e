"""Plotly figures of attention heads, the same in pages, the studio and notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
import torch
from torch import Tensor

from dear.errors import UsageError
from dear.report.look import INK, PALETTE, apply_style, label


def gates_figure(history: Tensor) -> go.Figure:
    """A heat map with a row per layer, a column per head, and a slider over the epochs.

    1 (white) leaves a head as it is; heads above it are strengthened, heads below weakened.

    Args:
        history: gates after each epoch [epochs, L, H], as `Purify.history`; or one set [L, H].

    >>> figure = gates_figure(torch.ones(5, 12, 12))
    >>> len(figure.frames)  # the start, then five epochs
    6
    """
    if history.ndim not in (2, 3) or history.numel() == 0:
        raise UsageError(
            f"gates must have the shape [epochs, layers, heads] or [layers, heads], got {list(history.shape)}"
        )
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
    return apply_style(figure, height, title="Gates of the heads", sliders=sliders if len(names) > 1 else [])


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
            hovertemplate="layer %{x}: %{y:.1f}%<extra>" + name + "</extra>",
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
        members = [phrase for phrase in places if concept_of.get(phrase) == concept]
        figure.add_scatter(
            name=label(concept),
            x=[places[phrase][0] for phrase in members],
            y=[places[phrase][1] for phrase in members],
            text=[label(phrase, 80) for phrase in members],
            mode="markers",
            marker={"color": colors.get(concept, "#a0a0a0"), "size": 8, "opacity": 0.8},
            hovertemplate="%{text}<extra>" + label(concept) + "</extra>",
        )
    apply_style(figure, 460)
    figure.update_layout(legend={"itemclick": "toggle"})
    figure.update_xaxes(showticklabels=False, showgrid=False)
    return figure.update_yaxes(showticklabels=False, showgrid=False)
