"""LP++: a linear probe blended with text features by learned class weights (Huang et al., CVPR 2024).

`logits_c = f w_c + b_c + alpha_c (f t_c)` with f the unit image feature and t_c the unit text feature. w, b
and alpha minimize the cross-entropy over all training images at once; initial values and step sizes are
computed from the data, so nothing is tuned: w_c is initialized to the sum of the features of class c, alpha
to 250 times the mean cosine of an image with the text of its class; the step of w and b is `4 n /
lambda_max(F^T F)`, that of alpha `n / (4 max_c sum_i (f_i t_c)^2)`. Gradient descent has momentum 0.9 for w
and b; alpha is updated at every tenth step.

Departures: the authors keep the epoch that is best on validation images; here the last of 300 is kept. Their
code never resets the gradient of alpha, so its updates use the sum of all gradients since the first step;
here an update uses the gradient of its step, as in the paper. Their features come from one random view per
image; here from `views`, each of which is a training image. The sum of features grows with the number of
images, so a method trained on a cross-validation fold would be less confident than one trained on all images,
and thresholds fitted on folds would be too low; folds therefore use the `images` per class of the full
training set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.methods.base import Method
from dear.methods.focus import FeatureReader, FocusConfig, training_features
from dear.methods.frozen import Batches, Frozen
from dear.methods.options import Count, Positive
from dear.methods.tensors import indicators, unit

_ALPHA_EVERY = 10  # steps between two updates of alpha
_ALPHA_SCALE = 250.0  # the authors' bound on the scale of the text part
_MOMENTUM = 0.9


@dataclass(frozen=True)
class LPPlusPlusConfig(FocusConfig):
    steps: Count = 300  #: steps of gradient descent
    views: Count = 1  #: random views per image; 0: the whole image, without augmentation
    images: Positive | None = None  #: images per class assumed in the initial w; None: the actual number


@torch.no_grad()
def fit(
    features: Tensor, cosines: Tensor, labels: Tensor, steps: int, images: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns w [C, W], b [C] and alpha [C] from unit features [n, W], cosines with texts [n, C], labels [n].

    w is initialized as if there were `images` per class; None: the actual number. With rows [n, C] of several
    labels each class has a sigmoid: w is initialized to 0, and b to the log odds of the class.
    """
    count, classes = cosines.shape
    truth = indicators(labels, classes).to(features.dtype)  # [n, C]
    weight, bias = truth.T @ features, features.new_zeros(classes)
    if images is not None:
        weight = weight * (images * classes / count)
    per_class = (truth * cosines).sum(0) / truth.sum(0).clamp(min=1)
    alpha = (_ALPHA_SCALE * per_class[truth.sum(0) > 0].mean()).expand(classes).clone()
    if labels.ndim == 2:
        shares = truth.mean(0).clamp(1 / (2 * count), 1 - 1 / (2 * count))
        weight, bias = torch.zeros_like(weight), (shares / (1 - shares)).log() - alpha * cosines.mean(0)
    step = 4 * count / torch.linalg.eigvalsh(features.T @ features)[-1]
    alpha_step = count / (4 * cosines.square().sum(0).max())
    momentum_w, momentum_b = torch.zeros_like(weight), torch.zeros_like(bias)
    for number in range(1, steps + 1):
        logits = features @ weight.T + bias + alpha * cosines
        probabilities = logits.sigmoid() if labels.ndim == 2 else logits.softmax(-1)
        gradient = (probabilities - truth) / count  # [n, C], of the mean cross-entropy in the logits
        momentum_w = _MOMENTUM * momentum_w + gradient.T @ features
        momentum_b = _MOMENTUM * momentum_b + gradient.sum(0)
        weight, bias = weight - step * momentum_w, bias - step * momentum_b
        if number % _ALPHA_EVERY == 0:
            alpha = alpha - alpha_step * (gradient * cosines).sum(0)
    return weight, bias, alpha


class LPPlusPlus(Method):
    """A linear probe and zero-shot CLIP, blended per class."""

    name, title = "lp-plus-plus", "LP++"
    about = "a linear classifier blended with the prompts; seconds, trained classes only"
    quick = True
    Config, can_focus, several_labels = LPPlusPlusConfig, True, True
    options_without_augmentation = {"views": 0}
    config: LPPlusPlusConfig
    weight: Tensor
    bias: Tensor
    alpha: Tensor
    per_class: Tensor

    def build(self, generator: torch.Generator) -> None:
        """w, b and alpha, initialized so that the logits are those of zero-shot CLIP."""
        text = self.prompts.frozen
        self.reader = FeatureReader(self)
        self.register_buffer("weight", text.new_zeros(len(text), self.reader.width))
        self.register_buffer("bias", text.new_zeros(len(text)))
        self.register_buffer("alpha", text.new_full((len(text),), self.clip.logit_scale))
        self.register_buffer("per_class", text.new_zeros(()))  # images per class in the initial w

    def prepare(self, batches: Batches) -> None:
        features, images, labels, _ = training_features(self.clip, self.reader, batches, self.config.views)
        dtype = self.weight.dtype
        cosines = images.to(dtype) @ self.prompts.frozen.to(dtype).T  # [n, C]
        per_class = self.config.images or len(labels) / len(self.classes)
        self.per_class = self.per_class.new_tensor(per_class)
        fitted = fit(features.to(dtype), cosines, labels, self.config.steps, per_class)
        self.weight, self.bias, self.alpha = (tensor.to(self.weight.dtype) for tensor in fitted)

    def settled_config(self) -> LPPlusPlusConfig:
        return replace(self.config, images=float(self.per_class) or None)

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        dtype = self.weight.dtype
        text = unit(frozen.x).to(dtype) @ (self.alpha[:, None] * self.prompts.frozen).T  # [B, C]
        return {"default": F.linear(self.reader(frozen).to(dtype), self.weight, self.bias) + text}
