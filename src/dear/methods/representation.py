"""Representation tokens: what MMRL and MMRL++ share.

From layer J on, tokens made of one learned space stand beside the patches and between BOT and the words. An
image has two features: `f_c` of the class token under CLIP's projection, and `f_r` of the representation
tokens' mean under a learned one.

Loss: `alpha CE(f_c) + (1 - alpha) CE(f_r) + lambda (1 - cos(f_c, f_c frozen) + 1 - cos(w, w frozen))`.
Inference: `fused`, alpha s_c + (1 - alpha) s_r; `decoupled`, s_c alone; `auto`, the authors' rule: fused for
classes that were trained on, decoupled for others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from dear.clip.edit import Edit, LayerEdit
from dear.clip.model import Clip
from dear.methods.agreement import distance
from dear.methods.base import Frozen, Loss
from dear.methods.deep import depth_of
from dear.methods.prefix import class_and_tokens, frozen_features, image_prefix
from dear.methods.prompts import ClassPrompts, scores, unit

MODES = ("auto", "fused", "decoupled")


class RepresentationMethod(Protocol):
    """What the two methods are to the functions below."""

    config: Any  #: has alpha and weight
    prompts: ClassPrompts
    first: int  #: J of the image tower

    @property
    def clip(self) -> Clip:
        """The frozen backbone."""
        ...

    def cached(self, key: str, compute: Callable[[], Tensor]) -> Tensor:
        """`compute()`, kept while no learned tensor changes."""
        ...

    def features(self, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """f_c and f_r, [B, E] each, from what the layers before J give, [B, N, D]."""
        ...

    def texts(self) -> Tensor:
        """Text features [C, E]."""
        ...

    def by_training(self, trained: Tensor, others: Tensor) -> Tensor:
        """Logits [B, C] of trained classes from the first, of all others from the second."""
        ...


def first_layers(clip: Clip, asked: int | None) -> tuple[int, int]:
    """J of the image and of the text tower: the layer asked for, or the middle of each (6 of 12)."""
    vision, text = (
        depth_of(asked, tower.layers, share=0.5, option="first_layer")
        for tower in (clip.config.vision, clip.config.text)
    )
    return vision, text


def token_edit(first: int, tokens: Tensor, anchor: float = 1.0, at: int | None = None) -> Edit:
    """Tokens [layers, K, D] put in at layer `first` and each one after it."""
    layers = {layer: LayerEdit(tokens=own, anchor=anchor) for layer, own in enumerate(tokens, start=first)}
    return Edit(layers, count=tokens.shape[1], at=at)


def represented_texts(prompts: ClassPrompts, first: int, tokens: Tensor, anchor: float = 1.0) -> Tensor:
    """Text features [C, E] with tokens [layers, K, D] between BOT and the words."""
    return prompts.features(token_edit(first, tokens, anchor, at=prompts.clip.text.first_word), first=first)


def represented_images(
    clip: Clip, prefix: Tensor, first: int, tokens: Tensor, anchor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """f_c [B, E], and the mean of the last representation tokens [B, D], normed and not yet projected."""
    own, last = class_and_tokens(clip, prefix, first, token_edit(first, tokens, anchor))
    return clip.visual.correct(clip.visual.into_space(own)), last.mean(dim=1)


def frozen_stage(method: RepresentationMethod, pixels: Tensor) -> Frozen:
    """The input of layer J [B, N, D] and the frozen unit features [B, E]."""
    prefix = image_prefix(method.clip, pixels, method.first)
    return prefix, unit(frozen_features(method.clip, prefix, method.first))


def every_mode(method: RepresentationMethod, frozen: Frozen) -> dict[str, Tensor]:
    """Logits [B, C] of every mode."""
    alpha, clip = method.config.alpha, method.clip
    f_c, f_r = method.features(frozen[0])
    texts = method.cached("texts", method.texts)
    own = scores(clip, f_c, texts)
    fused = alpha * own + (1 - alpha) * scores(clip, f_r, texts)
    return {"auto": method.by_training(fused, own), "fused": fused, "decoupled": own}


def agreement_loss(method: RepresentationMethod, frozen: Frozen, labels: Tensor) -> Loss:
    """Two cross-entropies and the agreement with the frozen model."""
    alpha, clip = method.config.alpha, method.clip
    f_c, f_r = method.features(frozen[0])
    texts = method.texts()
    parts = {
        "ce": F.cross_entropy(scores(clip, f_c, texts), labels),
        "ce_tokens": F.cross_entropy(scores(clip, f_r, texts), labels),
        "reg_image": distance(unit(f_c), frozen[1]),
        "reg_text": distance(unit(texts), method.prompts.frozen),
    }
    total = alpha * parts["ce"] + (1 - alpha) * parts["ce_tokens"]
    total = total + method.config.weight * (parts["reg_image"] + parts["reg_text"])
    return Loss(total, {name: part.detach() for name, part in parts.items()})
