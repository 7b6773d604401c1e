"""One figure of the repair benchmark: the removals of a task, and the training of a method with one."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from measure.world import backbone, draw_of, example_features, rows, scored, seen, true_heads
from torch import Tensor

from dear.data.images import values_of
from dear.data.world_images import WorldImages, world_task
from dear.heads.concept_words import find_concept
from dear.heads.known_roles import known_roles
from dear.methods import build_method
from dear.methods.frozen import Frozen
from dear.runs.recipe import Recipe
from dear.shortcuts.concept_trials import choose_concept_removal
from dear.shortcuts.removal import Removal, remove_examples, remove_heads
from dear.shortcuts.without import possible_removals
from dear.tasks.adapt import adapt
from dear.tasks.speed import machine
from dear.world.shortcuts import KINDS

CACHED = ("linear-probe", "tip-adapter-f")  #: learn on frozen features, of which one pass serves all ways


def split_method(method: str) -> tuple[str, str | None, list[str]]:
    """Name, preset, and options of `NAME@PRESET[OPTION=VALUE;OPTION=VALUE]`.

    >>> split_method("dear@strong[center=0]")
    ('dear', 'strong', ['center=0'])
    """
    title, _, options = method.rstrip("]").partition("[")
    name, _, preset = title.partition("@")
    return name, preset or None, options.split(";") if options else []


@dataclass(frozen=True)
class Plan:
    """One training of a cell."""

    way: str  #: "words", "heads", …
    draw: int  #: number of the draw of random heads, from 0
    repair: Removal | None  #: what is removed
    #: of "automatic": whether it is for methods that learn inside the image tower; None: for all
    inside: bool | None = None
    chosen: str = ""  #: the way that "automatic" takes


def plans(kind: str, correlation: str, number: str, device: str, draws: int) -> list[Plan]:
    """What every way removes, for a task and draw `number` of its training images."""
    clip, concept, seed = backbone(device), find_concept(KINDS[kind].concept), int(number)
    name = f"shortcut-{kind}@{correlation}"
    drawn, places = draw_of(name, seed)
    learn, labels = rows(seen(name, "train", device), places), drawn.labels
    roles = known_roles(clip)
    assert roles is not None
    ways = possible_removals(clip, concept, learn, roles)
    features, values = example_features(kind, seed, device)
    ways["examples"] = remove_examples(learn, features, values, concept.name)
    found = [Plan("untouched", 0, None), *(Plan(way, 0, ways[way]) for way in ways)]
    for inside in (False, True):
        choice = choose_concept_removal(learn, labels, ways, heads_first=inside)
        found.append(Plan("automatic", 0, choice.removal, inside, choice.way))
    count = max(len(roles.select(concept=concept.role)), 1)
    found.append(Plan("true heads", 0, remove_heads(learn, true_heads(concept.name, count), concept.name)))
    rng, keys = random.Random(seed), [key for key, _ in roles]
    for draw in range(draws):
        found.append(Plan("random heads", draw, remove_heads(learn, rng.sample(keys, count), "random")))
    return [*found, Plan("balanced", 0, None)]


def cached_answers(method_name: str, drawn: WorldImages, learn: Tensor, test: Tensor, seed: int) -> Tensor:
    """Answers [n] of a method that reads frozen features only, trained on features by its own recipe."""
    clip, labels = backbone("cpu"), drawn.labels
    method = build_method(method_name, clip, drawn.classes, template=drawn.template, seed=seed)
    if method_name == "tip-adapter-f":
        method.keys.data = F.normalize(learn, dim=-1)
        method.labels = labels
    recipe = Recipe.of(method, seed=seed)
    parameters = [p for p in method.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.lr, weight_decay=recipe.weight_decay)
    generator = torch.Generator().manual_seed(seed)
    batch = min(recipe.batch, len(labels))
    steps = recipe.epochs * -(-len(labels) // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(recipe.epochs):
        for part in torch.randperm(len(labels), generator=generator).split(batch):
            optimizer.zero_grad()
            method.loss_from_frozen((learn[part],), labels[part]).total.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        return method.logits_from_frozen(Frozen(test))[method.modes[0]].argmax(dim=1)


def measure(
    method: str,
    kind: str,
    correlation: str,
    number: str,
    repair: Removal | None,
    device: str,
    epochs: int = 0,
) -> dict[str, Any]:
    """Mean and worst-group accuracy of a method trained on a draw of a task, and where it was measured."""
    clip, name, seed = backbone(device), f"shortcut-{kind}@{correlation}", int(number)
    (drawn, places), test = draw_of(name, seed), world_task(f"shortcut-{kind}", "test")
    own, preset, options = split_method(method)
    if own in CACHED:
        both = (rows(seen(name, "train", device), places), seen(name, "test", device))
        parts = [images.features if repair is None else repair.apply(images) for images in both]
        answers = cached_answers(own, drawn, *parts, seed)
    else:
        fixed = clip if repair is None else clip.with_correction(repair.correction())
        settings = {"seed": seed, "recipe": preset, "epochs": epochs or None, "calibrate": False}
        result = adapt(drawn, method=own, backbone=fixed, options=options, **settings).evaluate(test)
        answers = result.answers[result.pick(None)]
    values = values_of(test)
    assert values is not None
    accuracy, worst = scored(answers, test.labels, values)
    figures = {"accuracy": f"{accuracy:.4f}", "worst_group": f"{worst:.4f}"}
    return {**figures, **machine(torch.device("cpu" if own in CACHED else device))}
