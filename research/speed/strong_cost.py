r"""Cost of DeAR's `strong` on a CPU: a training step compared with MMRL's, predictions with those of `quick`.

    OMP_NUM_THREADS=1 nice python research/speed/strong_cost.py --backbone SMALL \
        --csv research/results/strong_cost.csv

The step is that of `views=4`, the default on a CPU: the frozen part of an image is computed before the clock
starts. Predictions start at pixels. The measured functions take turns; results are medians of the CPU seconds
of the process, which other processes change little.

    OMP_NUM_THREADS=1 python research/speed/strong_cost.py --backbone SMALL --epochs 10 --images 160 \
        --csv research/results/strong_training.csv

measures whole trainings instead, also of `quick`, with the frozen part of all images; features of the
evaluation views, which `strong` alone reads, are computed anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from measure.clock import medians
from measure.script import arguments, record
from measure.task import noise

import dear
from dear.clip.model import Clip
from dear.heads.roles import RoleMap
from dear.methods import DeAR, find_method
from dear.methods.base import Method
from dear.methods.frozen import Batch
from dear.runs.recipe import Recipe
from dear.runs.spec import Spec
from dear.train.loop import optimizer_of, rates_of
from dear.train.run import train
from dear.train.setup.prepare import recipe_for


def build(clip: Clip, name: str, preset: str | None, classes: int) -> Method:
    """A method on a random task; all heads are mixed, which costs what other roles cost."""
    vision = clip.config.vision
    names = [f"class {number}" for number in range(classes)]
    if name != "dear":
        return find_method(name)(clip, names)
    roles = RoleMap.uniform("mixed", vision.last_third, vision.heads)
    return DeAR(clip, names, roles=roles, **(DeAR.preset(preset).options if preset else {}))


def training_step(
    method: Method, images: torch.Tensor, labels: torch.Tensor, batch: int
) -> Callable[[], None]:
    """A step on the first `batch` images; the method is prepared with all of them."""
    method.prepare(lambda augment: iter([Batch(images, labels)]))
    frozen = method.frozen_stage(images[:batch])
    learned = [parameter for parameter in method.parameters() if parameter.requires_grad]
    optimizer = optimizer_of(learned, Recipe.of(method), rates_of(method))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        method.backward(method.loss_from_frozen(frozen, labels[:batch]), lambda loss: loss)
        optimizer.step()

    return step


def train_once(clip: Clip, name: str, preset: str | None, classes: int, count: int, epochs: int) -> None:
    """A whole training on random images, as `dear adapt` trains."""
    method = build(clip, name, preset, classes)
    images = noise(classes, count, 160, 160)
    recipe = replace(recipe_for(Spec(method=name), method, images.labels), epochs=epochs)
    train(method, images, recipe)


def training_row(clip: Clip, classes: int, count: int, epochs: int, turns: int) -> dict[str, object]:
    """CPU seconds of whole trainings of `strong`, `quick`, and MMRL, which take turns: medians."""
    names = {"strong": ("dear", None), "quick": ("dear", "quick"), "mmrl": ("mmrl", None)}
    works = {title: partial(train_once, clip, *name, classes, count, epochs) for title, name in names.items()}
    seconds = medians(works, turns, warm_up=0, clock=time.process_time)
    row: dict[str, object] = {"images": count, "classes": classes, "epochs": epochs, "turns": turns}
    row |= {f"{title}_cpu_s": round(seconds[title], 1) for title in names}
    return row | {"strong_to_mmrl": round(seconds["strong"] / seconds["mmrl"], 2)}


def main() -> None:
    options = arguments(
        __doc__, backbone="mini", classes=10, batch=4, images=40, answers=16, precision="bfloat16", repeats=9,
        epochs=(0, "of whole trainings; 0: steps and answers"), turns=(3, "of whole trainings"), csv=Path,
    )  # fmt: skip
    clip = dear.load(options.backbone, device="cpu")
    if options.epochs:
        row = training_row(clip, options.classes, options.images, options.epochs, options.turns)
        record(options.csv, [{"backbone": Path(options.backbone).name, **row}])
        return
    size = clip.config.vision.image_size
    torch.manual_seed(0)
    images = torch.randn(options.images, 3, size, size)
    labels = torch.arange(options.images) % options.classes
    works: dict[str, Callable[[], object]] = {}
    for name in ("dear", "mmrl"):
        method = build(clip, name, None, options.classes).in_precision(options.precision)
        works[f"{name} step"] = training_step(method, images, labels, options.batch)
    for preset in ("strong", "quick"):
        model = build(clip, "dear", preset, options.classes)
        works[f"{preset} answers"] = partial(model.all_logits, images[: options.answers])
    seconds = medians(works, options.repeats, warm_up=1, clock=time.process_time)
    ms = {name: round(1000 * value, 1) for name, value in seconds.items()}
    row = {"backbone": Path(options.backbone).name, "classes": options.classes, "batch": options.batch}
    row |= {
        "precision": options.precision,
        "strong_step_ms": ms["dear step"],
        "mmrl_step_ms": ms["mmrl step"],
    }
    row |= {"step_to_mmrl": round(seconds["dear step"] / seconds["mmrl step"], 2), "answers": options.answers}
    row |= {"strong_answers_ms": ms["strong answers"], "quick_answers_ms": ms["quick answers"]}
    row |= {"rate_to_quick": round(seconds["quick answers"] / seconds["strong answers"], 2)}
    record(options.csv, [row])


if __name__ == "__main__":
    main()
