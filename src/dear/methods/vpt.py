"""VPT-deep: learned tokens in the image tower (Jia, Tang, Chen, Cardie, Belongie, Hariharan, Lim, ECCV 2022).

At every layer T learned tokens are inserted after the patches and replace the previous layer's output of them
(`[x_i, _, E_i] = L_i([x_{i-1}, P_{i-1}, E_{i-1}])`). On CLIP the classifier is the frozen text features of
the task's prompts.

Departures: VPT was written for ViT with a learned linear head; the setting here is the one in which prompt
papers compare with it on CLIP (MaPLe's: 8 tokens, all layers, SGD with lr 0.0025, batch 4, 5 epochs), and the
last epoch is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dear.methods.base import Method
from dear.methods.deep_prompts import encode_with_prompts, resolve_depth
from dear.methods.frozen import Frozen
from dear.methods.options import Count, Options
from dear.methods.tensors import normal


@dataclass(frozen=True)
class VPTConfig(Options):
    tokens: Count = 8  #: T, tokens per layer; 0 is frozen CLIP
    depth: int | None = None  #: layers with learned tokens; None: all


class VPT(Method):
    """Deep visual prompts; the text tower is frozen."""

    name, title = "vpt", "VPT"
    about = "learned tokens in the image tower"
    cut = 1
    recipe = {"optimizer": "sgd", "lr": 2.5e-3, "epochs": 5, "batch": 4}
    Config = VPTConfig
    config: VPTConfig

    def build(self, generator: torch.Generator) -> None:
        """One learned tensor: tokens [depth, T, D]."""
        vision = self.clip.config.vision
        depth = resolve_depth(self.config.depth, vision.layers, share=1.0)
        self.tokens = self.learn(normal(generator, depth, self.config.tokens, vision.width))

    def images_from_frozen(self, frozen: Frozen) -> Tensor:
        return encode_with_prompts(self.clip, frozen.x, self.tokens)
