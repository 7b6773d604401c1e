"""PromptSRC: prompts of both towers that regulate themselves (Khattak et al., ICCV 2023).

Independent deep prompts in the text tower (the first starts at "a photo of a") and in the image tower. Three
constraints in addition to the cross-entropy:
1. agreement with the frozen model: `25 L1(w, w_frozen) + 10 L1(f, f_frozen) + KL(p_frozen || p)`, L1 the mean
   absolute difference of unit features, KL summed over classes and divided by B·C as in the authors' code;
2. Gaussian prompt aggregation: the result is `sum_e g_e P_e` over the epochs' prompts, g a normalized
   Gaussian around epoch 15 of 20 with deviation 1;
3. textual diversity: w_frozen is the mean feature over 60 templates.

Departures: one Gaussian for all tasks, in shares of the epochs (the authors set it per dataset: 15 and 1 of
20, 30 and 30 of 50 and so on); 60 templates of this package; last epoch's aggregate, never the best epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.methods.base import Method
from dear.methods.deep_prompts import encode_with_prompts, resolve_depth
from dear.methods.frozen import Frozen, Loss
from dear.methods.options import Count, NotNegative, Options, Positive, Share
from dear.methods.prompts import WORDS, ContextPrompts
from dear.methods.tensors import normal, scores, unit
from dear.utils.text import fill_template

# Sixty prompt templates of different wording, over which frozen text features are averaged.
DIVERSE = tuple(
    f"{kind} of {which}."
    for kind in (
        "a photo",
        "a picture",
        "a snapshot",
        "a close-up",
        "a bright photo",
        "a dark photo",
        "a blurry photo",
        "a cropped photo",
        "a drawing",
        "a painting",
        "a sketch",
        "a rendering",
    )
    for which in ("a {}", "the {}", "one {}", "a small {}", "a large {}")
)


@dataclass(frozen=True)
class PromptSRCConfig(Options):
    context: Count = 4  #: text vectors per layer
    tokens: Count = 4  #: image tokens per layer
    words: str = WORDS  #: initial words of the first layer's text vectors; empty: random
    depth: int | None = None  #: layers with learned vectors; None: three quarters (9 of 12)
    text_weight: NotNegative = 25.0
    image_weight: NotNegative = 10.0
    logits_weight: NotNegative = 1.0
    center: Share = 0.75  #: center of the Gaussian, as a fraction of the epochs (15 of 20)
    deviation: Positive = 0.05  #: deviation of the Gaussian, as a fraction of the epochs (1 of 20)
    templates: tuple[str, ...] = DIVERSE  #: prompts over which frozen text features are averaged


class PromptSRC(Method):
    """Deep prompts in both towers with three regularizers."""

    name, title = "promptsrc", "PromptSRC"
    about = "learned tokens in both towers, kept close to the frozen model"
    cut = 1
    reads_frozen = True
    recipe = {"optimizer": "sgd", "lr": 2.5e-3, "epochs": 20, "batch": 4}
    Config = PromptSRCConfig
    config: PromptSRCConfig

    def build(self, generator: torch.Generator) -> None:
        """Text vectors [J, M, D_text], image tokens [J, T, D], and their sums over epochs."""
        config, vision, text = self.config, self.clip.config.vision, self.clip.config.text
        depth, text_depth = (resolve_depth(config.depth, tower.layers) for tower in (vision, text))
        self.context = ContextPrompts(self.prompts, config.context, config.words)
        self.vectors = self.learn(self.context.deep_start(self.clip, generator, text_depth))
        self.tokens = self.learn(normal(generator, depth, config.tokens, vision.width))
        for name, p in list(self.named_parameters()):
            self.register_buffer(f"sum_{name}", p.detach().new_zeros(0))  # empty outside of training
        self._teacher: Tensor | None = None

    def texts(self) -> Tensor:
        return self.context.features(self.clip, dict(enumerate(self.vectors, start=1)))

    def images_from_frozen(self, frozen: Frozen) -> Tensor:
        return encode_with_prompts(self.clip, frozen.x, self.tokens)

    def teacher(self) -> Tensor:
        """Unit mean feature of each class over the templates, [C, E]; or that of its token ids or texts."""
        if self._teacher is None:
            if self.prompts.token_ids is not None or self.prompts.several_texts or not self.config.templates:
                self._teacher = self.prompts.frozen
            else:
                sentences = [[fill_template(t, name) for name in self.classes] for t in self.config.templates]
                features = torch.stack(
                    [self.clip.encode_text(texts) for texts in sentences]
                )  # [templates, C, E]
                self._teacher = unit(features.mean(dim=0))
        return self._teacher

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        config, images, texts = self.config, unit(self.images_from_frozen(frozen)), unit(self.texts())
        teacher, feature = self.teacher(), frozen.feature
        assert feature is not None
        logits = scores(self.clip, images, texts)
        expected = scores(self.clip, feature, teacher).log_softmax(dim=-1)
        divergence = F.kl_div(logits.log_softmax(dim=-1), expected, reduction="sum", log_target=True)
        parts = {
            "ce": F.cross_entropy(logits, labels),
            "text": F.l1_loss(texts, teacher),
            "image": F.l1_loss(images, feature),
            "logits": divergence / logits.numel(),
        }
        total = parts["ce"] + config.text_weight * parts["text"] + config.image_weight * parts["image"]
        total = total + config.logits_weight * parts["logits"]
        return Loss(total, {name: part.detach() for name, part in parts.items()})

    def epoch_weight(self, epoch: int, epochs: int) -> float:
        """g_e of an epoch counted from 1; over all epochs they sum to 1."""
        numbers = torch.arange(1, epochs + 1, dtype=torch.float64)
        z = (numbers - self.config.center * epochs) / (self.config.deviation * epochs)
        return float((-0.5 * z**2).softmax(dim=0)[epoch - 1])

    def after_epoch(self, epoch: int, epochs: int) -> None:
        for name, p in self.named_parameters():
            part, total = self.epoch_weight(epoch, epochs) * p.detach(), self.get_buffer(f"sum_{name}")
            setattr(self, f"sum_{name}", total + part if total.numel() else part)

    @torch.no_grad()
    def finish(self) -> None:
        """Replace the prompts by their aggregate over the epochs."""
        for name, p in self.named_parameters():
            total = self.get_buffer(f"sum_{name}")
            if total.numel():
                p.copy_(total)
                setattr(self, f"sum_{name}", total.new_zeros(0))

    def state_shapes(self, state: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
        """The sums over epochs are empty outside training."""
        sums = {f"sum_{name}": p.shape for name, p in self.named_parameters() if f"sum_{name}" in state}
        return {name: (0,) if state[name].numel() == 0 else tuple(shape) for name, shape in sums.items()}
