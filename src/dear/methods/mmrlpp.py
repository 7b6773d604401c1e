"""MMRL++: MMRL with fewer parameters and progressive tokens (Guo, Gu, arXiv 2505.10088, IJCV 2026).

Shared-residual representation aligner: all layers share one map and add a low-rank residual per layer,
`W_i = W + A_i B_i` (rank 4, B initialized to 0), with a bias per layer; the projection of the tokens' feature
is `P_v + A B` (rank 64). Progressive representation composition: from the second layer on a token's input is
`beta R_i + (1 - beta) (output of the previous layer)`. Loss and inference are MMRL's.

Departures: beta = 0.9 and lambda = 1 for every dataset (the authors set beta from 0.1 to 0.9 and lambda from
0.01 to 7 per dataset, and beta again for each target of the cross-dataset test); batch 4 everywhere (they
use 32 on ImageNet); the last epoch is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dear.methods.mmrl import MMRL, MMRLConfig
from dear.methods.options import AtLeastOne, Share
from dear.methods.tensors import uniform


@dataclass(frozen=True)
class MMRLppConfig(MMRLConfig):
    rank: AtLeastOne = 4  #: of the residual of each layer
    projection_rank: AtLeastOne = 64  #: of the change of the projection
    beta: Share = 0.9  #: weight of the new token relative to the previous layer's output


class MMRLpp(MMRL):
    """Representation tokens through a shared map, composed from layer to layer."""

    name, title = "mmrlpp", "MMRL++"
    about = "the same with fewer parameters"
    Config = MMRLppConfig
    config: MMRLppConfig

    def build_maps(self, generator: torch.Generator) -> None:
        """A shared map and residuals per tower, and a low-rank change of the projection."""
        config, vision, text = self.config, self.clip.config.vision, self.clip.config.text
        self.token_weight = config.beta
        for name, tower, first in (("image", vision, self.cut), ("text", text, self.text_first)):
            layers, rank = tower.layers - first + 1, config.rank
            bias = uniform(generator, tower.width, inputs=config.width)
            shared = uniform(generator, tower.width, config.width, inputs=config.width)
            down = uniform(generator, layers, tower.width, rank, inputs=rank)
            self.register_parameter(f"to_{name}", self.learn(shared))
            self.register_parameter(f"to_{name}_bias", self.learn(bias.repeat(layers, 1)))
            self.register_parameter(f"{name}_a", self.learn(down))
            self.register_parameter(f"{name}_b", self.learn(torch.zeros(layers, rank, config.width)))
        rank = config.projection_rank
        self.proj_a = self.learn(uniform(generator, vision.width, rank, inputs=rank))
        self.proj_b = self.learn(torch.zeros(rank, self.clip.config.embed_dim))

    def layer_tokens(self, tower: str) -> Tensor:
        shared, bias = self.get_parameter(f"to_{tower}"), self.get_parameter(f"to_{tower}_bias")
        a, b = self.get_parameter(f"{tower}_a"), self.get_parameter(f"{tower}_b")
        residual = torch.einsum("kr,lqr,ldq->lkd", self.space, b, a)  # [L, K, D]
        return self.space @ shared.T + residual + bias[:, None]

    def project_mean(self, mean: Tensor) -> Tensor:
        change = mean.to(self.proj_a.dtype) @ self.proj_a @ self.proj_b
        return self.clip.visual.project_pooled(mean) + change
