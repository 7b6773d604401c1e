"""CoCoOp: a context that every image shifts (Zhou, Yang, Loy, Liu, CVPR 2022).

A small network h maps the image's unit feature to one vector, which is added to every context vector,
`v_m(x) = v_m + h(x)`, h = Linear(E, E/16), ReLU, Linear(E/16, D). The text features therefore depend on the
image: a batch needs B·C passes of the text tower, computed in chunks.

Departures: none known; the authors' setting is context 4, batch 1, 10 epochs, lr 0.002, last epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.methods.base import Method
from dear.methods.frozen import Frozen
from dear.methods.options import AtLeastOne, Count, Options
from dear.methods.prompts import WORDS, ContextPrompts
from dear.methods.tensors import linear, unit


@dataclass(frozen=True)
class CoCoOpConfig(Options):
    context: Count = 4  #: M, number of context vectors
    words: str = WORDS  #: initial words of the context; empty: random
    narrowing: AtLeastOne = 16  #: the network's hidden width is E divided by this


class CoCoOp(Method):
    """Learned context vectors, and a network that shifts them for each image."""

    name, title = "cocoop", "CoCoOp"
    about = "learned words that shift with each image; slow"
    recipe = {"optimizer": "sgd", "lr": 2e-3, "epochs": 10, "batch": 1}
    Config = CoCoOpConfig
    config: CoCoOpConfig

    def build(self, generator: torch.Generator) -> None:
        """The context [M, D] and the network's two layers."""
        self.context = ContextPrompts(self.prompts, self.config.context, self.config.words)
        self.ctx = self.learn(self.context.start(self.clip, generator))
        embed_dim, width = self.clip.config.embed_dim, self.clip.config.text.width
        hidden = max(1, embed_dim // self.config.narrowing)
        self.down, self.down_bias = map(self.learn, linear(generator, hidden, embed_dim))
        self.up, self.up_bias = map(self.learn, linear(generator, width, hidden))

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        images = unit(frozen.x)  # [B, E]
        hidden = F.linear(images.to(self.down.dtype), self.down, self.down_bias).relu()
        shift = F.linear(hidden, self.up, self.up_bias)  # [B, D]
        contexts = self.ctx + shift[:, None]  # [B, M, D]
        texts = unit(self.context.features_each(self.clip, contexts))  # [B, C, E]
        return {"default": self.clip.logit_scale * torch.einsum("be,bce->bc", images, texts)}
