"""The parameters of a classifier that trains as a stored run was trained."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from dear.methods.base import Method
from dear.runs.recipe import recipe_texts
from dear.runs.spec import Spec, plain
from dear.train.setup.prepare import recipe_for


def parameters_of(spec: Spec, method: Method) -> dict[str, Any]:
    """Parameters of `Classifier` by name, all but the backbone, the device and how it predicts."""
    examples = list(spec.examples.values())
    return {
        "method": spec.method,
        "shots": spec.shots or None,
        "seed": spec.seed,
        "recipe": restore_recipe(spec, method),
        "roles": method.roles,
        "template": spec.template,
        "texts": spec.texts or None,
        "tree": spec.tree or None,
        "epochs": spec.recipe.get("epochs"),
        "batch": spec.recipe.get("batch"),
        "lr": spec.recipe.get("lr"),
        "options": spec.options,
        "without": spec.without[0] if len(spec.without) == 1 else spec.without or None,
        "examples": examples[0] if len(spec.without) == len(examples) == 1 else spec.examples or None,
        "way": spec.way,
        "focus": spec.focus,
        "calibrate": spec.calibrate,
        "class_weight": "balanced" if spec.balance else None,
        "unreadable": spec.unreadable,
    }


def restore_recipe(spec: Spec, method: Method) -> str | list[str] | None:
    """The `recipe` parameter of a classifier that trains as a run was: its preset and what else was set."""
    usual = asdict(
        recipe_for(Spec(method=spec.method, preset=spec.preset), method, torch.zeros(1, dtype=torch.int64))
    )
    parameters = ("epochs", "batch", "lr", "seed")
    changes = {
        name: value
        for name, value in spec.recipe.items()
        if name not in parameters and plain(usual.get(name)) != value
    }
    return recipe_texts(spec.preset, changes) if changes else spec.preset
