"""Training a run again without a concept or a property of its images, and the comparison on test images."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dear.clip.factory import pick_device
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.data.open import open_data
from dear.errors import RunError
from dear.heads.roles import RoleMap
from dear.runs.folder import load_run, read_config
from dear.runs.images import run_images
from dear.runs.model import Model
from dear.runs.spec import Spec
from dear.shortcuts.causal import EditedSet, causal_test, edited_set
from dear.shortcuts.directions import random_directions
from dear.shortcuts.plan import EditPlan
from dear.shortcuts.removal import Repair, combine, remove_heads
from dear.shortcuts.without import Removal, Without, role_map
from dear.tasks.audit.photos import label_predictor
from dear.train.fit import fit
from dear.train.setup.prepare import Job, prepare
from dear.utils.files import PathLike
from dear.utils.progress import Progress

DRAWS = 5  #: draws of random heads or directions that a removal is compared with
INSIDE = 2  #: the same for a method that learns inside the tower, whose training takes long
EDITED = 120  #: test images of other classes that are edited
GAIN = 0.02  #: of a figure, to count as better


@dataclass(frozen=True)
class Comparison:
    """A repair against the untouched model and against random removals, on test images."""

    #: accuracy, accuracy in the worst group where groups are known, and per class that stands out the share
    #: of other test images that are called by it when they are given what it has ("called minaret")
    untouched: dict[str, float]
    repaired: dict[str, float]
    #: the same for as many random heads or directions, one entry per draw; empty for edited copies
    random: tuple[dict[str, float], ...]
    changed: float  #: share of answers that the repair changed

    @property
    def random_mean(self) -> dict[str, float]:
        """Means over the draws."""
        keys = self.random[0] if self.random else ()
        return {key: sum(draw[key] for draw in self.random) / len(self.random) for key in keys}

    def report(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "untouched": self.untouched,
            "repaired": self.repaired,
            "random": {"draws": list(self.random), "mean": self.random_mean},
            "answers_changed": self.changed,
            "verdict": self.verdict,
        }

    @property
    def verdict(self) -> str:
        """Whether the repair helped, in a sentence."""
        called = [key for key in self.untouched if key.startswith("called ")]
        cost = self.untouched["accuracy"] - self.repaired["accuracy"]
        price = f" at {cost:.1%} of accuracy" if cost > 0.005 else ""
        if called:
            key = max(called, key=lambda one: self.untouched[one])
            before, after = self.untouched[key], self.repaired[key]
            if before < GAIN:
                return f"The model did not use it: {before:.1%} of the edited images were {key}."
            if before - after < GAIN:
                return f"It did not help: {before:.1%} of the edited images were {key}, and {after:.1%} are."
            return f"It helped{price}: {before:.1%} of the edited images were {key}, now {after:.1%} are."
        key = "worst_group" if "worst_group" in self.untouched else "accuracy"
        words = key.replace("_", " ")
        gain = self.repaired[key] - self.untouched[key]
        figures = f"{words} {self.untouched[key]:.1%} to {self.repaired[key]:.1%}"
        if gain < GAIN:
            return f"It did not help: {figures}."
        if self.random and self.random_mean[key] - self.untouched[key] > gain - GAIN:
            return (
                f"It did no more than random removals do: {figures}, at random {self.random_mean[key]:.1%}."
            )
        return f"It helped: {figures}."


def random_repairs(
    removal: Removal | None, edits: EditPlan | None, draws: int = DRAWS, seed: int = 1
) -> list[Repair]:
    """Removals of as many random heads and directions; none beside edited copies."""
    repairs = [] if removal is None else [removal.repair]
    if edits is not None and edits.repair is not None:
        center = edits.repair.center if removal is None else removal.repair.center
        repairs.append(replace(edits.repair, center=center))
    if not repairs:
        return []
    chosen = combine(*repairs)
    part = edits if removal is None else removal
    seen = None if part is None else part.images
    found = []
    for draw in range(draws):
        parts = []
        if chosen.heads and seen is not None:
            keys = [(layer, head) for layer in seen.layers for head in range(seen.outputs.shape[2])]
            rng = random.Random(seed * DRAWS + draw)
            parts.append(remove_heads(seen, rng.sample(keys, len(chosen.heads)), "random heads"))
        if chosen.rank:
            basis = random_directions(len(chosen.center), chosen.rank, seed * DRAWS + draw)
            removed = (basis.T @ basis).to(chosen.center)
            words = ("random directions",), ("chance",)
            parts.append(Repair(*words, chosen.center, removed, rank=chosen.rank))
        found.append(combine(*parts))
    return found


@dataclass(frozen=True, eq=False)
class _Test:
    """Test images, and copies of them that were given what a class has."""

    images: ImageSet
    classes: tuple[str, ...]
    edited: tuple[EditedSet, ...] = ()

    def figures(self, model: Model) -> tuple[dict[str, float], Tensor]:
        """Accuracy, worst group, per edit the share of images called by the class beyond before; answers."""
        evaluated = model.evaluate(self.images)
        report = evaluated.report()
        found = {"accuracy": report["accuracy"]}
        if "worst_group" in report:
            found["worst_group"] = report["worst_group"]["accuracy"]
        answer = label_predictor(model, self.classes)
        for one in self.edited:
            found[f"called {one.shortcut.class_name}"] = max(0.0, causal_test(one, answer).extra)
        return found, evaluated.answers[evaluated.pick(None)]


def _compare(job: Job, plain: Clip, repaired: Model, test: _Test) -> Comparison:
    """Train the same method on the plain backbone and on random removals, and test all of them."""
    again = replace(job, spec=job.spec.changed(calibrate=False, copies=None), edits=None)
    draws = DRAWS if job.method.cut == "feature" else INSIDE
    before, answers = test.figures(fit(again.on(plain.corrected(None))))
    after, fixed = test.figures(repaired)
    drawn = tuple(
        test.figures(fit(again.on(plain.corrected(other.correction()))))[0]
        for other in random_repairs(job.removal, job.edits, draws)
    )
    return Comparison(before, after, drawn, float((answers != fixed).double().mean()))


@dataclass(frozen=True, eq=False)
class Repaired:
    """A run that was trained again without some concepts or properties."""

    trained: Model
    removal: Removal | None  #: of concepts
    edits: EditPlan | None  #: of properties of the images
    comparison: Comparison | None  #: on test images, where there are any

    @property
    def title(self) -> str:
        """What was removed, and how."""
        return "; ".join(part.title for part in (self.removal, self.edits) if part is not None)

    @property
    def notices(self) -> tuple[str, ...]:
        """What to know, one sentence each."""
        return tuple(line for part in (self.edits, self.removal) if part is not None for line in part.notices)

    def report(self) -> dict[str, Any]:
        """Plain values for JSON."""
        facts = {} if self.removal is None else self.removal.facts()
        if self.edits is not None:
            choices = {**facts.get("choices", {}), ", ".join(self.edits.kinds): self.edits.facts()}
            facts = {**facts, "choices": choices, "notices": list(self.notices)}
        compared = {} if self.comparison is None else self.comparison.report()
        return {**facts, "removed": self.title, **compared}


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
    compared: bool = True,
    progress: Progress | None = None,
) -> Repaired:
    """Train a run again, on the same images in the same way, with concepts removed.

    Args:
        run: the run folder.
        without: which concepts, and how; None: none, the run is trained again as it was.
        out: folder of the new run; None keeps it in memory.
        data: where the training images are now, or an image set; None: where the run says.
        test: images to compare on; None: the test split of the same data.
        roles: role map for the removal by heads; None: the backbone's own.
        backbone: if it moved since training.
        device: "auto", "cpu", "cuda", …
        compared: also train on the untouched backbone and on random removals, and compare.
        progress: called with (stage, done, total).
    """
    old = load_run(run, backbone, pick_device(device))
    spec, plain = read_config(run), old.clip.corrected(None)
    job = prepare(
        spec.changed(without=None, way=None, examples=None, copies=None),
        _training_images(run, spec, data),
        clip=plain,
        roles=old.roles,
        without=without,
        concept_roles=role_map(roles, plain),
        progress=progress,
    )
    meant = ("removed concepts", "edited copies")
    changed = [part for part in spec.differences(job.spec) if part not in meant]
    if changed:
        raise RunError(
            f"{run}: cannot be trained again in the same way: {', '.join(changed)} changed since; train it "
            "anew, with the concept removed"
        )
    trained = fit(job, out, progress=progress)
    comparison = None
    if compared and without is not None:
        images = run_images(run, "test") if test is None and data is None else test
        if images is not None:
            shortcuts = () if job.edits is None else job.edits.shortcuts[:3]
            edited = tuple(edited_set(one, images, job.images, EDITED) for one in shortcuts)
            test_set = _Test(images, tuple(job.images.classes), edited)
            comparison = _compare(job, plain, trained, test_set)
    return Repaired(trained, job.removal, job.edits, comparison)


def _training_images(run: PathLike, spec: Spec, data: PathLike | ImageSet | None) -> ImageSet:
    """The images that a run was trained on, before the draw of shots."""
    if isinstance(data, ImageSet):
        return data
    return run_images(run, spec.split) if data is None else open_data(data, spec.split)
