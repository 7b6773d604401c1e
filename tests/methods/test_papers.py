"""Every method starts from the settings of its paper."""

from __future__ import annotations

import dataclasses

import pytest

from dear.methods import METHODS
from dear.runs.recipe import Recipe

SGD, ADAMW = "sgd", "adamw"
# name: (optimizer, lr, batch, epochs, weight decay), options that the paper sets
PAPERS: dict[str, tuple[tuple[str, float, int, int, float], dict[str, object]]] = {
    "coop": ((SGD, 2e-3, 32, 50, 5e-4), {"context": 4, "words": "a photo of a"}),
    "cocoop": ((SGD, 2e-3, 1, 10, 5e-4), {"context": 4, "words": "a photo of a", "narrowing": 16}),
    "vpt": ((SGD, 2.5e-3, 4, 5, 5e-4), {"tokens": 8, "depth": None}),
    "maple": ((SGD, 3.5e-3, 4, 5, 5e-4), {"context": 2, "words": "a photo of a"}),
    "promptsrc": (
        (SGD, 2.5e-3, 4, 20, 5e-4),
        {"context": 4, "tokens": 4, "text_weight": 25.0, "image_weight": 10.0, "logits_weight": 1.0},
    ),
    "prograd": ((SGD, 2e-3, 32, 100, 5e-4), {"context": 16, "strength": 1.0, "temperature": 1.0}),
    "kgcoop": ((SGD, 2e-3, 128, 100, 5e-4), {"context": 4, "words": "a photo of a", "weight": 8.0}),
    "tcp": ((ADAMW, 2e-3, 32, 50, 5e-4), {"context": 4, "narrowing": 4, "weight": 8.0}),
    "clip-adapter": ((ADAMW, 1e-3, 16, 10, 5e-4), {"ratio": 0.2, "narrowing": 4}),
    "tip-adapter-f": ((ADAMW, 1e-3, 256, 20, 1e-2), {"alpha": None, "beta": None, "views": 10}),
    "clip-lora": (
        (ADAMW, 2e-4, 32, 50, 1e-2),
        {"rank": 2, "scale": 1.0, "dropout": 0.25, "on": ("q", "k", "v"), "towers": "both"},
    ),
    "rpo": ((SGD, 1e-2, 4, 15, 5e-4), {"prompts": 24, "noise": 0.1}),
    "mmrl": ((ADAMW, 1e-3, 4, 10, 5e-4), {"tokens": 5, "width": 512, "alpha": 0.7, "weight": 1.0}),
    "mmrlpp": (
        (ADAMW, 1e-3, 4, 10, 5e-4),
        {"tokens": 5, "width": 512, "alpha": 0.7, "beta": 0.9, "weight": 1.0, "rank": 4},
    ),
    "dear": (
        (ADAMW, 1e-3, 16, 10, 5e-4),
        {"text_tokens": 5, "beta": 0.9, "lambda_reg": 1.0, "lambda_fusion": 0.7},
    ),
    "purify": ((ADAMW, 1e-3, 32, 10, 5e-4), {"rank": 2, "last_rank": 8, "mmd_to": "gates"}),
}


@pytest.mark.parametrize("name", PAPERS)
def test_settings(name: str) -> None:
    """Where a number differs from the authors', the file says so under "Departures"."""
    kind, (training, options) = METHODS[name], PAPERS[name]
    paper = kind.preset("paper" if kind.presets else None)
    recipe = Recipe.of(kind, **paper.recipe)
    assert (recipe.optimizer, recipe.lr, recipe.batch, recipe.epochs, recipe.weight_decay) == training
    assert (recipe.warmup_epochs, recipe.warmup_lr) == (1, 1e-5)
    config = dataclasses.asdict(kind.configure(paper.options))
    assert {option: config[option] for option in options} == options
