"""The demo's part about adaptation: DeAR on half of a task's classes, tested on both halves."""

from __future__ import annotations

from pathlib import Path

import torch

from dear.bench.protocols.base_to_novel import harmonic_mean
from dear.clip.model import Clip
from dear.data import few_shot, halves, open_data
from dear.data.images import ImageSet
from dear.heads.roles import RoleMap
from dear.methods import DeAR, build_method
from dear.report.demo_facts import AccuracyRow, Changed, TaskFacts
from dear.report.run_facts import Compared
from dear.report.run_page import gallery
from dear.train import Recipe, evaluate, train
from dear.workflows.demo_size import Size
from dear.world.tasks import find_task

SHOTS, SEED = 16, 1
SHOWN = 5


def adapt_task(clip: Clip, roles: RoleMap, name: str, run: Path, size: Size) -> TaskFacts:
    """Adapt to the first half of a task's classes and test on both halves.

    Args:
        clip: the backbone.
        roles: its role map.
        name: of a task of the attribute world.
        run: run folder; one of an earlier demo with the same settings is continued or used as it is.
        size: how long to train, and how many images to test on.
    """
    whole, test = open_data(f"world:{name}", "train"), open_data(f"world:{name}", "test")
    base, novel = halves(whole.classes)
    preset = DeAR.preset()
    model = build_method(
        "dear", clip, base, roles=roles, template=whole.template, seed=SEED, **preset.options
    )
    assert isinstance(model, DeAR)
    asked = {} if size.epochs is None else {"epochs": size.epochs}
    recipe = Recipe.of(model, **{**preset.recipe, "seed": SEED, "views": size.views, **asked})
    shots = few_shot(whole.select_classes(base), SHOTS, SEED)
    trained = train(model, shots, recipe, run, resume=True, preset=model.recommended())
    frozen = build_method("zeroshot", clip, base, template=whole.template)
    mode = model.pick_mode(None)
    known, new = (
        Compared(images, evaluate(model, images), evaluate(frozen, images), mode)
        for images in (_first(test.select_classes(half), size.test_images) for half in (base, novel))
    )
    return TaskFacts(
        name=name,
        about=find_task(name).about,
        classes=(len(base), len(novel)),
        images=(len(known.labels), len(new.labels)),
        shots=SHOTS,
        seconds=trained.seconds,
        rows=_rows(known, new, mode),
        weights=model.fusion_weights(),
        trained=_changed(known),
        new=_changed(new),
    )


def _first(images: ImageSet, count: int | None) -> ImageSet:
    """The first `count` images of each class."""
    if count is None:
        return images
    rows = [(images.labels == label).nonzero()[:count, 0] for label in range(len(images.classes))]
    return images.subset(torch.cat(rows).tolist())


def _rows(known: Compared, new: Compared, usual: str) -> tuple[AccuracyRow, ...]:
    """Zero-shot, then every mode of the adapted model."""
    on_known, on_new = known.accuracies(), new.accuracies()
    return tuple(
        AccuracyRow(
            name if name == "zero-shot" else f"DeAR, {name}",
            on_known[name],
            on_new[name],
            harmonic_mean(on_known[name], on_new[name]),
            name == usual,
        )
        for name in on_known
    )


def _changed(compared: Compared) -> Changed:
    groups = compared.changes()
    some = {name: rows[:: max(1, len(rows) // SHOWN)][:SHOWN] for name, rows in groups.items()}
    return Changed(
        fixed=tuple(gallery(compared, some["fixed"], before=True)),
        broken=tuple(gallery(compared, some["broken"], before=True)),
        counts=(len(groups["fixed"]), len(groups["broken"])),
        classes=tuple(compared.class_changes()),
    )
