"""Small models, role maps, prompts and images for the tests of methods and training."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from PIL import Image

import dear
from dear.clip import Clip, ClipConfig, TextConfig, VisionConfig
from dear.heads.known_roles import known_roles
from dear.heads.names import CORE
from dear.heads.role import Role
from dear.heads.roles import RoleMap
from dear.methods import METHODS

BOT, EOT = 49_406, 49_407
KEPT = (0, 1, 8, 9, 10, 11)  #: layers of mini that `shallow_mini` has
#: Options that make a method small enough for a tiny model.
SMALL: dict[str, dict[str, object]] = {
    "mmrl": {"width": 16},
    "mmrlpp": {"width": 16},
    "rpo": {"prompts": 5},
    "purify": {"head_dropout": 0.1},  # at 0.3, the fixed seed of some tests drops all four heads of a layer
}
#: Methods in which nothing is learned by steps, and all others.
CLOSED = ("zeroshot", "linear-probe", "tip-adapter", "lp-plus-plus", "proker")
LEARNING = [name for name in METHODS if name not in CLOSED]


def tiny_clip(seed: int = 0, dtype: torch.dtype = torch.float64, activation: str = "quick_gelu") -> Clip:
    """A random CLIP of odd sizes: 6 layers of 4 heads, text 5 layers of 3; no bias is zero."""
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    clip = Clip(
        ClipConfig(
            VisionConfig(width=36, layers=6, heads=4, activation=activation, image_size=24, patch_size=8),
            TextConfig(width=24, layers=5, heads=3, activation=activation),
            embed_dim=20,
        ),
        name="tiny",
    ).to(dtype)
    with torch.no_grad():
        for name, tensor in clip.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(std=0.2)
            if "ln_" in name and name.endswith("weight"):
                tensor.normal_(1.0, 0.2)
    torch.set_rng_state(generator_state)
    return clip


def shallow_mini() -> Clip:
    """Six of mini's twelve layers in both towers: quicker than mini, and all else is as in it."""
    mini = dear.load("mini")
    vision, text = (replace(tower, layers=len(KEPT)) for tower in (mini.config.vision, mini.config.text))
    clip = Clip(replace(mini.config, vision=vision, text=text), token_rows=len(mini.text.tokens))
    state = {key: value for key, value in mini.state_dict().items() if ".blocks." not in key}
    for new, old in enumerate(KEPT):
        for tower, blocks in (("visual", mini.visual.blocks), ("text", mini.text.blocks)):
            for key, value in blocks[old].state_dict().items():
                state[f"{tower}.blocks.{new}.{key}"] = value
    clip.load_state_dict(state)
    return clip


def shallow_roles() -> RoleMap:
    """The roles of mini's last four layers, which the shallow backbone has."""
    known = known_roles(dear.load("mini"))
    return RoleMap(
        {(1 + KEPT.index(layer - 1), head): role for (layer, head), role in known.table.items()}, 12
    )


def token_ids(lengths: tuple[int, ...] = (2, 5, 3), context: int = 77, seed: int = 0) -> torch.Tensor:
    """Rows of BOT, some words, EOT and padding."""
    rng = random.Random(seed)
    ids = torch.zeros(len(lengths), context, dtype=torch.long)
    for row, length in enumerate(lengths):
        words = [rng.randrange(300, 40_000) for _ in range(length)]
        ids[row, : length + 2] = torch.tensor([BOT, *words, EOT])
    return ids


def mixed_roles(layers: range = range(4, 7), heads: int = 4, seed: int = 3) -> RoleMap:
    """Every kind of head somewhere, in an order that seed decides."""
    kinds = [Role("generalization"), Role("other", "Animal"), Role("mixed")]
    kinds += [Role("core", concept) for concept in CORE]
    rng = random.Random(seed)
    dealt: list[Role] = []
    while len(dealt) < len(layers) * heads:
        dealt += rng.sample(kinds, len(kinds))
    keys = [(layer, head) for layer in layers for head in range(heads)]
    return RoleMap(dict(zip(keys, dealt, strict=False)), heads)


def images(count: int = 4, size: int = 24, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal noise as normalized pixels."""
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Colors:
    """A ImageSet in memory: noisy images whose mean color tells the class."""

    name = "colors"
    template = "a photo of a {}."

    def __init__(
        self, classes: int = 3, each: int = 4, size: int = 24, seed: int = 0, domains: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.classes = tuple(["red", "green", "blue", "grey"][:classes])
        self.labels = torch.arange(classes).repeat_interleave(each)
        noise = torch.randint(0, 120, (classes * each, 3, size, size), generator=generator)
        for index, label in enumerate(self.labels.tolist()):
            if label < 3:
                noise[index, label] += 110
        self.data = noise.to(torch.uint8)
        names = tuple(f"d{i % domains}" for i in range(len(self.labels))) if domains else None
        self.domains: tuple[str, ...] | None = names
        self.root = "colors"

    def __len__(self) -> int:
        return len(self.labels)

    def pixels(self, indices, size: int) -> torch.Tensor:
        chosen, size = self.data[list(indices)], getattr(size, "size", size)
        if size == chosen.shape[-1]:
            return chosen
        resized = torch.nn.functional.interpolate(chosen.float(), size=(size, size), mode="nearest")
        return resized.to(torch.uint8)

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self.data[index].permute(1, 2, 0).numpy())

    def key(self, index: int) -> str:
        return f"colors/{index:04d}"

    def subset(self, indices):
        other = Colors.__new__(Colors)
        other.__dict__.update(self.__dict__)
        chosen = list(indices)
        other.labels, other.data = self.labels[chosen], self.data[chosen]
        other.domains = None if self.domains is None else tuple(self.domains[i] for i in chosen)
        return other

    def select_classes(self, names):
        keep = [i for i, label in enumerate(self.labels.tolist()) if self.classes[label] in names]
        other = self.subset(keep)
        order = {name: i for i, name in enumerate(names)}
        other.labels = torch.tensor([order[self.classes[int(label)]] for label in other.labels])
        other.classes = tuple(names)
        return other
