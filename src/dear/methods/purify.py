"""Attention head purification for domain generalization (Wang, Kang, arXiv 2412.07226).

Task level: head-aware LoRA on q and v of the image tower, a pair of matrices per head, `dW_h = B_h A_h`;
rank 8 in the last two layers, 2 before. Domain level: one scalar per head and layer; `gate = H softmax
(scalars)` over a layer's heads multiplies the heads' outputs. `Loss = CE + w MMD`, the MMD between the source
domains' class-token features of every layer, mean over pairs; its gradient reaches the gates only. Afterwards
LoRA folds into q and v and the gates into the output projection: a plain CLIP at exactly its cost.

Departures: AdamW, lr 0.001, 10 epochs, batch 32, w = 1 and five Gaussian kernels around the median distance
(preset `paper`) are choices of this package and may differ from the authors'. The MMD compares the class
token after each layer; the paper's "masked head features" may be the gated outputs of the heads alone. The
default, preset `strong`, learns three times as fast, its gates another 20 times, in 40 epochs, and drops
three of ten heads in each step. Gates are soft; hard ones (`gates(top=...)`) are for inspection.

One forward pass serves both losses: the MMD is differentiated by the gates alone, and enters the sum as its
value with that gradient, which is the same as running a second pass on detached LoRA pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from msgspec import Meta
from torch import Tensor, nn

from dear.clip.edit import Edit, LayerEdit, LowRank, Record
from dear.clip.model import Clip
from dear.clip.rows import ClassRow
from dear.errors import UsageError
from dear.methods.base import Method
from dear.methods.frozen import Frozen, Loss
from dear.methods.headtools import fold
from dear.methods.options import AtLeastOne, NotNegative, Options, Positive, Preset
from dear.methods.tensors import scores, uniform

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # kernels around the median distance
_GRADIENT_SCALE = 1024.0  # keeps small MMD gradients from underflowing in 16 bits


@dataclass(frozen=True)
class PurifyConfig(Options):
    #: "heads": one pair per head; "shared": one A for all heads (ordinary LoRA); "none"
    lora: Literal["heads", "shared", "none"] = "heads"
    gates: bool = True
    rank: AtLeastOne = 2
    last_rank: AtLeastOne = 8  #: rank in the last two layers
    weight: NotNegative = 1.0  #: w, weight of the MMD
    mmd_to: Literal["gates", "all"] = "gates"  #: parameters that the gradient of the MMD reaches
    #: bandwidths of the Gaussian kernels; None: around the median distance
    bandwidths: tuple[Positive, ...] | None = None
    gate_rate: Positive = 20.0  #: learning rate of the gates' scalars, as a multiple of the recipe's
    #: probability that a head's output is set to 0 for a whole training step; the others are scaled up
    head_dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora == "none" and not self.gates:
            raise UsageError('lora must not be "none" when gates is false: nothing would be learned')


PRESETS = {
    "strong": Preset("rates at which both parts act, and head dropout"),
    "paper": Preset(
        "the paper's values, and this package's where the paper does not state them",
        options={"gate_rate": 1.0, "head_dropout": 0.0},
        recipe={"lr": 1e-3, "epochs": 10},
    ),
}


class Purify(Method):
    """Head-aware LoRA and domain-level gates on the image tower."""

    name, title = "purify", "Head purification"
    about = "low-rank changes and gates per head, for images from several domains"
    cut = 1
    recipe = {"batch": 32, "lr": 3e-3, "epochs": 40}
    presets = PRESETS
    Config = PurifyConfig
    config: PurifyConfig
    history: Tensor

    def build(self, generator: torch.Generator) -> None:
        """A and B of q and v, layer by layer; scalars [L, H]; the gates after each epoch [epochs, L, H]."""
        vision, config = self.clip.config.vision, self.config
        self.pairs = nn.ParameterDict()
        if config.lora != "none":
            for layer in range(1, vision.layers + 1):
                rank = config.last_rank if layer > vision.layers - 2 else config.rank
                sets = vision.heads if config.lora == "heads" else 1
                for p in ("q", "v"):
                    down = uniform(generator, sets, rank, vision.width, inputs=vision.width)
                    self.pairs[f"{p}{layer}_down"] = self.learn(down)
                    self.pairs[f"{p}{layer}_up"] = self.learn(
                        torch.zeros(vision.heads, vision.head_width, rank)
                    )
        if config.gates:
            self.scalars = self.learn(torch.zeros(vision.layers, vision.heads), config.gate_rate)
            self.register_buffer("history", self.scalars.detach().new_zeros(0, vision.layers, vision.heads))

    def gates(self, top: int | None = None) -> Tensor:
        """Gates [L, H], mean 1 in a layer; with `top`, 1 for that many strongest heads, 0 for the rest."""
        vision = self.clip.config.vision
        if not self.config.gates:
            return torch.ones(vision.layers, vision.heads, device=self.clip.device)
        if top is None:
            return self.scalars.softmax(dim=-1) * vision.heads
        if not 1 <= top <= vision.heads:
            raise UsageError(f"top must be from 1 to {vision.heads}, the heads of a layer, got {top}")
        strongest = self.scalars.detach().topk(top, dim=-1).indices
        return torch.zeros_like(self.scalars).scatter(1, strongest, 1.0)

    def edit(self, head_dropout: float = 0.0) -> Edit:
        """Low-rank changes and gates of the image tower."""
        gates = self.gates()  # [L, H]
        if head_dropout:
            gates = gates * (torch.rand_like(gates) >= head_dropout) / (1 - head_dropout)
        layers = {}
        for layer in range(1, self.clip.config.vision.layers + 1):
            q, v = (self._pair(f"{p}{layer}") for p in ("q", "v"))
            gate = gates[layer - 1] if self.config.gates or head_dropout else None
            layers[layer] = LayerEdit(gate=gate, q=q, v=v)
        return Edit(layers)

    def _pair(self, name: str) -> LowRank | None:
        return LowRank(self.pairs[f"{name}_down"], self.pairs[f"{name}_up"]) if self.pairs else None

    def images_from_frozen(
        self, frozen: Frozen, record: Record | None = None, head_dropout: float = 0.0
    ) -> Tensor:
        return self.clip.visual.features_from(frozen.x, edit=self.edit(head_dropout), record=record)

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        config = self.config
        record = ClassRow() if self._measures_domains and domains is not None else None
        images = self.images_from_frozen(frozen, record, config.head_dropout)
        ce = F.cross_entropy(scores(self.clip, images, self.texts()), labels)
        if record is None or domains is None:
            return Loss(ce, {"ce": ce.detach()})
        layers = range(1, self.clip.config.vision.layers + 1)
        states = torch.stack([record[f"blocks.{layer}.out"][:, 0] for layer in layers], dim=1)  # [B, L, D]
        gap = mmd(states.to(ce.dtype), domains, config.bandwidths)
        total = ce + config.weight * (gap if config.mmd_to == "all" else self._to_gates(gap))
        return Loss(total, {"ce": ce.detach(), "mmd": gap.detach()})

    @property
    def _measures_domains(self) -> bool:
        """Whether the gradient of the MMD reaches anything."""
        return self.config.weight > 0 and (self.config.mmd_to == "all" or self.config.gates)

    def _to_gates(self, gap: Tensor) -> Tensor:
        """`gap` with a gradient for the gates' scalars only."""
        if not (self.config.gates and gap.requires_grad):
            return gap.detach()
        (slope,) = torch.autograd.grad(_GRADIENT_SCALE * gap, self.scalars, retain_graph=True)
        return gap.detach() + ((self.scalars - self.scalars.detach()) * slope / _GRADIENT_SCALE).sum()

    def after_epoch(self, epoch: int, epochs: int) -> None:
        """Append the gates to `history`, for the plot of their evolution."""
        if self.config.gates:
            self.history = torch.cat([self.history, self.gates().detach()[None]])

    def state_shapes(self, state: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
        if self.config.gates and state.get("history", torch.zeros(())).ndim == 3:
            return {"history": (len(state["history"]), *self.history.shape[1:])}
        return {}

    def learned_values(self) -> dict[str, Any]:
        return {"gates": [[round(g, 4) for g in row] for row in self.gates().detach().tolist()]}

    def merge(self) -> Clip:
        return fold(self.clip, visual=self.edit())


def kernels(x: Tensor, bandwidths: Sequence[float] | None = None) -> Tensor:
    """Mean of Gaussian kernels exp(-|x_i - x_j|^2 / 2 s^2) over bandwidths s, [L, n, n], of x [L, n, D].

    For None, `2 s^2 = factor * median of the squared distances` in each of the L sets, for the `FACTORS`.
    """
    norms = (x * x).sum(-1)
    squared = (norms[:, :, None] + norms[:, None] - 2 * x @ x.transpose(1, 2)).clamp(min=0)  # [L, n, n]
    if bandwidths is None:
        n = x.shape[1]
        # Behind the first entry of a flat [n, n] matrix, every (n+1)th one is on the diagonal.
        off_diagonal = squared.detach().flatten(1)[:, 1:].unflatten(1, (n - 1, n + 1))[:, :, :-1].flatten(1)
        median = off_diagonal.median(dim=1).values  # [L]
        # If every head of a layer is dropped, all images have the same class token: the width must stay above
        # the rounding of the distances, or the gradient is not finite.
        width = torch.maximum(median, torch.finfo(x.dtype).eps * norms.detach().mean(dim=1))
        widths = [factor * width.clamp(min=1e-12)[:, None, None] for factor in FACTORS]
    else:
        widths = [x.new_tensor(2 * s * s) for s in bandwidths]
    return torch.stack([torch.exp(-squared / width) for width in widths]).mean(dim=0)


def mmd(x: Tensor, domains: Tensor, bandwidths: Sequence[float] | None = None) -> Tensor:
    """Squared MMD of x [n, L, D], mean over the L feature sets and over the pairs of `domains` [n] present.

    It is at least 0 up to rounding, and 0 with fewer than two domains.

    >>> x = torch.tensor([[[0.0]], [[0.0]], [[9.0]], [[9.0]]])
    >>> round(float(mmd(x, torch.tensor([0, 0, 1, 1]), [1.0])), 4), float(mmd(x, torch.tensor([0, 1, 0, 1])))
    (2.0, 0.0)
    """
    n = len(domains)
    if n < 2:
        return (x * 0).sum()
    # A domain is represented by its first image, so that shapes do not depend on the domains in the batch,
    # and a GPU can replay the step.
    first = (domains[:, None] == domains).int().argmax(dim=1)  # [n]: the first image of the same domain
    membership = (first[:, None] == torch.arange(n, device=x.device)).to(x.dtype)  # [n, n]
    sizes = membership.sum(dim=0)
    share = membership / sizes.clamp(min=1)  # [n, n]: a column averages over a domain, or is 0
    mean = share.T @ kernels(x.transpose(0, 1), bandwidths) @ share  # [L, n, n]
    within = mean.diagonal(dim1=1, dim2=2)  # [L, n]
    present = (sizes > 0).to(x.dtype)
    gaps = (within[:, :, None] + within[:, None] - 2 * mean) * present[:, None] * present
    pairs = (present.sum() * (present.sum() - 1)).clamp(min=1)
    return gaps.sum(dim=(1, 2)).mean() / pairs
