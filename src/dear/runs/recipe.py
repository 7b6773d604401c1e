"""The training recipe: epochs, batch, learning rate, views and precision."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from dear.errors import UsageError
from dear.methods.base import Method
from dear.methods.options import AtLeastOne, Count, NotNegative, Options, Positive, Share, fit_options
from dear.utils.pairs import parse_pairs
from dear.utils.text import unknown_name

Line = dict[str, float | int]  #: of the training log: numbers by name


@dataclass(frozen=True)
class Recipe(Options):
    """The training recipe (supplement A), fixed for all datasets.

    The learning rate is constant in the warm-up epochs and then falls along a half cosine, step by step, from
    `lr` toward 0 (`cosine_by="epoch"` keeps it constant within an epoch, as the field's older code does). A
    run of no more epochs than the warm-up has no warm-up, because it would learn nothing.

    With `views` = N each image has N random views, one per epoch in turn; their frozen stages are computed
    once (`dear.train.frozen.FrozenViews`), so that later epochs cost only the learned part.

    >>> Recipe().rate(0, 40), round(Recipe(epochs=3).rate(40, 40), 6)
    (1e-05, 0.001)
    """

    epochs: Count = 10
    batch: AtLeastOne = 16
    lr: Positive = 1e-3
    weight_decay: NotNegative = 5e-4
    optimizer: Literal["adamw", "sgd"] = "adamw"
    momentum: Share = 0.9  #: of sgd
    warmup_epochs: Count = 1
    warmup_lr: NotNegative = 1e-5
    cosine_by: Literal["step", "epoch"] = "step"
    scale: tuple[float, float] = (0.5, 1.0)  #: share of the image's area that a training crop covers
    flip: Share = 0.5
    #: random crops and flips; False trains on CLIP's evaluation view, whose features are computed once
    augment: bool = True
    #: "auto": bfloat16 on GPUs that have it, float16 on others, float32 on a CPU
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    deterministic: bool = False  #: refuse kernels whose result may differ from run to run
    replay: bool = True  #: on a GPU, record the step once and replay it, for methods that allow it
    seed: int = 1
    views: Count = 0  #: random views per image, chosen by the seed; 0: new ones in every epoch

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise UsageError(f"scale must be two numbers in (0, 1], ascending, got {self.scale}")

    @classmethod
    def of(cls, method: type[Method] | Method, **changes: Any) -> Recipe:
        """The recipe of a method: the usual one, what the method's paper changes, then `changes`."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise UsageError(unknown_name("value of the recipe", unknown[0], sorted(known)))
        return cls(**{**method.recipe, **fit_options(cls, changes)})

    def rate(self, step: int, steps_per_epoch: int) -> float:
        """Learning rate of a step, counted from 0."""
        epoch = step // steps_per_epoch
        warmup = self.warmup_epochs if self.epochs > self.warmup_epochs else 0
        if epoch < warmup:
            return self.warmup_lr
        start, end = warmup * steps_per_epoch, self.epochs * steps_per_epoch
        at = step if self.cosine_by == "step" else epoch * steps_per_epoch
        return 0.5 * self.lr * (1 + math.cos(math.pi * (at - start) / (end - start)))


def parse_recipe(
    recipe: str | Sequence[str] | Mapping[str, Any] | None, **values: Any
) -> tuple[str | None, dict[str, Any]]:
    """The preset and the values of a recipe, as people write them.

    Args:
        recipe: name of a preset ("strong"), values by name, or texts of both kinds (["strong", "lr=1e-4"]).
        values: further values by name; None: not set.

    Raises:
        UsageError: two presets are named, or a value is set twice.

    >>> parse_recipe(["strong", "epochs=5"])
    ('strong', {'epochs': 5})
    >>> parse_recipe({"lr": 1e-4}, epochs=5, batch=None)
    (None, {'lr': 0.0001, 'epochs': 5})
    """
    texts = [recipe] if isinstance(recipe, str) else recipe
    presets: list[str] = []
    if texts is not None and not isinstance(texts, Mapping):
        presets = [text for text in texts if "=" not in text]
        texts = [text for text in texts if "=" in text]
    if len(presets) > 1:
        raise UsageError(f"recipe: name one preset, got {presets[0]!r} and {presets[1]!r}")
    settings = parse_pairs(texts, "recipe")
    for name, value in values.items():
        if value is not None and name in settings:
            raise UsageError(f"{name} is set twice: {value} and, in the recipe, {settings[name]}")
        if value is not None:
            settings[name] = value
    return (presets[0] if presets else None), settings


def recipe_texts(preset: str | None, values: Mapping[str, Any]) -> list[str]:
    """The texts that `parse_recipe` reads as a preset and values.

    >>> recipe_texts("strong", {"lr": 1e-4, "scale": (0.5, 1.0)})
    ['strong', 'lr=0.0001', 'scale=[0.5, 1.0]']
    """
    return [*([preset] if preset else []), *(f"{name}={json.dumps(v)}" for name, v in values.items())]
