"""MaPLe: prompts in both towers, the visual ones computed from the textual ones (Khattak et al., CVPR 2023).

The first `context` words of "a photo of a {}." are learned; in layers 2 to J new learned vectors replace them
in the text tower. The image tower's tokens of layer i are a linear function of the text's, `F_i(P_i) = P_i
W_i^T + b_i`, and replace each other in the same layers. J = 9 of 12, context 2.

Departures: in towers of other depths J is three quarters of the shallower one; the coupling functions are
initialized independently, where the authors' code copies one. Otherwise the authors' setting: batch 4, 5
epochs, lr 0.0035.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dear.methods.base import Method
from dear.methods.deep_prompts import encode_with_prompts, resolve_depth
from dear.methods.frozen import Frozen
from dear.methods.options import Count, Options
from dear.methods.prompts import WORDS, ContextPrompts
from dear.methods.tensors import linear


@dataclass(frozen=True)
class MaPLeConfig(Options):
    context: Count = 2  #: vectors per layer
    words: str = WORDS  #: the prompt's first words, of which `context` are replaced; empty: random start
    depth: int | None = None  #: J, layers with learned vectors; None: three quarters (9 of 12)


class MaPLe(Method):
    """Coupled prompts of both towers."""

    name, title = "maple", "MaPLe"
    about = "learned tokens in both towers, coupled"
    cut = 1
    recipe = {"optimizer": "sgd", "lr": 3.5e-3, "epochs": 5, "batch": 4}
    Config = MaPLeConfig
    config: MaPLeConfig

    def build(self, generator: torch.Generator) -> None:
        """Text vectors [J, T, D_text] and coupling functions [J, D, D_text], [J, D]."""
        vision, text = self.clip.config.vision, self.clip.config.text
        depth = resolve_depth(self.config.depth, min(vision.layers, text.layers))
        self.context = ContextPrompts(self.prompts, self.config.context, self.config.words)
        self.vectors = self.learn(self.context.deep_start(self.clip, generator, depth))
        couple = linear(generator, depth, vision.width, text.width)
        self.couple, self.couple_bias = map(self.learn, couple)

    def texts(self) -> Tensor:
        return self.context.features(self.clip, dict(enumerate(self.vectors, start=1)))

    def images_from_frozen(self, frozen: Frozen) -> Tensor:
        tokens = (
            torch.einsum("jtw,jdw->jtd", self.vectors, self.couple) + self.couple_bias[:, None]
        )  # [J, T, D]
        return encode_with_prompts(self.clip, frozen.x, tokens)
