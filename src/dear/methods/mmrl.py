"""MMRL: a space of representation tokens that both towers read (Guo, Gu, CVPR 2025).

K tokens R [K, d_r] are learned; for every layer i from J on, linear maps give the tokens of both towers,
`R_i^v = R W_i^v + b_i^v`, `R_i^t = R W_i^t + b_i^t`. They stand beside the patches, and between BOT and the
words, and are put in fresh at each of those layers. The class token's feature `f_c` uses CLIP's projection,
the mean of the representation tokens `f_r` a learned one.

Loss: `alpha CE(f_c) + (1 - alpha) CE(f_r) + lambda (1 - cos(f_c, f_c frozen) + 1 - cos(w, w frozen))`.
Inference: `fused`, alpha s_c + (1 - alpha) s_r, for classes that were trained on; `decoupled`, s_c alone, for
others. K = 5, J = 6 of 12, d_r = 512, alpha = 0.7.

Departures: lambda = 1 for every dataset (the authors set it per dataset from 0.01 to 7, and d_r = 2048 for
EuroSAT); batch 4 everywhere (they take 32 on ImageNet); in towers of other depths J is the middle; last epoch
kept.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dear.methods.base import Frozen, Loss, Method
from dear.methods.prefix import image_prefix
from dear.methods.representation import (
    MODES,
    agreement_loss,
    every_mode,
    first_layers,
    frozen_stage,
    represented_images,
    represented_texts,
)
from dear.methods.starts import linear, normal


@dataclass(frozen=True)
class MMRLConfig:
    """Options of MMRL."""

    tokens: int = 5  #: K
    first_layer: int | None = None  #: J of both towers; None: the middle of each (6 of 12)
    width: int = 512  #: d_r of the representation space
    alpha: float = 0.7  #: weight of the class token's feature against the representation tokens'
    weight: float = 1.0  #: lambda, of the agreement with the frozen model


class MMRL(Method):
    """Representation tokens shared by both towers."""

    name: ClassVar[str] = "mmrl"
    title: ClassVar[str] = "MMRL"
    cuda_graph_safe: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = MODES
    recipe: ClassVar[Mapping[str, Any]] = {"batch": 4}
    Config: ClassVar[type] = MMRLConfig
    config: MMRLConfig

    def build(self, generator: torch.Generator) -> None:
        """R, two maps per layer (all started alike, as the authors do), and the projection of f_r."""
        config, vision, text = self.config, self.clip.config.vision, self.clip.config.text
        self.first, self.text_first = first_layers(self.clip, config.first_layer)
        self.space = self.learn(normal(generator, config.tokens, config.width))
        for name, tower, first in (("image", vision, self.first), ("text", text, self.text_first)):
            layers = tower.layers - first + 1
            weight, bias = linear(generator, tower.width, config.width)
            self.register_parameter(f"to_{name}", self.learn(weight.repeat(layers, 1, 1)))
            self.register_parameter(f"to_{name}_bias", self.learn(bias.repeat(layers, 1)))
        shape = (vision.width, self.clip.config.embed_dim)
        self.proj = self.learn(normal(generator, *shape, std=vision.width**-0.5))

    def _tokens(self, name: str) -> Tensor:
        """The tokens of one tower, [layers, K, D]."""
        weight, bias = self.get_parameter(f"to_{name}"), self.get_parameter(f"to_{name}_bias")
        return torch.einsum("kr,ldr->lkd", self.space, weight) + bias[:, None]

    def texts(self) -> Tensor:
        """Text features [C, E]."""
        return represented_texts(self.prompts, self.text_first, self._tokens("text"))

    def features(self, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """f_c and f_r, [B, E] each, from the layers before J."""
        f_c, mean = represented_images(self.clip, prefix, self.first, self._tokens("image"))
        return f_c, self.clip.visual.correct(mean.to(self.proj.dtype) @ self.proj)

    def frozen_stage(self, pixels: Tensor) -> Frozen:
        """The input of layer J [B, N, D] and the frozen unit features [B, E]."""
        return frozen_stage(self, pixels)

    def stage_key(self) -> Hashable:
        """The layers before the first change."""
        return "prefix", self.first

    def inference_stage(self, pixels: Tensor) -> Frozen:
        """The input of layer J [B, N, D]."""
        return (image_prefix(self.clip, pixels, self.first),)

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        """Logits [B, C] of every mode."""
        return every_mode(self, frozen)

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        """Two cross-entropies and the agreement with the frozen model."""
        return agreement_loss(self, frozen, labels)
