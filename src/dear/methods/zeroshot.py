"""Zero-shot CLIP: the frozen model, one prompt per class or the mean of several (Radford et al., ICML 2021).

`logits = tau cos(f, w_c)`, f the image feature, w_c the text feature of the class's prompt. With `ensemble`
w_c is the mean of the unit features of several prompts, normalized again.

Departures: for every dataset the ensemble is the task's prompt and seven of the authors' eighty prompts for
ImageNet; their prompts for the other datasets are omitted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dear.clip.model import Clip
from dear.errors import UsageError
from dear.methods.base import Method
from dear.methods.frozen import Frozen
from dear.methods.options import Options
from dear.methods.tensors import unit
from dear.utils.text import fill_template

ENSEMBLE = (
    "itap of a {}.",
    "a bad photo of the {}.",
    "a origami {}.",
    "a photo of the large {}.",
    "a {} in a video game.",
    "art of the {}.",
    "a photo of the small {}.",
)
"""Seven prompts that, according to CLIP's authors, work about as well on ImageNet as all eighty."""


@dataclass(frozen=True)
class ZeroShotConfig(Options):
    ensemble: bool = False  #: average the unit features of the task's prompt and of `templates`
    templates: tuple[str, ...] = ENSEMBLE


class ZeroShot(Method):
    """The frozen CLIP as a method: nothing is learned."""

    name, title = "zeroshot", "CLIP"
    about = "the frozen model; nothing is trained"
    quick = True
    Config, several_labels = ZeroShotConfig, True
    config: ZeroShotConfig

    def build(self, generator: torch.Generator) -> None:
        if self.config.ensemble and self.prompts.token_ids is not None:
            raise UsageError("ensemble needs class names, got token ids; leave ids or ensemble out")
        if self.config.ensemble and self.prompts.several_texts:
            raise UsageError(
                "ensemble needs one text per class, got several, which are averaged; leave ensemble out"
            )

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        texts = self.cached("ensemble", self._ensemble) if self.config.ensemble else self.prompts.frozen
        return {"default": self.clip.logit_scale * unit(frozen.x) @ texts.T}

    def _ensemble(self) -> Tensor:
        """Unit mean over prompts of unit text features, [C, E]."""
        sentences = [[fill_template(t, name) for name in self.classes] for t in self.config.templates]
        features = [self.prompts.frozen, *(unit(self.clip.encode_text(texts)) for texts in sentences)]
        return unit(torch.stack(features).mean(dim=0))  # [templates, C, E] -> [C, E]

    def merge(self) -> Clip:
        return self.clip.fold_correction()
