"""Planted marks in one of eight classes: does a model use them, and which repair helps?"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import torch
from measure.script import where
from photo_sets import LEARN, Photos, Sets, listed
from PIL import Image
from plants import PLANTS, plant

import dear
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.heads.collect import HeadContributions, collect_contributions
from dear.runs.model import Model
from dear.runs.spec import Spec
from dear.shortcuts.edit_plan import edited_features
from dear.shortcuts.edit_trials import (
    choose_edit_removal,
    remove_directions,
    remove_edit_heads,
    remove_random_directions,
    remove_random_heads,
)
from dear.shortcuts.edited_images import EditedImages
from dear.shortcuts.find import Shortcut, find_shortcuts
from dear.shortcuts.properties import measure_properties
from dear.shortcuts.removal import Removal
from dear.shortcuts.trials import fit_classifier, unit_features
from dear.shortcuts.without import Without
from dear.tasks.speed import add_rows
from dear.train.fit import fit
from dear.train.setup.prepare import prepare

RANDOM = 5
DEAR = {"epochs": 5, "batch": 16}  #: of the recipe, so that a training is a minute of one core


def repair(args: Any) -> None:
    """All cells, one row each."""
    clip = dear.load(args.backbone)
    cell = _dear_cell if args.method == "dear" else _probe_cell
    for source in args.data:
        photos = Photos(source)
        for seed in args.seeds:
            sets = Sets(photos, seed)
            for name in args.marks or PLANTS:
                row = {"dataset": sets.name, "mark": name, "draw": seed, **cell(clip, sets, name)}
                add_rows(args.out, [row | where()])
                print(row, flush=True)


def _marked(sets: Sets, name: str) -> tuple[ImageSet, Shortcut | None]:
    """The training images with the mark in the first class, and what the audit says of that class."""
    images = listed([*plant(name, sets.images[:LEARN]), *sets.images[LEARN:]], sets.labels, sets.classes)
    shortcut = find_shortcuts(measure_properties(images), sets.labels.tolist(), sets.classes)
    return images, next((one for one in shortcut if one.label == 0), None)


def _planted(sets: Sets, name: str) -> list[Image.Image]:
    rng = random.Random(1)
    return [PLANTS[name][0](image, rng) for image in sets.others]


def _figures(plain: np.ndarray, marked: np.ndarray, sets: Sets, way: str) -> dict[str, float]:
    """Accuracy, and shares of other test images that are called by the marked class."""
    values = (
        float((plain == sets.truth).mean()),
        float((plain[sets.truth != 0] == 0).mean()),
        float((marked == 0).mean()),
    )
    titles = ("accuracy", "plain", "marked")
    return {f"{way}_{title}": round(value, 4) for title, value in zip(titles, values, strict=True)}


@cache
def _tested(clip: Clip, sets: Sets) -> tuple[HeadContributions, HeadContributions]:
    """Contributions of the clean training images and of the test images."""
    layers = clip.config.vision.last_third
    clean = listed(sets.images, sets.labels, sets.classes)
    return collect_contributions(clip, clean, layers), collect_contributions(
        clip, listed(sets.test, sets.truth, sets.classes), layers
    )


def _probe_cell(clip: Clip, sets: Sets, name: str) -> dict[str, object]:
    """A logistic regression untouched, repaired in every way, at random, and trained on clean photos."""
    images, shortcut = _marked(sets, name)
    clean, tested = _tested(clip, sets)
    layers = clip.config.vision.last_third
    others = np.flatnonzero(sets.truth != 0)
    planted = collect_contributions(
        clip, listed(_planted(sets, name), sets.truth[others], sets.classes), layers
    )

    def figures(way: str, learn: list[HeadContributions], repair: Removal | None = None) -> dict[str, float]:
        rows = np.concatenate([unit_features(repair, each) for each in learn])
        answer = fit_classifier(rows, np.tile(sets.labels, len(learn)))
        return _figures(
            answer(unit_features(repair, tested)), answer(unit_features(repair, planted)), sets, way
        )

    result: dict[str, object] = {"found": "", "chosen": "", **figures("clean", [clean])}
    if shortcut is None:
        return result | figures("nothing", [collect_contributions(clip, images, layers)])
    copies = [EditedImages(images, shortcut.kind), EditedImages(images, shortcut.kind, shortcut)]
    seen = edited_features(clip, images, copies)
    choice, kinds = choose_edit_removal(seen, (shortcut.kind,)), (shortcut.kind,)
    result |= {"found": shortcut.kind, "chosen": choice.way, "directions_count": choice.directions}
    result |= figures("nothing", [seen.original])
    result |= figures("directions", [seen.original], remove_directions(seen, kinds, choice.directions))
    by_heads = remove_edit_heads(seen, kinds)
    result |= {"heads_count": len(by_heads.heads), **figures("heads", [seen.original], by_heads)}
    result |= figures("copies", [seen.original, *seen.copies])
    drawn = [remove_random_directions(seen, kinds, choice.directions, n) for n in range(RANDOM)]
    result |= _mean("random", [figures("random", [seen.original], one) for one in drawn])
    drawn = [remove_random_heads(seen, kinds, len(by_heads.heads), n) for n in range(RANDOM)]
    return result | _mean("random_heads", [figures("random_heads", [seen.original], one) for one in drawn])


def _mean(way: str, draws: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(float(np.mean([one[key] for one in draws])), 4) for key in draws[0]}


@cache
def _roles(clip: Clip, sets: Sets) -> Any:
    """The role map that DeAR needs, found once per draw on the clean images."""
    from dear.heads.discover import discover_roles

    return discover_roles(clip, listed(sets.images, sets.labels, sets.classes), concepts="tags")


def _dear_cell(clip: Clip, sets: Sets, name: str) -> dict[str, object]:
    """DeAR on the marked photos untouched, repaired as `auto` chooses, and on clean photos."""
    images, shortcut = _marked(sets, name)
    roles = _roles(clip, sets)
    planted = _planted(sets, name)

    def figures(way: str, train: ImageSet, without: Without | None = None) -> dict[str, float]:
        spec = Spec(method="dear", calibrate=False, seed=sets.seed, recipe=dict(DEAR))
        job = prepare(spec, train, drawn=True, clip=clip, roles=roles, without=without)
        model = fit(job)
        chosen.append("" if job.edits is None else job.edits.way)
        return _figures(_answers(model, sets.test), _answers(model, planted), sets, way)

    chosen: list[str] = []
    result = figures("nothing", images)
    if shortcut is not None:
        result |= figures("repaired", images, Without((shortcut.kind,)))
    way = chosen[-1]
    result |= figures("clean", listed(sets.images, sets.labels, sets.classes))
    return {"found": "" if shortcut is None else shortcut.kind, "chosen": way, **result}


@torch.no_grad()
def _answers(model: Model, images: list[Image.Image]) -> np.ndarray:
    return model.logits(images)[model.pick_mode(None)].argmax(1).numpy()
