"""Learned additions to the weights of whole layers: of a tower's blocks, final norm and projection.

Additions are initialized to zero, so an untrained method is the frozen CLIP, and a saved adapter contains the
difference from the backbone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from dear.clip.edit import Edit, LayerEdit
from dear.clip.model import Clip
from dear.clip.rows import Rows, final_norm
from dear.clip.tower import LayerNorm
from dear.clip.towers import TextTower, VisionTower
from dear.methods.base import Method
from dear.methods.headtools import fold


def end_norm(clip: Clip, side: str) -> LayerNorm:
    """The norm before the projection of the tower "image" or "text"."""
    return clip.visual.ln_post if side == "image" else clip.text.ln_final


class LayerChanges:
    """The weights of a tower that a method changes; the learned additions are parameters of the method.

    Args:
        side: "image" or "text".
        layers: numbers of the changed layers, from 1.
        selects: whether a parameter of a layer, such as "attn.q.weight", is changed.
        projection: whether the projection is changed as well; the norm before it always is.
    """

    def __init__(
        self, side: str, layers: Iterable[int], selects: Callable[[str], bool], projection: bool
    ) -> None:
        self.side, self.layers, self.selects, self.projection = side, tuple(layers), selects, projection

    def tower(self, clip: Clip) -> VisionTower | TextTower:
        """The tower that is changed."""
        return clip.visual if self.side == "image" else clip.text

    def learn(self, method: Method) -> None:
        """Create the additions, all zero, as parameters of `method`."""
        if self.side == "image":
            method.clip.visual.require_class_token(method.title)  # such a tower also has a projection
        norm = end_norm(method.clip, self.side)
        changed: dict[str, Tensor] = {name: weight for _, _, name, weight in self._weights(method.clip)}
        changed |= {f"{self.side}_end_norm_weight": norm.weight, f"{self.side}_end_norm_bias": norm.bias}
        if self.projection:
            changed[f"{self.side}_projection"] = self.projection_weight(method.clip)
        for name, weight in changed.items():
            method.register_parameter(name, method.learn(torch.zeros_like(weight)))

    def projection_weight(self, clip: Clip) -> Tensor:
        projection = self.tower(clip).proj
        assert projection is not None
        return projection

    def _weights(self, clip: Clip) -> Iterator[tuple[int, str, str, nn.Parameter]]:
        """Yields layer, parameter name, name of the addition, and weight."""
        for layer in self.layers:
            for parameter, weight in self.tower(clip).blocks[layer - 1].named_parameters():
                if self.selects(parameter):
                    yield layer, parameter, f"{self.side}_{layer}_{parameter.replace('.', '_')}", weight

    def edit(self, method: Method) -> Edit:
        """The additions as an edit of the tower."""
        added: dict[int, dict[str, Tensor]] = {}
        for layer, parameter, name, _ in self._weights(method.clip):
            added.setdefault(layer, {})[parameter] = method.get_parameter(name)
        return Edit({layer: LayerEdit(added=changes) for layer, changes in added.items()})

    def added(self, method: Method) -> tuple[Tensor, Tensor, Tensor | None]:
        """Additions to the weight and bias of the final norm and, if it is changed, to the projection."""
        weight, bias = (method.get_parameter(f"{self.side}_end_norm_{part}") for part in ("weight", "bias"))
        return weight, bias, method.get_parameter(f"{self.side}_projection") if self.projection else None

    def project(self, method: Method, rows: Rows) -> Tensor:
        """Features [B, R, E] of rows [B, R, D] of the last layer, with the changed norm and projection."""
        norm, image = end_norm(method.clip, self.side), self.side == "image"
        weight_change, bias_change, projection_change = self.added(method)
        weight, bias = norm.weight + weight_change, norm.bias + bias_change
        normed = final_norm(rows, weight, bias, norm.eps)
        projection = self.projection_weight(method.clip)
        if projection_change is not None:
            projection = projection + projection_change
        features = normed @ projection.to(normed.dtype)
        proj_bias = self.tower(method.clip).proj_bias
        features = features if proj_bias is None else features + proj_bias.to(normed.dtype)
        return method.clip.visual.correct(features) if image else features

    def texts(self, method: Method, first: int = 1, chosen: Tensor | None = None) -> Tensor:
        """Text features [C, E] of all classes, or of those at the indices `chosen`, from layer `first` on."""
        x, eot = method.prompts.prefix(first - 1), method.prompts.eot  # [C, T, D], [C]
        if chosen is not None:
            x, eot = x[chosen], eot[chosen]
        x = method.clip.text.run(x, first=first, edit=self.edit(method), read=eot[:, None])  # [C, 1, D]
        return method.prompts.add_text_shift(self.project(method, Rows(x))[:, 0], chosen)

    def images(self, method: Method, prefix: Tensor, first: int = 1) -> Tensor:
        """Image features [B, E] from the input `prefix` of layer `first`, [B, N, D]."""
        read = torch.zeros(1, dtype=torch.long, device=prefix.device)
        rows = method.clip.visual.final_rows(prefix, first, self.edit(method), read)
        return self.project(method, rows)[:, 0]


@torch.no_grad()
def fold_changes(method: Method, image: LayerChanges, text: LayerChanges) -> Clip:
    """A plain CLIP with the additions folded into its weights."""
    correction = method.clip.correction
    plain = fold(method.clip.with_correction(None), image.edit(method), text.edit(method))
    for changes in (image, text):
        norm = end_norm(plain, changes.side)
        weight_change, bias_change, projection_change = changes.added(method)
        norm.weight.add_(weight_change.to(norm.weight))
        norm.bias.add_(bias_change.to(norm.bias))
        if projection_change is not None:
            projection = changes.projection_weight(plain)
            projection.add_(projection_change.to(projection))
    return plain if correction is None else plain.with_correction(correction).fold_correction()
