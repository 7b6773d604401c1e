"""MMRL: a space of representation tokens that both towers read (Guo, Gu, CVPR 2025).

K tokens R [K, d_r] are learned; for every layer i from J on, linear maps give the tokens of both towers,
`R_i^v = R W_i^v + b_i^v`, `R_i^t = R W_i^t + b_i^t`. They stand beside the patches, and between BOT and the
words, and are put in fresh at each of those layers. The class token's feature `f_c` uses CLIP's projection,
the mean of the representation tokens `f_r` a learned one.

Loss: `alpha CE(f_c) + (1 - alpha) CE(f_r) + lambda (1 - cos(f_c, f_c frozen) + 1 - cos(w, w frozen))`.
Inference: `fused`, alpha s_c + (1 - alpha) s_r, for classes that were trained on; `decoupled`, s_c alone, for
others. K = 5, J = 6 of 12, d_r = 512, alpha = 0.7.

Departures: lambda = 1 for every data set (the authors set it a data set from 0.01 to 7, and d_r = 2048 for
EuroSAT); batch 16; in towers of other depths J is the middle; last epoch kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.edit import Edit, LayerEdit
from dear.methods.base import Loss, Method
from dear.methods.deep import depth_of
from dear.methods.prefix import class_and_tokens, frozen_features, image_prefix
from dear.methods.prompts import scores, unit
from dear.methods.starts import normal, uniform


@dataclass(frozen=True)
class MMRLConfig:
    """Options of MMRL."""

    tokens: int = 5  #: K
    first_layer: int | None = None  #: J of both towers; None: the middle of each (6 of 12)
    width: int = 512  #: d_r of the representation space
    alpha: float = 0.7  #: weight of the class token's feature against the representation tokens'
    weight: float = 1.0  #: lambda, of the agreement with the frozen model


def first_layer(asked: int | None, layers: int) -> int:
    """J: the layer asked for, or the middle.

    >>> first_layer(None, 12), first_layer(None, 1)
    (6, 1)
    """
    return depth_of(asked, layers, share=0.5)


def token_edit(first: int, tokens: Tensor, anchor: float = 1.0, at: int | None = None) -> Edit:
    """Tokens [layers, K, D] put in at layer `first` and each one after it."""
    layers = {layer: LayerEdit(tokens=own, anchor=anchor) for layer, own in enumerate(tokens, start=first)}
    return Edit(layers, count=tokens.shape[1], at=at)


class MMRL(Method):
    """Representation tokens shared by both towers."""

    name: ClassVar[str] = "mmrl"
    title: ClassVar[str] = "MMRL"
    steady: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = ("fused", "decoupled")
    Config: ClassVar[type] = MMRLConfig
    config: MMRLConfig

    def build(self, generator: torch.Generator) -> None:
        """R, two maps a layer (all started alike, as the authors do), and the projection of f_r."""
        config, vision, text = self.config, self.clip.config.vision, self.clip.config.text
        self.first, self.text_first = (first_layer(config.first_layer, t.layers) for t in (vision, text))
        self.space = self.learn(normal(generator, config.tokens, config.width))
        for name, tower, first in (("image", vision, self.first), ("text", text, self.text_first)):
            layers = tower.layers - first + 1
            weight = uniform(generator, tower.width, config.width, inputs=config.width)
            bias = uniform(generator, tower.width, inputs=config.width)
            self.register_parameter(f"to_{name}", self.learn(weight.repeat(layers, 1, 1)))
            self.register_parameter(f"to_{name}_bias", self.learn(bias.repeat(layers, 1)))
        shape = (vision.width, self.clip.config.embed_dim)
        self.proj = self.learn(normal(generator, *shape, std=vision.width**-0.5))

    def _tokens(self, name: str) -> Tensor:
        """The tokens of one tower, [layers, K, D]."""
        weight, bias = self.get_parameter(f"to_{name}"), self.get_parameter(f"to_{name}_bias")
        return torch.einsum("kr,ldr->lkd", self.space, weight) + bias[:, None]

    def _texts(self) -> Tensor:
        edit = token_edit(self.text_first, self._tokens("text"), at=1)
        return self.prompts.features(edit, first=self.text_first)

    def _images(self, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """f_c and f_r, [B, E] each."""
        edit = token_edit(self.first, self._tokens("image"))
        own, tokens = class_and_tokens(self.clip, prefix, self.first, edit)
        return own @ self.clip.visual.proj, tokens.mean(dim=1).to(self.proj.dtype) @ self.proj

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """Logits [B, C] of both modes."""
        f_c, f_r = self._images(image_prefix(self.clip, pixels, self.first))
        return fuse(self, f_c, f_r, self.cached("texts", self._texts), self.config.alpha)

    def loss(self, pixels: Tensor, labels: Tensor, domains: Tensor | None = None) -> Loss:
        """Two cross-entropies and the agreement with the frozen model."""
        prefix = image_prefix(self.clip, pixels, self.first)
        f_c, f_r = self._images(prefix)
        frozen = frozen_features(self.clip, prefix, self.first)
        return agreement_loss(self, f_c, f_r, frozen, self._texts(), labels)


def fuse(method: Method, f_c: Tensor, f_r: Tensor, texts: Tensor, alpha: float) -> dict[str, Tensor]:
    """Logits of both modes from the two image features."""
    own = scores(method.clip, f_c, texts)
    return {"fused": alpha * own + (1 - alpha) * scores(method.clip, f_r, texts), "decoupled": own}


def agreement_loss(
    method: Method, f_c: Tensor, f_r: Tensor, frozen: Tensor, texts: Tensor, labels: Tensor
) -> Loss:
    """MMRL's loss from the features; `alpha` and `weight` are the method's options."""
    alpha = method.config.alpha
    parts = {
        "ce": F.cross_entropy(scores(method.clip, f_c, texts), labels),
        "ce_tokens": F.cross_entropy(scores(method.clip, f_r, texts), labels),
        "reg_image": (1 - (unit(f_c) * unit(frozen)).sum(-1)).mean(),
        "reg_text": (1 - (unit(texts) * method.prompts.frozen).sum(-1)).mean(),
    }
    total = alpha * parts["ce"] + (1 - alpha) * parts["ce_tokens"]
    total = total + method.config.weight * (parts["reg_image"] + parts["reg_text"])
    return Loss(total, {name: part.detach() for name, part in parts.items()})
