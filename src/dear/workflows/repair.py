"""Training a run again without a concept, and the proof on test images, beside random heads."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import Tensor

from dear._io.files import PathLike
from dear._io.progress import Progress
from dear.clip.factory import pick_device
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.data.open import open_data
from dear.data.shots import few_shot
from dear.heads.repair import Repair, remove_heads
from dear.heads.roles import RoleMap
from dear.heads.without import Removal, Without, remove, role_map
from dear.methods.base import Method
from dear.runs.evaluate import evaluate
from dear.runs.feature_cache import frozen_features
from dear.runs.folder import load_run, read_config
from dear.runs.recipe import Recipe
from dear.runs.spec import RunConfig
from dear.train.run import Trained, train
from dear.workflows.evaluate import run_images

DRAWS = 5  #: draws of random heads that a removal is compared with


@dataclass(frozen=True)
class Proof:
    """A repair against the untouched model and against random heads, on test images.

    Attributes:
        untouched, repaired: accuracy, and accuracy in the worst group where groups are known.
        random: the same for as many random heads, one entry per draw; empty where no heads were removed.
        changed: share of answers that the repair changed.
    """

    untouched: dict[str, float]
    repaired: dict[str, float]
    random: tuple[dict[str, float], ...]
    changed: float

    def report(self) -> dict[str, Any]:
        """Plain values for JSON."""
        mean = {
            key: sum(draw[key] for draw in self.random) / len(self.random)
            for key in (self.random[0] if self.random else ())
        }
        return {
            "untouched": self.untouched,
            "repaired": self.repaired,
            "random_heads": {"draws": list(self.random), "mean": mean},
            "answers_changed": self.changed,
        }


def figures(method: Method, images: ImageSet) -> tuple[dict[str, float], Tensor]:
    """Accuracy (and worst group) of a method's usual mode, and its answers."""
    found = evaluate(method, images)
    report = found.report()
    shown = {"accuracy": report["accuracy"]}
    if "worst_group" in report:
        shown["worst_group"] = report["worst_group"]["accuracy"]
    return shown, found.answers[found.pick(None)]


def random_heads(
    roles: RoleMap, count: int, seed: int = 1, draws: int = DRAWS
) -> list[list[tuple[int, int]]]:
    """Draws of as many heads of the role map's layers, whatever their roles."""
    rng, keys = random.Random(seed), [key for key, _ in roles]
    return [sorted(rng.sample(keys, min(count, len(keys)))) for _ in range(draws)]


def random_repairs(removal: Removal, roles: RoleMap | None, seed: int = 1) -> list[Repair]:
    """Removals of random heads: as many as the repair removes, or as many as have the concept's role."""
    heads = {key for ways in removal.ways.values() if "heads" in ways for key in ways["heads"].heads}
    count = len(removal.repair.heads) or len(heads)
    if roles is None or not count:
        return []
    draws = random_heads(roles, count, seed)
    return [remove_heads(removal.images, heads, "random heads") for heads in draws]


def compare(
    train_again: Callable[[Clip], Method],
    plain: Clip,
    repaired: Method,
    test: ImageSet,
    others: Sequence[Repair] = (),
) -> Proof:
    """Train the same method on the plain backbone and on random removals, and test all of them."""
    before, answers = figures(train_again(plain.corrected(None)), test)
    after, fixed = figures(repaired, test)
    drawn = tuple(figures(train_again(plain.corrected(other.correction())), test)[0] for other in others)
    return Proof(before, after, drawn, float((answers != fixed).double().mean()))


@dataclass(frozen=True, eq=False)
class Repaired:
    """A run that was trained again without some concepts.

    Attributes:
        trained: the new run.
        removal: what was removed, and how.
        proof: on test images, where there are any.
    """

    trained: Trained
    removal: Removal
    proof: Proof | None


def repair_run(
    run: PathLike,
    without: Without,
    out: PathLike | None = None,
    *,
    data: PathLike | ImageSet | None = None,
    test: ImageSet | None = None,
    roles: PathLike | RoleMap | None = None,
    backbone: PathLike | Clip | None = None,
    device: str = "auto",
    prove: bool = True,
    progress: Progress | None = None,
) -> Repaired:
    """Train a run again, on the same images in the same way, with concepts removed.

    Args:
        run: the run folder.
        without: which concepts, and how.
        out: folder of the new run; None keeps it in memory.
        data: the training images; None: those that the run names.
        test: images to prove it on; None: the test split of the same data.
        roles: role map for the removal by heads; None: the backbone's own.
        backbone: if it moved since training.
        device: "auto", "cpu", "cuda", …
        prove: also train on the untouched backbone and on removals of random heads, and compare.
        progress: told (stage, done, total).

    Raises:
        DearError: anything a user can correct, in one sentence.
    """
    old = load_run(run, backbone, pick_device(device))
    config = read_config(run)
    images = _training_images(run, config, data)
    chart = role_map(roles, old.clip)
    removal = remove(old.clip.corrected(None), images, without, chart, heads_first=not old.reads_feature)
    recipe = Recipe(**config.identity.recipe)

    def again(clip: Clip) -> Method:
        return _train(_untrained(old, clip, recipe.seed), images, recipe).method

    def step(done: int, total: int, line: Mapping[str, float | int]) -> None:
        if progress is not None:
            progress("training", done, total)

    new = _train(_untrained(old, removal.clip, recipe.seed), images, recipe, out, step)
    proof = None
    if prove:
        test = run_images(run, "test") if test is None and data is None else test
        if test is not None:
            others = random_repairs(removal, chart)
            proof = compare(again, old.clip.corrected(None), new.method, test, others)
    return Repaired(new, removal, proof)


def _training_images(run: PathLike, config: RunConfig, data: PathLike | ImageSet | None) -> ImageSet:
    """The images that a run was trained on: the same draw of the same data."""
    if isinstance(data, ImageSet):
        return data
    images = run_images(run, "train") if data is None else open_data(data, "train")
    images = images.select_classes(config.classes)
    count = config.data.images
    if count < len(images):
        images = few_shot(images, ceil(count / len(images.classes)), config.identity.recipe["seed"])
    return images


def _train(
    method: Method,
    images: ImageSet,
    recipe: Recipe,
    out: PathLike | None = None,
    step: Callable[[int, int, Mapping[str, float | int]], None] | None = None,
) -> Trained:
    """Train as `dear.workflows.adapt` does: on features computed once, if the method reads nothing else."""
    features = None
    if method.reads_feature and not recipe.augment:
        features = frozen_features(method, images, recipe.precision)
    return train(method, images, recipe, out, progress=step, features=features)


def _untrained(old: Method, clip: Clip, seed: int) -> Method:
    """The method of a run as it was before training, on another backbone."""
    return type(old)(
        clip,
        old.classes,
        template=old.template,
        roles=old.roles,
        allow_other_roles=old.allow_other_roles,
        ids=old.prompts.given,
        seed=seed,
        config=old.config,
    )
