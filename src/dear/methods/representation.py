"""Representation tokens: what MMRL and MMRL++ share.

From layer J on, tokens made of one learned space stand beside the patches and between BOT and the words. An
image has two features: `f_c` of the class token under CLIP's projection, and `f_r` of the representation
tokens' mean under a learned one.

Loss: `alpha CE(f_c) + (1 - alpha) CE(f_r) + lambda (1 - cos(f_c, f_c frozen) + 1 - cos(w, w frozen))`.
Inference: `fused`, alpha s_c + (1 - alpha) s_r; `decoupled`, s_c alone; `auto`, the authors' rule: fused for
classes that were trained on, decoupled for others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.tower import Edit, LayerEdit
from dear.methods.base import Frozen, Loss, Method, distance, normal, scores, unit
from dear.methods.deep import depth_of


class RepresentationMethod(Method):
    """The base of MMRL and MMRL++: a subclass writes `fresh_tokens` and `project_mean`.

    Its `Config` has `tokens`, `width`, `first_layer`, `alpha` and `weight`.
    """

    cut: int = 1  # `build` sets the layer
    reads_frozen = True
    modes: ClassVar[tuple[str, ...]] = ("auto", "fused", "decoupled")
    recipe: ClassVar[Mapping[str, Any]] = {"batch": 4}
    config: Any

    def build(self, generator: torch.Generator) -> None:
        """J of both towers, and the learned space R [K, d_r]."""
        config, shape = self.config, self.clip.config
        self.cut, self.text_first = (
            depth_of(config.first_layer, tower.layers, share=0.5, option="first_layer")
            for tower in (shape.vision, shape.text)
        )
        self.space = self.learn(normal(generator, config.tokens, config.width))

    def fresh_tokens(self, tower: str) -> Tensor:
        """The tokens put in at each layer from J on, [layers, K, D], of the tower "image" or "text"."""
        raise NotImplementedError

    def project_mean(self, mean: Tensor) -> Tensor:
        """f_r [B, E] of the normed mean [B, D] of the last representation tokens, corrected."""
        raise NotImplementedError

    @property
    def token_weight(self) -> float:
        """Weight of a fresh token against what the layer before made of it."""
        return 1.0

    def _edit(self, tower: str, first: int, at: int | None = None) -> Edit:
        tokens = self.fresh_tokens(tower)
        layers = {
            layer: LayerEdit(tokens=own, token_weight=self.token_weight)
            for layer, own in enumerate(tokens, start=first)
        }
        return Edit(layers, count=tokens.shape[1], at=at)

    def texts(self) -> Tensor:
        """Text features [C, E]."""
        edit = self._edit("text", self.text_first, at=self.clip.text.first_word)
        return self.prompts.features(edit, first=self.text_first)

    def features(self, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """f_c and f_r, [B, E] each, from what the layers before J give, [B, N, D]."""
        visual = self.clip.visual
        own, last = visual.class_and_tokens(prefix, self.cut, self._edit("image", self.cut))
        f_c = visual.correct(visual.into_space(own))
        return f_c, self.project_mean(visual.correct_pooled(last.mean(dim=1)))

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        """Logits [B, C] of every mode."""
        alpha = self.config.alpha
        f_c, f_r = self.features(frozen[0])
        texts = self.cached("texts", self.texts)
        own = scores(self.clip, f_c, texts)
        fused = alpha * own + (1 - alpha) * scores(self.clip, f_r, texts)
        return {"auto": self.by_training(fused, own), "fused": fused, "decoupled": own}

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        """Two cross-entropies and the agreement with the frozen model."""
        alpha, f_frozen = self.config.alpha, frozen[1]
        f_c, f_r = self.features(frozen[0])
        texts = self.texts()
        parts = {
            "ce": F.cross_entropy(scores(self.clip, f_c, texts), labels),
            "ce_tokens": F.cross_entropy(scores(self.clip, f_r, texts), labels),
            "reg_image": distance(unit(f_c), f_frozen),
            "reg_text": distance(unit(texts), self.prompts.frozen),
        }
        total = alpha * parts["ce"] + (1 - alpha) * parts["ce_tokens"]
        total = total + self.config.weight * (parts["reg_image"] + parts["reg_text"])
        return Loss(total, {name: part.detach() for name, part in parts.items()})
