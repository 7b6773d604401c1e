"""RPO: read-only prompts (Lee, Song, Suh, Choi, Lee, Kim, ICCV 2023).

K learned tokens follow the patches, K follow EOT. Masks hide them from every query, including themselves and
each other: they attend to the frozen model's states and do not change them, so CLIP's features are unchanged.
`logits = 1/K sum_k tau cos(v_k, t_k)` over pairs of the prompts' last states. Prompts are initialized to the
embeddings of the class token and of EOT plus 0.1 times a random unit vector. K = 24.

Departures: lr 0.01 for every dataset (the authors halve it for ImageNet); otherwise the authors' setting:
SGD, batch 4, 15 epochs, last epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.edit import BlockMask, Edit, LayerEdit
from dear.clip.model import Clip
from dear.methods.base import Method
from dear.methods.frozen import Frozen
from dear.methods.options import AtLeastOne, NotNegative, Options
from dear.methods.tensors import normal, unit


@dataclass(frozen=True)
class RPOConfig(Options):
    prompts: AtLeastOne = 24  #: K, pairs of prompts
    noise: NotNegative = 0.1  #: length of the random vector added to the initial prompts


def prompt_edit(clip_layers: int, tokens: Tensor, mask: Tensor | BlockMask) -> Edit:
    """Tokens inserted at layer 1 and never replaced, with the same mask in all layers."""
    layers = {layer: LayerEdit(mask=mask) for layer in range(2, clip_layers + 1)}
    return Edit({1: LayerEdit(tokens=tokens, mask=mask), **layers}, count=tokens.shape[-2])


class RPO(Method):
    """Read-only prompts in both towers."""

    name, title = "rpo", "RPO"
    about = "read-only tokens in both towers"
    cut = 1
    recipe = {"optimizer": "sgd", "lr": 1e-2, "epochs": 15, "batch": 4}
    Config = RPOConfig
    config: RPOConfig

    def build(self, generator: torch.Generator) -> None:
        """Prompts [K, D] of each tower."""
        count = self.config.prompts
        visible = torch.zeros(self.clip.config.vision.heads, 1 + count, 1 + count, dtype=torch.bool)
        visible[:, :, 0] = True  # all tokens attend to the original tokens only
        self.mask = BlockMask(visible)

        def add_noise(start: Tensor) -> Tensor:  # [D] -> [K, D]
            noise = F.normalize(normal(generator, count, len(start)), dim=-1)
            return start.cpu().double() + self.config.noise * noise

        self.clip.visual.require_class_token(self.title)
        assert self.clip.visual.class_token is not None  # as checked in the line before
        self.image = self.learn(add_noise(self.clip.visual.class_token))
        self.text = self.learn(add_noise(_eot_embedding(self.clip)))

    def _images(self, x: Tensor) -> Tensor:
        """Last states of the image prompts, projected, [B, K, E], for embedded patches [B, N, D]."""
        visual = self.clip.visual
        read = torch.arange(x.shape[1], x.shape[1] + len(self.image), device=x.device)
        edit = prompt_edit(self.clip.config.vision.layers, visual.norm_input(self.image), self.mask)
        return visual.project(visual.final_rows(x, edit=edit, read=read))

    def _texts(self) -> Tensor:
        """Last states of the text prompts, projected, [C, K, E]."""
        tower, count = self.clip.text, len(self.text)
        x = tower.embed(self.prompts.ids)
        edit = prompt_edit(self.clip.config.text.layers, self.text, self._text_mask(x))
        texts = tower.project(tower.run(x, edit=edit)[:, -count:])  # [C, T + K, D] -> [C, K, E]
        # [C, K, E] -> [K, C, E] and back
        return self.prompts.add_text_shift(texts.transpose(0, 1)).transpose(0, 1)

    def _text_mask(self, x: Tensor) -> Tensor:
        """Hides the prompts and the padding after a class's EOT from every query, [C, 1, T + K, T + K]."""
        length = x.shape[1] + len(self.text)
        hidden = torch.arange(length, device=x.device) > self.prompts.eot[:, None]  # [C, T + K]
        mask = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device).masked_fill(hidden, float("-inf"))
        return mask[:, None, None].expand(-1, -1, length, -1)

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        images, texts = unit(self._images(frozen.x)), unit(self.cached("texts", self._texts))
        scale = self.clip.logit_scale / self.config.prompts
        return {"default": scale * torch.einsum("bke,cke->bc", images, texts)}


def _eot_embedding(clip: Clip) -> Tensor:
    """The embedding of EOT without its position, [D]."""
    last = torch.tensor([[clip.config.text.vocab - 1]], device=clip.device)
    return clip.text.embed(last)[0, 0] - clip.text.positions[0]
