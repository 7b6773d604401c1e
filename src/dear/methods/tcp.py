"""TCP: class-aware prompt vectors (Yao, Zhang, Xu, CVPR 2024).

A shared context as in CoOp, and "textual knowledge embedding": a small network maps each class's frozen text
feature to M vectors, `T_c = Linear(E/4, M D)(QuickGELU(Linear(E, E/4)(w_c)))`, which replace the
context in the middle of the text tower (layer 9 of 12). Loss: `CE + 8 (1 - cos(learned, frozen text
features))`.

Context 4, batch 32, lr 0.002, 50 epochs; the end of the task's template follows the class name.

Departures: AdamW where the authors use Adam with a large epsilon for float16; the context is initialized to
"a photo of a", where their configuration initializes it at random; 50 epochs also where they stop after 25
(SUN397, ImageNet).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.methods.base import Method
from dear.methods.deep_prompts import resolve_depth
from dear.methods.frozen import Frozen, Loss
from dear.methods.kgcoop import knowledge_loss
from dear.methods.options import AtLeastOne, NotNegative, Options
from dear.methods.prompts import WORDS, ContextPrompts
from dear.methods.tensors import linear


@dataclass(frozen=True)
class TCPConfig(Options):
    context: AtLeastOne = 4  #: M, number of context vectors
    words: str = WORDS  #: initial words of the shared context; empty: random
    layer: int | None = None  #: first layer with the class's vectors; None: after two thirds (9 of 12)
    narrowing: AtLeastOne = 4  #: the network's hidden width is E divided by this
    weight: NotNegative = 8.0  #: weight of the distance to the frozen prompts


class TCP(Method):
    """A shared context, then class-aware vectors; the image tower is frozen."""

    name, title = "tcp", "TCP"
    about = "learned words that depend on the class"
    recipe = {"lr": 2e-3, "epochs": 50, "batch": 32}
    Config = TCPConfig
    config: TCPConfig

    def build(self, generator: torch.Generator) -> None:
        """The context [M, D] and the network's two layers."""
        config, text, embed_dim = self.config, self.clip.config.text, self.clip.config.embed_dim
        tail = self.template[self.template.index("{}") :]
        self.context = ContextPrompts(self.prompts, config.context, config.words, tail)
        middle = min(text.layers, resolve_depth(None, text.layers, share=2 / 3) + 1)
        self.layer = (
            middle if config.layer is None else resolve_depth(config.layer, text.layers, option="layer")
        )
        self.ctx = self.learn(self.context.start(self.clip, generator))
        hidden, outputs = max(1, embed_dim // config.narrowing), config.context * text.width
        self.down, self.down_bias = map(self.learn, linear(generator, hidden, embed_dim))
        self.up, self.up_bias = map(self.learn, linear(generator, outputs, hidden))

    def _class_tokens(self) -> Tensor:
        """T_c of every class, [C, M, D]."""
        hidden = F.linear(self.prompts.frozen.to(self.down.dtype), self.down, self.down_bias)
        hidden = hidden * torch.sigmoid(1.702 * hidden)  # QuickGELU
        tokens = F.linear(hidden, self.up, self.up_bias)  # [C, M D]
        return tokens.view(len(hidden), self.config.context, -1)  # [C, M D] -> [C, M, D]

    def texts(self) -> Tensor:
        tokens = self._class_tokens()
        if self.layer == 1:
            return self.context.features(self.clip, {1: tokens})
        return self.context.features(self.clip, {1: self.ctx, self.layer: tokens})

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        return knowledge_loss(self, frozen, labels, self.config.weight)
