"""CLIP-Adapter: a small net after the image tower (Gao, Geng, Zhang, Ma, Fang, Zhang, Li, Qiao, IJCV 2024).

`A(f) = ReLU(ReLU(f W_1^T) W_2^T)`, W_1 [E/4, E], W_2 [E, E/4], and `f* = r A(f) + (1 - r) f` with r = 0.2.

Departures: the paper searches r per dataset; here it is 0.2, as in the authors' code, for all. The text
adapter, which does not help according to the paper, is omitted. Training uses the default recipe (AdamW, lr
0.001, 10 epochs, batch 16), because the authors' code does not include its settings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.methods.base import Method
from dear.methods.focus import FeatureReader, FocusConfig
from dear.methods.frozen import Batches, Frozen
from dear.methods.options import AtLeastOne, Share
from dear.methods.tensors import uniform


@dataclass(frozen=True)
class CLIPAdapterConfig(FocusConfig):
    ratio: Share = 0.2  #: r, weight of the adapted feature; 0 is frozen CLIP
    narrowing: AtLeastOne = 4  #: the hidden width is E divided by this


class CLIPAdapter(Method):
    """A bottleneck after the frozen image feature."""

    name, title = "clip-adapter", "CLIP-Adapter"
    about = "a small network after frozen features; fast"
    quick = True
    Config, can_focus = CLIPAdapterConfig, True
    config: CLIPAdapterConfig

    def build(self, generator: torch.Generator) -> None:
        """W_1 and W_2, initialized like linear layers."""
        self.reader = FeatureReader(self)
        embed_dim = self.clip.config.embed_dim
        hidden = max(1, embed_dim // self.config.narrowing)
        self.down = self.learn(uniform(generator, hidden, self.reader.width, inputs=self.reader.width))
        self.up = self.learn(uniform(generator, embed_dim, hidden, inputs=hidden))

    def prepare(self, batches: Batches) -> None:
        self.reader.fit(self.clip, batches)

    def images_from_frozen(self, frozen: Frozen) -> Tensor:
        """f* [B, E], the mixture of adapted and frozen features."""
        features = inputs = frozen.x.to(self.down.dtype)  # [B, E]
        if self.focus:  # the focused feature at the length of the image feature, [B, 2 E]
            inputs = self.reader(frozen) * features.norm(dim=-1, keepdim=True)
        adapted = F.linear(F.linear(inputs, self.down).relu(), self.up).relu()  # [B, W] -> [B, E/4] -> [B, E]
        return self.config.ratio * adapted + (1 - self.config.ratio) * features
