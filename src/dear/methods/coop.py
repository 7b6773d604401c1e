"""CoOp: a learned context before the class names (Zhou, Yang, Loy, Liu, IJCV 2022).

Prompt: `t_c = [V]_1 ... [V]_M [class c].`; all classes share V, nothing else is learned, and p(y|x) is CLIP's
softmax over cosines.

Departures from the authors' code:
- The default is the setting of CoOp in base-to-novel tables (from the CoCoOp paper): M = 4, initialized to
  "a photo of a", batch 32, lr 0.002; but 50 epochs for every dataset, where the authors use 50 for ImageNet
  and 200 for the others. `context=16, words=""` with 200 epochs is the setting of the IJCV paper.
- Contexts per class ("CSC") and class names in the middle are omitted: the former cannot predict novel
  classes, the latter did not help.
- The last epoch is used.
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
    context: Count = 4  #: M, number of context vectors
    words: str = WORDS  #: initial words of the context; empty: random


class CoOp(Method):
    """Learned context vectors; the image tower is frozen."""

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
