"""Variants of head purification, for `grid.py`: `purify[variant=mix+drop;gates=false]`.

All fold into a plain CLIP, except that `templates` needs the averaged texts. Rules: few_shot/RULES.md, run 9.
A step has the same tensors whichever domains are in a batch, so that a GPU records it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.clip.edit import Edit, LayerEdit, LowRank, Record
from dear.clip.model import Clip
from dear.methods.frozen import Frozen, Loss
from dear.methods.promptsrc import DIVERSE
from dear.methods.purify import FACTORS, Purify
from dear.methods.tensors import scores, unit


class Trial(Purify):
    """Purification with the settings below; subclasses change one each."""

    dynamic = False
    smoothing = 0.0  #: of labels
    temperature = 1.0  #: factor of the logits in training
    pull = 0.0  #: weight of 1 - cosine to the frozen feature
    mix = 0.0  #: probability that an image takes the channel statistics of another one, in part (MixStyle)
    mix_layers: tuple[int, ...] = (1,)  #: at the inputs of these layers
    lora_dropout = 0.0  #: of LoRA's input
    head_dropout = 0.0  #: probability that a head is left out of a step
    gate_form = "softmax"  #: or "sigmoid", "linear": every head for itself
    gates_from = 1  #: first layer with gates
    first = ""  #: "gates" or "lora": the other one is not trained in the first third
    average = False  #: learned tensors are the means over the second half of the epochs
    scale = 1.0  #: factor of LoRA after training
    jitter = 0.0  #: probability of random gains and offsets per color channel, or no color
    fourier = 0.0  #: probability that the amplitudes of an image are mixed with those of another one
    templates = False  #: texts averaged over several templates
    mmd_at = "layers"  #: "out": of the image feature

    def build(self, generator: torch.Generator) -> None:
        """See `Purify`."""
        super().build(generator)
        self.active = torch.ones(2, device=self.clip.device)  # LoRA, gates
        if self.first:
            self.active[0 if self.first == "gates" else 1] = 0
        self.sums: list[Tensor] = []
        self.summed = 0

    def after_epoch(self, epoch: int, epochs: int) -> None:
        """See `Purify`."""
        super().after_epoch(epoch, epochs)
        if 3 * epoch >= epochs:
            self.active.fill_(1)
        if self.average and 2 * epoch >= epochs:
            learned = [p.detach().clone() for p in self.parameters()]
            self.sums = [a + b for a, b in zip(self.sums, learned, strict=True)] if self.sums else learned
            self.summed += 1

    @torch.no_grad()
    def finish(self) -> None:
        """See `Purify`."""
        for p, total in zip(self.parameters(), self.sums, strict=False):
            p.copy_(total / self.summed)
        for name, p in self.pairs.items():
            if name.endswith("_up"):
                p.mul_(self.scale)

    def gates(self, top: int | None = None) -> Tensor:
        """See `Purify`."""
        if not self.config.gates or top is not None:
            return super().gates(top)
        scalars = self._slowed(self.scalars, 1)
        gates = {
            "softmax": lambda: scalars.softmax(dim=-1) * self.clip.config.vision.heads,
            "sigmoid": lambda: 2 * scalars.sigmoid(),
            "linear": lambda: 1 + scalars,
        }[self.gate_form]()
        early = torch.arange(1, len(gates) + 1, device=gates.device)[:, None] < self.gates_from
        return torch.where(early, torch.ones_like(gates), gates)

    def _slowed(self, p: Tensor, part: int) -> Tensor:
        if not self.first:
            return p
        return p.detach() + self.active[part] * (p - p.detach())

    def _pair(self, name: str) -> LowRank | None:
        if not self.pairs:
            return None
        dropout = self.lora_dropout if torch.is_grad_enabled() else 0.0
        down, up = (self._slowed(self.pairs[f"{name}_{part}"], 0) for part in ("down", "up"))
        return LowRank(down, up, dropout=dropout)

    def edit(self) -> Edit:
        """See `Purify`."""
        gates, dropped = self.gates(), self.head_dropout and torch.is_grad_enabled()
        if dropped:
            gates = gates * (torch.rand_like(gates) >= self.head_dropout) / (1 - self.head_dropout)
        layers = {}
        for layer in range(1, len(gates) + 1):
            q, v = (self._pair(f"{p}{layer}") for p in ("q", "v"))
            gate = gates[layer - 1] if self.config.gates or dropped else None
            layers[layer] = LayerEdit(gate=gate, q=q, v=v)
        return Edit(layers)

    def frozen_stage(self, pixels: Tensor) -> Frozen:
        """See `Method`; of changed pixels."""
        if self.jitter:
            pixels = jittered(pixels, self.jitter)
        if self.fourier:
            pixels = amplitude_mixed(pixels, self.fourier)
        return super().frozen_stage(pixels)

    def texts(self) -> Tensor:
        """See `Method`."""
        if not self.templates:
            return super().texts()
        if not hasattr(self, "averaged"):
            with torch.no_grad():
                self.averaged = averaged_texts(self.clip, self.classes)
        return self.averaged

    def images_from_frozen(self, frozen: Frozen, record: Record | None = None) -> Tensor:
        """See `Purify`."""
        edit, visual, x, first = self.edit(), self.clip.visual, frozen.x, 1
        if self.mix and torch.is_grad_enabled():
            for layer in self.mix_layers:
                x = visual.run(x, first, layer - 1, edit, record=record) if layer > first else x
                x, first = style_mixed(x, self.mix), layer
        return visual.features_from(x, first, edit=edit, record=record)

    def loss_from_frozen(self, frozen: Frozen, labels: Tensor, domains: Tensor | None = None) -> Loss:
        """See `Purify`."""
        config = self.config
        learns = config.mmd_to == "all" or config.gates
        measured = domains is not None and config.weight > 0 and learns
        record = ClassToken() if measured and self.mmd_at != "out" else None
        images = self.images_from_frozen(frozen, record)
        logits = self.temperature * scores(self.clip, images, self.texts())
        ce = F.cross_entropy(logits, labels, label_smoothing=self.smoothing)
        total, parts = ce, {"ce": ce.detach()}
        if self.pull and frozen.feature is not None:
            total = total + self.pull * (1 - (unit(images) * frozen.feature).sum(dim=-1)).mean()
        if not measured:
            return Loss(total, parts)
        layers = range(1, self.clip.config.vision.layers + 1)
        if record is None:
            states = unit(images)[:, None]
        else:
            states = torch.stack([record[f"blocks.{layer}.out"][:, 0] for layer in layers], dim=1)
        gap = recordable_mmd(states.to(ce.dtype), domains)
        total = total + config.weight * (gap if config.mmd_to == "all" else self._to_gates(gap))
        return Loss(total, {**parts, "mmd": gap.detach()})


class ClassToken(Record):
    """Records the class token where it alone is read, without a copy between CPU and GPU."""

    def rows_within(self, read: Tensor, length: int) -> Tensor | None:
        """See `Record`."""
        return torch.zeros(1, dtype=torch.long, device=read.device)


class Pulled(Trial):
    """Reads frozen features in training."""

    reads_frozen = True
    pull = 1.0


def recordable_mmd(x: Tensor, domains: Tensor) -> Tensor:
    """`purify.mmd` with tensors whose shapes do not depend on the domains."""
    n = len(domains)
    if n < 2:
        return (x * 0).sum()
    index = (domains[:, None] == domains).int().argmax(dim=1)  # the first image of the same domain
    membership = (index[:, None] == torch.arange(n, device=x.device)).to(x.dtype)  # [n, n]
    sizes = membership.sum(dim=0)
    share = membership / sizes.clamp(min=1)
    sets = x.transpose(0, 1)
    norms = (sets * sets).sum(-1)
    squared = (norms[:, :, None] + norms[:, None] - 2 * sets @ sets.transpose(1, 2)).clamp(min=0)
    off_diagonal = squared.detach().flatten(1)[:, 1:].unflatten(1, (n - 1, n + 1))[:, :, :-1].flatten(1)
    median = off_diagonal.median(dim=1).values.clamp(min=torch.finfo(x.dtype).tiny)
    kernel = torch.stack([torch.exp(-squared / (f * median[:, None, None])) for f in FACTORS]).mean(dim=0)
    mean = share.T @ kernel @ share
    within = mean.diagonal(dim1=1, dim2=2)
    present = (sizes > 0).to(x.dtype)
    gaps = (within[:, :, None] + within[:, None] - 2 * mean) * present[:, None] * present
    pairs = (present.sum() * (present.sum() - 1)).clamp(min=1)
    return gaps.sum(dim=(1, 2)).mean() / pairs


def partners(x: Tensor) -> Tensor:
    """A random order of the images."""
    return torch.rand(len(x), device=x.device).argsort()


def style_mixed(x: Tensor, probability: float) -> Tensor:
    """Tokens [B, N, D] whose mean and deviation over tokens are partly those of another image."""
    mean, deviation = x.mean(dim=1, keepdim=True).detach(), x.std(dim=1, keepdim=True).detach() + 1e-6
    other = partners(x)
    share = torch.rand(len(x), 1, 1, device=x.device, dtype=x.dtype)
    share = share * (torch.rand_like(share) < probability)
    new_mean = mean + share * (mean[other] - mean)
    new_deviation = deviation + share * (deviation[other] - deviation)
    return (x - mean) / deviation * new_deviation + new_mean


def jittered(pixels: Tensor, probability: float) -> Tensor:
    """Normalized pixels [B, 3, S, S] with other gains and offsets per channel, a fifth without color."""
    count = len(pixels)

    def drawn(low: float, high: float, channels: int = 3) -> Tensor:
        return low + (high - low) * torch.rand(count, channels, 1, 1, device=pixels.device)

    gray = (drawn(0, 1, 1) < 0.2).to(pixels.dtype)
    changed = pixels + gray * (pixels.mean(dim=1, keepdim=True) - pixels)
    changed = changed * (drawn(0.6, 1.4, 1) * drawn(0.8, 1.2)) + drawn(-0.4, 0.4, 1) + drawn(-0.2, 0.2)
    return torch.where(drawn(0, 1, 1) < probability, changed.to(pixels.dtype), pixels)


def amplitude_mixed(pixels: Tensor, probability: float) -> Tensor:
    """Pixels whose Fourier amplitudes are partly those of another image (FACT)."""
    wave = torch.fft.fft2(pixels.float())
    amplitude, phase = wave.abs(), wave.angle()
    share = torch.rand(len(pixels), 1, 1, 1, device=pixels.device)
    share = share * (torch.rand_like(share) < probability)
    mixed = torch.polar(amplitude + share * (amplitude[partners(pixels)] - amplitude), phase)
    return torch.fft.ifft2(mixed).real.to(pixels.dtype)


def averaged_texts(clip: Clip, classes: tuple[str, ...]) -> Tensor:
    """Unit means [C, E] over the templates of PromptSRC."""
    rows = []
    for template in DIVERSE:
        rows.append(Purify(clip, classes, template=template).prompts.frozen)
    return unit(torch.stack(rows).mean(dim=0))


def changed(kind: type[Trial] = Trial, **settings: Any) -> tuple[type[Trial], dict[str, Any]]:
    """A variant: its class, and options (none)."""
    return type("Changed", (kind,), settings), {}


VARIANTS: dict[str, tuple[type[Trial], dict[str, Any]]] = {
    "plain": changed(),
    "smooth": changed(smoothing=0.1),
    "cold": changed(temperature=0.5),
    "hot": changed(temperature=2.0),
    "hot4": changed(temperature=4.0),
    "pull": changed(Pulled, pull=1.0),
    "pull4": changed(Pulled, pull=4.0),
    "mix": changed(mix=0.5),
    "mix3": changed(mix=0.5, mix_layers=(1, 3)),
    "mix5": changed(mix=0.5, mix_layers=(1, 3, 5)),
    "drop": changed(lora_dropout=0.25),
    "heads.1": changed(head_dropout=0.1),
    "heads.3": changed(head_dropout=0.3),
    "heads.5": changed(head_dropout=0.5),
    "sigmoid": changed(gate_form="sigmoid"),
    "linear": changed(gate_form="linear"),
    "late": changed(gates_from=5),
    "gates-first": changed(first="gates"),
    "lora-first": changed(first="lora"),
    "average": changed(average=True),
    "scale.8": changed(scale=0.8),
    "jitter": changed(jitter=0.8),
    "fourier": changed(fourier=0.5),
    "templates": changed(templates=True),
    "out": changed(mmd_at="out"),
}
