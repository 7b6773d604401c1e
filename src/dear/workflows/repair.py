"""Training a run again without a concept, and the proof on test images, beside random heads."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dear._io.files import PathLike
from dear._io.progress import Progress
from dear.clip.factory import pick_device
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.data.open import open_data
from dear.errors import RunError
from dear.heads.repair import Repair, remove_heads
from dear.heads.roles import RoleMap
from dear.heads.without import Removal, Without, role_map
from dear.methods.base import Method
from dear.runs.folder import load_run, read_config
from dear.runs.model import Model
from dear.runs.spec import Spec
from dear.train.fit import fit
from dear.train.prepare import prepare
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
    found = Model(method).evaluate(images)
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

    trained: Model
    removal: Removal | None
    proof: Proof | None


def repair_run(
    run: PathLike,
    without: Without | None,
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
        without: which concepts, and how; None: none, the run is trained again as it was.
        out: folder of the new run; None keeps it in memory.
        data: where the training images are now, or an image set; None: where the run says.
        test: images to prove it on; None: the test split of the same data.
        roles: role map for the removal by heads; None: the backbone's own.
        backbone: if it moved since training.
        device: "auto", "cpu", "cuda", …
        prove: also train on the untouched backbone and on removals of random heads, and compare.
        progress: called with (stage, done, total).

    Raises:
        DearError: anything a user can correct, in one sentence.
    """
    old = load_run(run, backbone, pick_device(device))
    spec, plain = read_config(run), old.clip.corrected(None)
    job = prepare(
        spec.changed(without=None, way=None, examples=None),
        _training_images(run, spec, data),
        clip=plain,
        roles=old.roles,
        without=without,
        concept_roles=role_map(roles, plain),
        progress=progress,
    )
    changed = [part for part in spec.differences(job.spec) if part != "removed concepts"]
    if changed:
        raise RunError(
            f"{run}: cannot be trained again in the same way: {', '.join(changed)} changed since; train it "
            "anew, with the concept removed"
        )
    trained = fit(job, out, progress=progress)
    removal, proof = job.removal, None
    if prove and removal is not None:
        test = run_images(run, "test") if test is None and data is None else test
        if test is not None:
            others = random_repairs(removal, role_map(roles, plain))
            again = replace(job, spec=job.spec.changed(calibrate=False))
            proof = compare(lambda clip: fit(again.on(clip)).method, plain, trained.method, test, others)
    return Repaired(trained, removal, proof)


def _training_images(run: PathLike, spec: Spec, data: PathLike | ImageSet | None) -> ImageSet:
    """The images that a run was trained on, before the draw of shots."""
    if isinstance(data, ImageSet):
        return data
    return run_images(run, spec.split) if data is None else open_data(data, spec.split)
