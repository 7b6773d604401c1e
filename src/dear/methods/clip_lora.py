"""CLIP-LoRA: low-rank changes of q, k and v in both towers (Zanella, Ben Ayed, CVPR workshops 2024).

`W* = W + (a / sqrt(r)) B A` in every layer, A [r, D], B [D, r] initialized to 0, r = 2, a = 1, dropout 0.25
on the input of A; cross-entropy of CLIP's logits. The scale is that of the authors' code. After training the
changes fold into the weights: `merge()` returns a plain CLIP.

Departures: 50 epochs (the authors use 500 steps per shot for any number of classes), and the default cosine
schedule with one warm-up epoch. AdamW, lr 2e-4, weight decay 0.01 and batch 32 are the authors'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor

from dear.clip.edit import Edit, LayerEdit, LowRank
from dear.clip.model import Clip
from dear.methods.base import Method
from dear.methods.frozen import Cut, Frozen, Loss
from dear.methods.headtools import fold
from dear.methods.options import AtLeastOne, Options, Positive, Share
from dear.methods.tensors import scores, uniform

TOWERS = {"both": ("image", "text"), "image": ("image",), "text": ("text",)}


@dataclass(frozen=True)
class CLIPLoRAConfig(Options):
    rank: AtLeastOne = 2  #: r
    scale: Positive = 1.0  #: a; the change is multiplied with a / sqrt(r)
    dropout: Share = 0.25  #: on the input of A, in training
    #: projections with a low-rank change
    on: Annotated[tuple[Literal["q", "k", "v"], ...], Meta(min_length=1)] = ("q", "k", "v")
    towers: Literal["both", "image", "text"] = "both"


class CLIPLoRA(Method):
    """LoRA on both towers."""

    name, title = "clip-lora", "CLIP-LoRA"
    about = "low-rank changes of both towers"
    cut: Cut = 1
    recipe = {"lr": 2e-4, "weight_decay": 1e-2, "epochs": 50, "batch": 32}
    Config = CLIPLoRAConfig
    config: CLIPLoRAConfig

    def build(self, generator: torch.Generator) -> None:
        """A [L, P, r, D] and B [L, P, H, d, r] of each tower, P the number of changed projections."""
        self.cut = 1 if "image" in TOWERS[self.config.towers] else "feature"
        rank, count = self.config.rank, len(self.config.on)
        for name in TOWERS[self.config.towers]:
            tower = self.clip.config.vision if name == "image" else self.clip.config.text
            down = uniform(generator, tower.layers, count, rank, tower.width, inputs=tower.width)
            up = torch.zeros(tower.layers, count, tower.heads, tower.head_width, rank)
            self.register_parameter(f"{name}_down", self.learn(down))
            self.register_parameter(f"{name}_up", self.learn(up))

    def edit(self, name: str, dropout: float = 0.0) -> Edit | None:
        """The low-rank changes of the tower "image" or "text"; None if it is frozen."""
        if name not in TOWERS[self.config.towers]:
            return None
        scale = self.config.scale / self.config.rank**0.5
        layers = {}
        downs, ups = self.get_parameter(f"{name}_down"), self.get_parameter(f"{name}_up")
        for layer, (down, up) in enumerate(zip(downs, ups, strict=True), start=1):
            pairs: dict[str, Any] = {
                p: LowRank(down[i, None], up[i], scale, dropout) for i, p in enumerate(self.config.on)
            }
            layers[layer] = LayerEdit(**pairs)
        return Edit(layers)

    def images_from_frozen(self, frozen: Frozen, dropout: float = 0.0) -> Tensor:
        edit = self.edit("image", dropout)
        return frozen.x if edit is None else self.clip.visual.features_from(frozen.x, edit=edit)

    def texts(self, dropout: float = 0.0) -> Tensor:
        edit = self.edit("text", dropout)
        return self.prompts.frozen if edit is None else self.prompts.features(edit)

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        images = self.images_from_frozen(frozen, self.config.dropout)
        ce = F.cross_entropy(scores(self.clip, images, self.texts(self.config.dropout)), labels)
        return Loss(ce, {"ce": ce.detach()})

    def merge(self) -> Clip:
        return fold(self.clip, self.edit("image"), self.edit("text"))
