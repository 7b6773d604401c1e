"""Variants of `strong` with few images per class and on new classes, one training per row.

    PYTHONPATH=benchmarks:research python research/few_shot/trial.py --device cuda --jobs 12 \
        --root DATA --small SMALL --out research/few_shot/trial.csv

`strong` runs layers 3 to 8 twice: once frozen, for the class token that attribute tokens start from, and
once with early tokens. Variants with one pass:

- `adapted`: attribute tokens start from the adapted class token.
- `class`: class token and patches stay frozen in layers 3 to 8; a second class token, which nothing else
  reads, reads them and the early tokens, and takes the place of the class token at layer J.
- `shift`: attribute tokens start from the adapted class token less its mean change, which training takes
  from the batch and answers from the training images.
- `after`: trained as `strong`; only answers start as in `shift`.

Variants whose frozen pass reads fewer patches, in training and in answers:

- `half`: every second patch, as on a checkerboard.
- `progressive`: every second patch in the first half of these layers, every fourth one in the others.

Variants of lambda, the weight of class directions: `rate10`, `rate30`, and `rate100` are its learning rate,
`start0.5` its start (1, as a multiple of the best one on frozen features), with rate 10 unless named.

The other variants change one option (`VARIANTS`); those of run 3 with another loss, and those
with other first layers of early and text tokens, gained nothing and are not kept.

Rows: base-to-novel with 16 images per class ("novel"), and all classes with 1, 4, and 16 images ("all").
The real datasets need `--root` (a folder with a table per dataset) and `--small`; all heads of `small` are
mixed.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from measure.jobs import workers
from measure.script import arguments, names, numbers, record
from torch import Tensor

from dear.clip.edit import BlockMask, Edit, LayerEdit
from dear.clip.factory import load
from dear.clip.model import Clip
from dear.data.batches import pixels_for
from dear.data.images import ImageSet
from dear.data.open import BENCHMARKS, open_data
from dear.data.shots import few_shot
from dear.heads.known_roles import known_roles
from dear.heads.roles import RoleMap
from dear.methods.dear import DIRECTION_RATE, DeAR, Learned
from dear.methods.frozen import Frozen
from dear.runs.recipe import Recipe
from dear.train.run import train
from dear.train.setup.balance import enough_steps

REAL = {
    "Caltech101": "caltech101",
    "DescribableTextures": "dtd_partial10",
    "EuroSAT": "eurosat",
    "OxfordPets": "oxford_pets",
}
BATCH = 250


class OnePass(DeAR):
    """DeAR whose early tokens change the class token alone."""

    def build(self, generator: torch.Generator) -> None:
        """Adds the mask of early layers."""
        super().build(generator)
        self.class_token_at = None
        tokens, heads = 1 + self.config.early_tokens, self.clip.config.vision.heads
        see = torch.ones(heads, 1 + tokens, 1 + tokens, dtype=torch.bool)
        see[:, 0, 1:] = False
        self.one_way = BlockMask(see)

    def pooled(self, frozen: Frozen, learned: Learned) -> tuple[Tensor, Tensor]:
        """As in DeAR, with one pass."""
        visual, x = self.clip.visual, frozen.x
        count, own = x.shape[1], x[:, :1]
        for layer, tokens in enumerate(learned.early_tokens, self.first):
            brought = torch.cat([own, tokens.to(own.dtype).expand(len(x), -1, -1)], dim=1)
            edit = Edit({layer: LayerEdit(tokens=brought, mask=self.one_way)}, count=brought.shape[1])
            whole = visual.run(x, layer, layer, edit)
            x, own = whole[:, :count], whole[:, count : count + 1]
        edit = self.attribute_edit(learned.tokens, x[:, :1].detach())
        x_cls, tokens = visual.class_and_tokens(torch.cat([own, x[:, 1:]], dim=1), self.entry, edit)
        return x_cls, tokens


class Shifted(DeAR):
    """DeAR whose attribute tokens start from the adapted class token less its mean change."""

    trains = True  #: whether training starts there, too
    shift: Tensor | None = None

    def pooled(self, frozen: Frozen, learned: Learned) -> tuple[Tensor, Tensor]:
        """As in DeAR, with one pass."""
        training = torch.is_grad_enabled()
        if (training and not self.trains) or (not training and self.shift is None):
            return super().pooled(frozen, learned)
        visual, x = self.clip.visual, frozen.x
        x = visual.run(x, self.first, self.entry - 1, self.early_edit(learned.early_tokens))[:, : x.shape[1]]
        shift = (x[:, :1] - frozen.class_token).mean(dim=0, keepdim=True) if training else self.shift
        edit = self.attribute_edit(learned.tokens, (x[:, :1] - shift).detach())
        return visual.class_and_tokens(x, self.entry, edit)

    @torch.no_grad()
    def measure_shift(self, pixels: Tensor) -> None:
        """The mean change of the class token at layer J over images."""
        frozen = self.inference_stage(pixels)
        x = self.clip.visual.run(frozen.x, self.first, self.entry - 1, self.early_edit(self.early_tokens))
        self.shift = (x[:, :1] - frozen.class_token).mean(dim=0, keepdim=True)


class ShiftedAfter(Shifted):
    """The same in answers alone."""

    trains = False


class Adapted(DeAR):
    """DeAR whose attribute tokens start from the adapted class token."""

    def pooled(self, frozen: Frozen, learned: Learned) -> tuple[Tensor, Tensor]:
        """As in DeAR, with one pass."""
        visual, x = self.clip.visual, frozen.x
        x = visual.run(x, self.first, self.entry - 1, self.early_edit(learned.early_tokens))[:, : x.shape[1]]
        edit = self.attribute_edit(learned.tokens, x[:, :1].detach())
        return visual.class_and_tokens(x, self.entry, edit)


class Thinned(DeAR):
    """DeAR whose frozen class token at layer J is computed from fewer patches."""

    halvings = 1  #: of the number of patches

    def inference_stage(self, pixels: Tensor, feature_of: Clip | None = None) -> Frozen:
        """As in DeAR, with another class token."""
        stage = super().inference_stage(pixels, feature_of)
        visual, side = self.clip.visual, math.isqrt(stage.x.shape[1] - 1)
        row, column = (torch.arange(side * side) // side, torch.arange(side * side) % side)
        places = torch.arange(side * side)
        x, first, halvings = stage.x, self.first, [(row + column) % 2 == 0, row % 2 == 0][: self.halvings]
        with torch.no_grad():
            for number, wanted in enumerate(halvings, 1):
                kept = wanted[places].to(x.device)
                x, places = torch.cat([x[:, :1], x[:, 1:][:, kept]], dim=1), places[wanted[places]]
                last = self.first + (self.entry - self.first) * number // len(halvings) - 1
                x, first = visual.run(x, first, last), last + 1
        return stage._replace(class_token=x[:, :1])


class ThinnedTwice(Thinned):
    """The same, with fewer patches still in later layers."""

    halvings = 2


class Weighted(DeAR):
    """DeAR with another learning rate and start of lambda."""

    rate = DIRECTION_RATE  #: as a multiple of the recipe's
    start = 1.0  #: as a multiple of the best lambda on frozen features

    def build(self, generator: torch.Generator) -> None:
        """As in DeAR."""
        super().build(generator)
        self.log_direction_weight.lr_scale = self.rate

    def _fit_directions(self, features: Tensor, labels: Tensor) -> None:
        super()._fit_directions(features, labels)
        if self.leaves_out:
            self.log_direction_weight.add_(math.log(self.start))


def weighted(rate: float, start: float) -> type[DeAR]:
    """`Weighted` with these values."""
    return type("Weighted", (Weighted,), {"rate": rate, "start": start})


#: class and options of each variant
VARIANTS: dict[str, tuple[type[DeAR], dict[str, Any]]] = {
    "strong": (DeAR, {}),
    "no directions": (DeAR, {"directions": "none"}),
    "class means": (DeAR, {"direction_ridge": 1000.0}),
    "no dropout": (DeAR, {"direction_dropout": 0.0}),
    "projection 1": (DeAR, {"projection_rate": 1.0}),
    "adapted": (Adapted, {}),
    "class": (OnePass, {}),
    "shift": (Shifted, {}),
    "after": (ShiftedAfter, {}),
    "half": (Thinned, {}),
    "progressive": (ThinnedTwice, {}),
    "rate10": (weighted(10, 1), {}),
    "rate30": (weighted(30, 1), {}),
    "rate100": (weighted(100, 1), {}),
    "start0.5": (weighted(10, 0.5), {}),
    "start0.25": (weighted(10, 0.25), {}),
    "rate30-start0.5": (weighted(30, 0.5), {}),
    "rate100-start0.5": (weighted(100, 0.5), {}),
}


def opened(dataset: str, split: str, root: str) -> ImageSet:
    """A split of a task of the attribute world, or of a real dataset with its own template."""
    if dataset not in REAL:
        return open_data(dataset, split)
    path = Path(root) / REAL[dataset] / "index.csv"
    return open_data(str(path), split, template=BENCHMARKS[dataset].template)


@lru_cache(maxsize=2)
def backbone(name: str, device: str) -> tuple[Clip, RoleMap]:
    """A backbone and its role map; mixed heads where none is known."""
    clip = load(name, device=device)
    roles = known_roles(clip)
    if roles is None:
        vision = clip.config.vision
        roles = RoleMap.uniform("mixed", vision.last_third, vision.heads)
    return clip, roles


@lru_cache(maxsize=12)
def views(dataset: str, root: str, name: str, device: str) -> tuple[ImageSet, Tensor]:
    """The test set and its pixels."""
    clip, _ = backbone(name, device)
    test = opened(dataset, "test", root)
    return test, torch.cat(
        [pixels_for(clip, test, part.tolist()) for part in torch.arange(len(test)).split(BATCH)]
    )


def cell(
    dataset: str, variant: str, seed: int, protocol: str, shots: int, place: dict[str, str]
) -> dict[str, Any]:
    """Train once; accuracies."""
    name = place["small"] if dataset in REAL else "mini"
    clip, roles = backbone(name, place["device"])
    whole, (test, pixels) = (
        opened(dataset, "train", place["root"]),
        views(dataset, place["root"], name, place["device"]),
    )
    half = -(-len(whole.classes) // 2)
    drawn = few_shot(
        whole.select_classes(whole.classes[:half]) if protocol == "novel" else whole, shots, seed
    )
    kind, changed = VARIANTS[variant]
    method = kind(clip, drawn.classes, roles=roles, template=drawn.template, seed=seed, **changed)
    began = time.perf_counter()
    recipe = Recipe.of(DeAR, seed=seed)
    epochs = int(place["epochs"])
    train(method, drawn, replace(recipe, epochs=epochs) if epochs else enough_steps(recipe, len(drawn)))
    seconds = time.perf_counter() - began
    if isinstance(method, Shifted):
        method.measure_shift(pixels_for(clip, drawn, list(range(min(len(drawn), BATCH)))))
    whole_list = method.with_classes(test.classes, test.template) if protocol == "novel" else method
    if isinstance(method, Shifted):
        whole_list.shift = method.shift
    with torch.no_grad():
        logits = torch.cat([whole_list.logits(part.to(clip.device)) for part in pixels.split(BATCH)]).cpu()
    row: dict[str, Any] = {
        "dataset": dataset,
        "variant": variant,
        "seed": seed,
        "protocol": protocol,
        "shots": shots,
    }
    row |= {"joint": accuracy(logits, test.labels), "train_s": round(seconds, 2)}
    if protocol == "novel":
        old = test.labels < half
        base = accuracy(logits[old][:, :half], test.labels[old])
        new = accuracy(logits[~old][:, half:], test.labels[~old] - half)
        row |= {"base": base, "novel": new, "hm": round(2 * base * new / max(base + new, 1e-9), 2)}
    return row


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """In percent."""
    return round(100 * float((logits.argmax(dim=1) == labels).double().mean()), 2)


def main() -> None:
    options = arguments(
        __doc__,
        datasets=("world:textures,world:scenes,Caltech101,DescribableTextures", "with commas"),
        variants=("strong,class,shift,after", "with commas"),
        seeds="1,2",
        shots="1,4,16",
        root=".",
        small="",
        device="cpu",
        jobs=1,
        epochs=(0, "for a trial; 0: those of the recipe"),
        out=Path,
    )
    place = {name: str(getattr(options, name)) for name in ("root", "small", "device", "epochs")}
    tasks = [("novel", 16), *(("all", shots) for shots in numbers(options.shots))]
    calls = [
        (dataset, variant, seed, protocol, shots, place)
        for seed, (protocol, shots), variant, dataset in product(
            numbers(options.seeds), tasks, names(options.variants), names(options.datasets)
        )
    ]
    with workers(options.jobs) as run:
        for _, row in run(cell, calls):
            full = {**dict.fromkeys(("base", "novel", "hm"), ""), **row}
            record(options.out, [full], options.device, machine_last=True)


if __name__ == "__main__":
    main()
