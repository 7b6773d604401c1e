"""ProKeR: kernel ridge regression on top of zero-shot CLIP, in closed form (Bendou et al., CVPR 2025).

With S the unit features of the n training images, Y their labels (one-hot), f(x) = x W^T the zero-shot
cosines and the kernel `k(x, y) = exp(-beta (1 - x y^T))`, the logits are the minimizer of
`sum_i |g(s_i) - y_i|^2 + lambda |g - f|^2` over g in the kernel's space around f:
`g(x) = f(x) + k(x, S) (k(S, S) + lambda I)^-1 (Y - f(S))`. There are no gradient steps.

Departures: the authors search beta and lambda on validation images of each dataset; here both are fixed at
their values for ImageNet with 16 shots. Their published code solves with `k(S, S) / lambda + I` and leaves
out the factor 1 / lambda of the minimizer that the paper states; this follows the paper. Features are means
over several random views, as theirs. The logits are multiplied by CLIP's temperature, which changes
probabilities but no prediction. The solution cannot predict novel classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dear.methods.base import Method
from dear.methods.focus import FeatureReader, FocusConfig, training_features
from dear.methods.frozen import Batches, Frozen
from dear.methods.options import Count, Positive, Ridge
from dear.methods.tensors import indicators, unit


@dataclass(frozen=True)
class ProKeRConfig(FocusConfig):
    beta: Positive = 1.7  #: decay of the kernel with distance
    ridge: Ridge = 0.1  #: lambda, strength of the regularization toward zero-shot CLIP
    views: Count = 10  #: random views per image to average; 0: the whole image, without augmentation


class ProKeR(Method):
    """Closed-form kernel regression on frozen features."""

    name, title = "proker", "ProKeR"
    about = "compares with stored training images by kernel regression; seconds, trained classes only"
    quick = True
    Config, can_focus, several_labels = ProKeRConfig, True, True
    options_without_augmentation = {"views": 0}
    config: ProKeRConfig
    keys: Tensor
    coefficients: Tensor

    def build(self, generator: torch.Generator) -> None:
        """Training features [n, W] and coefficients [n, C], empty until `prepare`."""
        self.reader = FeatureReader(self)
        self.register_buffer("keys", self.prompts.frozen.new_zeros(0, self.reader.width))
        self.register_buffer("coefficients", self.prompts.frozen.new_zeros(0, len(self.classes)))

    def kernel(self, x: Tensor, y: Tensor) -> Tensor:
        """Kernel matrix [n, m] of unit features [n, W] and [m, W]."""
        return torch.exp(-self.config.beta * (1 - x @ y.T))

    @torch.no_grad()
    def prepare(self, batches: Batches) -> None:
        """Solve for the coefficients, in float64: the kernel matrix is nearly singular."""
        parts = training_features(self.clip, self.reader, batches, self.config.views, mean=True)
        keys, images, labels = parts[0].double(), parts[1].double(), parts[2]
        residual = indicators(labels, len(self.classes)) - images @ self.prompts.frozen.double().T  # [n, C]
        ridge = self.config.ridge * torch.eye(len(keys), dtype=keys.dtype, device=keys.device)
        solution = torch.linalg.solve(self.kernel(keys, keys) + ridge, residual)  # [n, C]
        dtype = self.prompts.frozen.dtype
        self.keys, self.coefficients = keys.to(dtype), solution.to(dtype).contiguous()

    def state_shapes(self, state: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
        rows = len(state["keys"]) if "keys" in state and state["keys"].ndim == 2 else 0
        return {"keys": (rows, self.keys.shape[1]), "coefficients": (rows, len(self.classes))}

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        dtype = self.keys.dtype
        zero_shot = unit(frozen.x).to(dtype) @ self.prompts.frozen.T  # [B, C]
        logits = zero_shot + self.kernel(self.reader(frozen).to(dtype), self.keys) @ self.coefficients
        return {"default": self.clip.logit_scale * logits}
