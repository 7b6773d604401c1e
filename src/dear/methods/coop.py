"""CoOp: a learned context in front of the class names (Zhou, Yang, Loy, Liu, IJCV 2022).

Prompt: `t_c = [V]_1 ... [V]_M [class c].`; all classes share V, nothing else is learned, and
p(y|x) is CLIP's softmax over cosines.

Departures from the authors' code:
- The default is the setting of CoOp in base-to-novel tables (from the CoCoOp paper): M = 4, started at
  "a photo of a", batch 32, lr 0.002; but 50 epochs for every dataset, which there are ImageNet's (200 for
  the others). `context=16, words=""` with 200 epochs is the IJCV paper's.
- Contexts per class ("CSC") and class names in the middle are left out: they cannot name
  novel classes, or gained nothing.
- The last epoch is kept, always.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dear.methods.base import Method
from dear.methods.options import Count, Options
from dear.methods.prompts import WORDS, ContextPrompts


@dataclass(frozen=True)
class CoOpConfig(Options):
    context: Count = 4  #: M, how many vectors
    words: str = WORDS  #: where they start; empty: random


class CoOp(Method):
    """Learned context vectors; image tower untouched."""

    name, title = "coop", "CoOp"
    about = "learned words around the class name"
    recipe = {"optimizer": "sgd", "lr": 2e-3, "epochs": 50, "batch": 32}
    Config = CoOpConfig
    config: CoOpConfig

    def build(self, generator: torch.Generator) -> None:
        self.context = ContextPrompts(self.prompts, self.config.context, self.config.words)
        self.ctx = self.learn(self.context.start(self.clip, generator))

    def texts(self) -> Tensor:
        return self.context.features(self.clip, {1: self.ctx})
