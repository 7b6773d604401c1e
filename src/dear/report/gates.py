"""The gates of head purification and how training moved them, as an image."""

from __future__ import annotations

import plotly.graph_objects as go
import torch
from torch import Tensor

from dear.errors import UsageError


def gates_figure(history: Tensor, title: str = "Gates of the heads") -> go.Figure:
    """A heat map, a row a layer and a column a head, with a slider over the epochs.

    1 (white) leaves a head as it is; heads above it are strengthened, heads below weakened.

    Args:
        history: gates after each epoch [epochs, L, H], as `Purify.history`; or one set [L, H].
        title: above the image.

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
    figure.update_layout(title=title, template="plotly_white", sliders=sliders if len(names) > 1 else [])
    return figure
