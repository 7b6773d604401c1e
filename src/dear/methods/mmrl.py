"""MMRL: a space of representation tokens that both towers read (Guo, Gu, CVPR 2025).

K tokens R [K, d_r] are learned; for every layer i from J on, linear maps compute the tokens of both towers,
`R_i^v = R W_i^v + b_i^v`, `R_i^t = R W_i^t + b_i^t`. They are inserted after the patches, and between BOT and
the words, and replaced at each of those layers. An image has two features: `f_c` of the class token under
CLIP's projection, and `f_r` of the representation tokens' mean under a learned one.

Loss: `alpha CE(f_c) + (1 - alpha) CE(f_r) + lambda (1 - cos(f_c, f_c frozen) + 1 - cos(w, w frozen))`.
Inference: `fused`, alpha s_c + (1 - alpha) s_r; `decoupled`, s_c alone; `auto`, the authors' rule: fused for
classes that were trained on, decoupled for others. K = 5, J = 6 of 12, d_r = 512, alpha = 0.7.

Departures: lambda = 1 for every dataset (the authors set it per dataset from 0.01 to 7, and d_r = 2048 for
EuroSAT); batch 4 everywhere (they use 32 on ImageNet); in towers of other depths J is the middle; the last
epoch is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.edit import Edit, LayerEdit
from dear.methods.base import Method
from dear.methods.deep_prompts import resolve_depth
from dear.methods.frozen import Frozen, Loss
from dear.methods.options import AtLeastOne, NotNegative, Options, Share
from dear.methods.tensors import distance, linear, normal, scores, unit


@dataclass(frozen=True)
class MMRLConfig(Options):
    tokens: AtLeastOne = 5  #: K
    first_layer: int | None = None  #: J of both towers; None: the middle of each (6 of 12)
    width: AtLeastOne = 512  #: d_r of the representation space
    alpha: Share = 0.7  #: weight of the class token's logits relative to the representation tokens'
    weight: NotNegative = 1.0  #: lambda, weight of the regularization toward the frozen model


class MMRL(Method):
    """Representation tokens shared by both towers."""

    name, title = "mmrl", "MMRL"
    about = "representation tokens shared by both towers"
    cut: int = 1  # `build` sets the layer
    reads_frozen = True
    modes = ("auto", "fused", "decoupled")
    recipe = {"batch": 4}
    Config = MMRLConfig
    config: MMRLConfig
    token_weight = 1.0  #: weight of a new token relative to the previous layer's output

    def build(self, generator: torch.Generator) -> None:
        """J of both towers, the representation tokens R [K, d_r], and the maps from them."""
        config, shape = self.config, self.clip.config
        self.cut, self.text_first = (
            resolve_depth(config.first_layer, tower.layers, share=0.5, option="first_layer")
            for tower in (shape.vision, shape.text)
        )
        self.space = self.learn(normal(generator, config.tokens, config.width))
        self.build_maps(generator)

    def build_maps(self, generator: torch.Generator) -> None:
        """A map per layer and tower (initialized equally, as by the authors), and the projection of f_r."""
        config, vision, text = self.config, self.clip.config.vision, self.clip.config.text
        for name, tower, first in (("image", vision, self.cut), ("text", text, self.text_first)):
            layers = tower.layers - first + 1
            weight, bias = linear(generator, tower.width, config.width)
            self.register_parameter(f"to_{name}", self.learn(weight.repeat(layers, 1, 1)))
            self.register_parameter(f"to_{name}_bias", self.learn(bias.repeat(layers, 1)))
        shape = (vision.width, self.clip.config.embed_dim)
        self.proj = self.learn(normal(generator, *shape, std=vision.width**-0.5))

    def layer_tokens(self, tower: str) -> Tensor:
        """The tokens inserted at each layer from J on, [layers, K, D], of the tower "image" or "text"."""
        weight, bias = self.get_parameter(f"to_{tower}"), self.get_parameter(f"to_{tower}_bias")
        return torch.einsum("kr,ldr->lkd", self.space, weight) + bias[:, None]  # [L, K, D]

    def project_mean(self, mean: Tensor) -> Tensor:
        """f_r [B, E] of the normed mean [B, D] of the last representation tokens, corrected."""
        return mean.to(self.proj.dtype) @ self.proj

    def _edit(self, tower: str, first: int, at: int | None = None) -> Edit:
        tokens = self.layer_tokens(tower)
        layers = {
            layer: LayerEdit(tokens=part, token_weight=self.token_weight)
            for layer, part in enumerate(tokens, start=first)
        }
        return Edit(layers, count=tokens.shape[1], at=at)

    def texts(self) -> Tensor:
        edit = self._edit("text", self.text_first, at=self.clip.text.first_word)
        return self.prompts.features(edit, first=self.text_first)

    def features(self, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """f_c and f_r, [B, E] each, from the input `prefix` of layer J, [B, N, D]."""
        visual = self.clip.visual
        vector, last = visual.class_and_tokens(prefix, self.cut, self._edit("image", self.cut))
        f_c = visual.correct(visual.project_pooled(vector))
        return f_c, self.project_mean(visual.correct_pooled(last.mean(dim=1)))

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        alpha = self.config.alpha
        f_c, f_r = self.features(frozen.x)
        texts = self.cached("texts", self.texts)
        by_class = scores(self.clip, f_c, texts)
        fused = alpha * by_class + (1 - alpha) * scores(self.clip, f_r, texts)
        return {"auto": self.select_logits(fused, by_class), "fused": fused, "decoupled": by_class}

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        alpha, f_frozen = self.config.alpha, frozen.feature
        assert f_frozen is not None
        f_c, f_r = self.features(frozen.x)
        texts = self.texts()
        parts = {
            "ce": F.cross_entropy(scores(self.clip, f_c, texts), labels),
            "ce_tokens": F.cross_entropy(scores(self.clip, f_r, texts), labels),
            "reg_image": distance(unit(f_c), f_frozen),
            "reg_text": distance(unit(texts), self.prompts.frozen),
        }
        total = alpha * parts["ce"] + (1 - alpha) * parts["ce_tokens"]
        total = total + self.config.weight * (parts["reg_image"] + parts["reg_text"])
        return Loss(total, {name: part.detach() for name, part in parts.items()})
