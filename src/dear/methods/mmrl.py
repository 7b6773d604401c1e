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

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dear.methods.base import linear, normal
from dear.methods.options import Options
from dear.methods.representation import RepresentationMethod


@dataclass(frozen=True)
class MMRLConfig(Options):
    """Options of MMRL."""

    tokens: int = 5  #: K
    first_layer: int | None = None  #: J of both towers; None: the middle of each (6 of 12)
    width: int = 512  #: d_r of the representation space
    alpha: float = 0.7  #: weight of the class token's feature against the representation tokens'
    weight: float = 1.0  #: lambda, of the agreement with the frozen model


class MMRL(RepresentationMethod):
    """Representation tokens shared by both towers."""

    name: ClassVar[str] = "mmrl"
    title: ClassVar[str] = "MMRL"
    Config: ClassVar[type] = MMRLConfig
    config: MMRLConfig

    def build(self, generator: torch.Generator) -> None:
        """R, two maps per layer (all started alike, as the authors do), and the projection of f_r."""
        super().build(generator)
        config, vision, text = self.config, self.clip.config.vision, self.clip.config.text
        for name, tower, first in (("image", vision, self.cut), ("text", text, self.text_first)):
            layers = tower.layers - first + 1
            weight, bias = linear(generator, tower.width, config.width)
            self.register_parameter(f"to_{name}", self.learn(weight.repeat(layers, 1, 1)))
            self.register_parameter(f"to_{name}_bias", self.learn(bias.repeat(layers, 1)))
        shape = (vision.width, self.clip.config.embed_dim)
        self.proj = self.learn(normal(generator, *shape, std=vision.width**-0.5))

    def fresh_tokens(self, tower: str) -> Tensor:
        """The tokens of one tower, [layers, K, D]: R W_i + b_i."""
        weight, bias = self.get_parameter(f"to_{tower}"), self.get_parameter(f"to_{tower}_bias")
        return torch.einsum("kr,ldr->lkd", self.space, weight) + bias[:, None]

    def project_mean(self, mean: Tensor) -> Tensor:
        """The learned projection."""
        return mean.to(self.proj.dtype) @ self.proj
