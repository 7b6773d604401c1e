"""ProKeR: kernel ridge regression on top of zero-shot CLIP, in closed form (Bendou et al., CVPR 2025).

With S the unit features of the n training images, Y their labels (one-hot), f(x) = x W^T the zero-shot
cosines and the kernel `k(x, y) = exp(-beta (1 - x y^T))`, the answer is the minimizer of
`sum_i |g(s_i) - y_i|^2 + lambda |g - f|^2` over g in the kernel's space around f:
`g(x) = f(x) + k(x, S) (k(S, S) + lambda I)^-1 (Y - f(S))`. Nothing is trained by steps.

Departures: the authors search beta and lambda on validation images of each dataset; here both are fixed at
their values for ImageNet with 16 shots.
Their published code solves with `k(S, S) / lambda + I` and leaves out the factor 1 / lambda of the minimizer
that the paper states; ours follows the paper. Features are means over several random views, as theirs. The
logits are multiplied by CLIP's temperature, which changes probabilities and no answer. The solution holds
no novel classes, so it refuses to name any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dear.methods.base import Method
from dear.methods.focus import FeatureReader, FocusConfig, training_features
from dear.methods.frozen import Batches, Frozen
from dear.methods.options import Count, Positive
from dear.methods.tensors import indicators, unit


@dataclass(frozen=True)
class ProKeRConfig(FocusConfig):
    beta: Positive = 1.7  #: how fast the kernel falls with distance
    ridge: Positive = 0.1  #: lambda: how strongly the answer is held to zero-shot CLIP
    views: Count = 10  #: random views per image whose features are averaged; 0: the whole image once


class ProKeR(Method):
    """The closed-form kernel regression; nothing is learned by steps."""

    name, title = "proker", "ProKeR"
    about = "compares with stored training images by kernel regression; seconds, trained classes only"
    quick = True
    Config, can_focus, several_labels = ProKeRConfig, True, True
    own_view_options = {"views": 0}
    config: ProKeRConfig
    keys: Tensor
    coefficients: Tensor

    def build(self, generator: torch.Generator) -> None:
        """Training features [n, E] and coefficients [n, C], empty until `prepare`."""
        self.reader = FeatureReader(self)
        self.register_buffer("keys", self.prompts.frozen.new_zeros(0, self.reader.width))
        self.register_buffer("coefficients", self.prompts.frozen.new_zeros(0, len(self.classes)))

    def kernel(self, left: Tensor, right: Tensor) -> Tensor:
        """K of unit features [n, E] and [m, E]: [n, m]."""
        return torch.exp(-self.config.beta * (1 - left @ right.T))

    @torch.no_grad()
    def prepare(self, batches: Batches) -> None:
        """Solve for the coefficients, in float64: the kernel matrix is nearly singular."""
        parts = training_features(self.clip, self.reader, batches, self.config.views, mean=True)
        keys, images, labels = parts[0].double(), parts[1].double(), parts[2]
        rest = indicators(labels, len(self.classes)) - images @ self.prompts.frozen.double().T
        ridge = self.config.ridge * torch.eye(len(keys), dtype=keys.dtype, device=keys.device)
        solved = torch.linalg.solve(self.kernel(keys, keys) + ridge, rest)
        kind = self.prompts.frozen.dtype
        self.keys, self.coefficients = keys.to(kind), solved.to(kind).contiguous()

    def state_shapes(self, state: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
        rows = len(state["keys"]) if "keys" in state and state["keys"].ndim == 2 else 0
        return {"keys": (rows, self.keys.shape[1]), "coefficients": (rows, len(self.classes))}

    def logits_from_frozen(self, frozen: Frozen) -> dict[str, Tensor]:
        kind = self.keys.dtype
        zero_shot = unit(frozen.x).to(kind) @ self.prompts.frozen.T
        answer = zero_shot + self.kernel(self.reader(frozen).to(kind), self.keys) @ self.coefficients
        return {"default": self.clip.logit_scale * answer}
