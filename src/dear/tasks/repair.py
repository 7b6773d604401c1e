"""`dear repair`: a run trained again without a concept or an image property, and compared on test images."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dear.clip.factory import pick_device
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.data.open import open_data
from dear.errors import RunError, UsageError
from dear.heads.known_roles import resolve_roles
from dear.heads.roles import RoleMap
from dear.report.page import Table, percent, render
from dear.runs.feature_cache import frozen_features
from dear.runs.folder import check_folder, load_run, read_config
from dear.runs.images import run_images
from dear.runs.model import Model
from dear.runs.spec import Spec
from dear.shortcuts.causal import EditedSet, causal_test, edit_held_out
from dear.shortcuts.directions import random_directions
from dear.shortcuts.edit_plan import EditPlan
from dear.shortcuts.removal import Removal, combine, remove_heads
from dear.shortcuts.without import RemovedConcepts, Without
from dear.tasks.audit.properties import label_predictor
from dear.tasks.share.task import local_run
from dear.train.fit import fit
from dear.train.setup.estimate import estimate
from dear.train.setup.prepare import Job, prepare
from dear.utils.files import PathLike, write_atomic
from dear.utils.notices import note
from dear.utils.progress import Progress

if TYPE_CHECKING:
    import pandas as pd

DRAWS = 5  #: draws of random heads or directions that a removal is compared with
INSIDE = 2  #: the same for a method that learns inside the tower, whose training takes long
EDITED = 120  #: test images of other classes that are edited
GAIN = 0.02  #: of a figure, to count as better
PREDICTED = "predicted as "  #: how figures of edited images begin


@dataclass(frozen=True)
class Comparison:
    """A repair against the untouched model and against random removals, on test images."""

    #: accuracy, accuracy in the worst group where groups are known, and per class with a property that
    #: separates it the share of other test images that the edit moves to it ("predicted as minaret")
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

    def to_dict(self) -> dict[str, Any]:
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
        edits = [key for key in self.untouched if key.startswith(PREDICTED)]
        if edits:
            key = max(edits, key=lambda one: self.untouched[one])
            before, after = self.untouched[key], self.repaired[key]
            figures = f"{before:.1%} → {after:.1%} of edited images are {key}"
            cost = 100 * (self.untouched["accuracy"] - self.repaired["accuracy"])
            price = f"; accuracy falls by {cost:.1f} points" if cost > 0.5 else ""
            if before < GAIN:
                return f"The model did not use it: {before:.1%} of edited images were {key}."
            if before - after < GAIN:
                return f"No {'clear ' if before > after else ''}improvement: {figures}{price}."
            return f"Improvement: {figures}{price}."
        key = "worst_group" if "worst_group" in self.untouched else "accuracy"
        gain = self.repaired[key] - self.untouched[key]
        words = key.replace("_", " ")
        figures = f"{words} {self.untouched[key]:.1%} → {self.repaired[key]:.1%} ({100 * gain:+.1f} points)"
        if gain < GAIN:
            return f"No {'clear ' if gain > 0 else ''}improvement: {figures}."
        if self.random and self.random_mean[key] - self.untouched[key] > gain - GAIN:
            return f"No more than random removals: {figures}; at random {self.random_mean[key]:.1%}."
        return f"Improvement: {figures}."

    def table(self) -> Table:
        """Every figure before and after."""
        rows = []
        for key, before in self.untouched.items():
            random = percent(self.random_mean[key]) if key in self.random_mean else ""
            rows.append((key.replace("_", " "), percent(before), percent(self.repaired[key]), random))
        shown = 4 if self.random else 3
        columns = ("on test images", "untouched", "repaired", "random removals")
        return Table(columns[:shown], tuple(row[:shown] for row in rows))


def random_removals(
    removed: RemovedConcepts | None, edits: EditPlan | None, draws: int = DRAWS
) -> list[Removal]:
    """Removals of as many random heads and directions; none for edited copies."""
    removals = [] if removed is None else [removed.removal]
    if edits is not None and edits.removal is not None:
        center = edits.removal.center if removed is None else removed.removal.center
        removals.append(replace(edits.removal, center=center))
    if not removals:
        return []
    removal = combine(*removals)
    part = edits if removed is None else removed
    collected = None if part is None else part.images
    comparisons = []
    for draw in range(draws):
        parts = []
        if removal.heads and collected is not None:
            keys = [(layer, head) for layer in collected.layers for head in range(collected.outputs.shape[2])]
            rng = random.Random(DRAWS + draw)
            parts.append(remove_heads(collected, rng.sample(keys, len(removal.heads)), "random heads"))
        if removal.rank:
            basis = random_directions(len(removal.center), removal.rank, DRAWS + draw)
            projection = (basis.T @ basis).to(removal.center)
            words = ("random directions",), ("chance",)
            parts.append(Removal(*words, removal.center, projection, rank=removal.rank))
        comparisons.append(combine(*parts))
    return comparisons


@dataclass(frozen=True, eq=False)
class _Test:
    """Test images, and copies of them that were edited to have the property of a class."""

    images: ImageSet
    classes: tuple[str, ...]
    edited: tuple[EditedSet, ...] = ()

    def figures(self, model: Model) -> tuple[dict[str, float], Tensor]:
        """Accuracy, worst group, per edit the share of answers that it moves to the class; answers."""
        evaluated = model.evaluate(self.images)
        values = evaluated.to_dict()
        figures = {"accuracy": values["accuracy"]}
        if "worst_group" in values:
            figures["worst_group"] = values["worst_group"]["accuracy"]
        predict = label_predictor(model, self.classes)
        for one in self.edited:
            figures[f"{PREDICTED}{one.shortcut.class_name}"] = max(0.0, causal_test(one, predict).extra)
        return figures, evaluated.answers[evaluated.pick(None)]


def _compare(job: Job, plain: Clip, repaired: Model, test: _Test) -> Comparison:
    """Train the same method on the plain backbone and on random removals, and test all of them."""
    again = replace(job, spec=job.spec.changed(calibrate=False, copies=None), edits=None)
    draws = DRAWS if job.method.cut == "feature" else INSIDE
    before, answers = test.figures(fit(again.on(plain.with_correction(None))))
    after, fixed = test.figures(repaired)
    drawn = tuple(
        test.figures(fit(again.on(plain.with_correction(other.correction()))))[0]
        for other in random_removals(job.removed_concepts, job.edits, draws)
    )
    return Comparison(before, after, drawn, float((answers != fixed).double().mean()))


@dataclass(frozen=True, eq=False, repr=False)
class Repaired:
    """A run that was trained again without some concepts or properties."""

    trained: Model
    removed_concepts: RemovedConcepts | None  #: of concepts
    edits: EditPlan | None  #: of properties of the images
    comparison: Comparison | None  #: on test images, where there are any

    def __repr__(self) -> str:
        return f"<Repaired: {self.verdict}>"

    @property
    def title(self) -> str:
        """What was removed, and how."""
        return "; ".join(part.title for part in (self.removed_concepts, self.edits) if part is not None)

    @property
    def notices(self) -> tuple[str, ...]:
        """What to know, one sentence each."""
        return tuple(
            line for part in (self.edits, self.removed_concepts) if part is not None for line in part.notices
        )

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        removed = f"Removed: {self.title}."
        return removed if self.comparison is None else f"{removed} {self.comparison.verdict}"

    def to_frame(self) -> pd.DataFrame:
        """Figures on test images, one row each: untouched, repaired, mean of random removals."""
        import pandas as pd

        compared, columns = self.comparison, ["figure", "untouched", "repaired", "random"]
        if compared is None:
            return pd.DataFrame(columns=columns)
        rows = [
            (key, before, compared.repaired[key], compared.random_mean.get(key))
            for key, before in compared.untouched.items()
        ]
        return pd.DataFrame(rows, columns=columns)

    def _tables(self) -> list[Table]:
        return [] if self.comparison is None else [self.comparison.table()]

    def write_page(self, path: PathLike) -> None:
        """Write a page with the verdict, the comparison and the notices."""
        page = render(
            "repair.html", title="Repair", verdict=self.verdict, tables=self._tables(), notices=self.notices
        )
        write_atomic(path, page)

    def _repr_html_(self) -> str:
        """For notebooks."""
        return render("summary.html", verdict=self.verdict, tables=self._tables())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {} if self.removed_concepts is None else self.removed_concepts.to_dict()
        if self.edits is not None:
            choices = {**values.get("choices", {}), ", ".join(self.edits.kinds): self.edits.to_dict()}
            values = {**values, "choices": choices, "notices": list(self.notices)}
        compared = {} if self.comparison is None else self.comparison.to_dict()
        return {**values, "removed": self.title, **compared}


def repair(
    run: PathLike,
    without: str | Sequence[str] | Without | None,
    out: PathLike | None = None,
    *,
    way: str = "auto",
    examples: PathLike | Mapping[str, PathLike | ImageSet] | Sequence[str] | None = None,
    roles: PathLike | RoleMap | None = None,
    data: PathLike | ImageSet | None = None,
    compare: bool = True,
    backbone: PathLike | Clip | None = None,
    device: str = "auto",
    test: ImageSet | None = None,
    progress: Progress | None = None,
) -> Repaired:
    """Train a run again, on the same images in the same way, with concepts or image properties removed.

    Args:
        run: run folder, archive, or `hf://owner/name`.
        without: what to remove; None: nothing, the run is trained again as it was.
        out: folder of the new run; None keeps it in memory.
        way: how to remove it; "auto" chooses on the training images.
        examples: images that show the values of a concept to remove.
        roles: role map for the removal by heads; None: the backbone's.
        data: where the training images are now, or an image set; None: where the run says.
        compare: also train on the untouched backbone and on random removals, and compare on test images.
        backbone: for a run whose backbone moved.
        device: "auto", "cpu", "cuda", …
        test: images to compare on; None: the test split of the same data.
        progress: called with (stage, done, total).

    Raises:
        RunError: the run cannot be trained again in the same way.
        UsageError: a concept or property is not known.

    Example:
        >>> repair("run", "location", "repaired").verdict           # doctest: +SKIP
    """
    removal = None if without is None else Without.of(without, way, examples)
    if out is not None:
        check_folder(out, resume=False)
    run = local_run(run)
    old = load_run(run, backbone, pick_device(device))
    spec, plain = read_config(run), old.clip.with_correction(None)
    if spec.several:
        raise UsageError(f"{run}: repair needs a run with one label per image; this one has several (labels)")
    job = prepare(
        spec.changed(without=None, way=None, examples=None, copies=None),
        _training_images(run, spec, data),
        clip=plain,
        roles=old.roles,
        without=removal,
        concept_roles=resolve_roles(roles, plain),
        progress=progress,
    )
    intended = ("removed concepts", "edited copies")
    changed = [part for part in spec.differences(job.spec) if part not in intended]
    if changed:
        raise RunError(
            f"{run}: cannot be trained again in the same way: {', '.join(changed)} changed since; train it "
            "anew, with the concept removed"
        )
    if compare and removal is not None and test is None and data is None:
        test = run_images(run)
    if not compare or removal is None or test is None:
        return Repaired(fit(job, out, progress=progress), job.removed_concepts, job.edits, None)
    shortcuts = () if job.edits is None else job.edits.shortcuts[:3]
    _estimate(job, test, len(shortcuts))
    trained = fit(job, out, progress=progress)
    edited = tuple(edit_held_out(one, test, job.images, EDITED) for one in shortcuts)
    tests = _Test(test, tuple(job.images.classes), edited)
    return Repaired(trained, job.removed_concepts, job.edits, _compare(job, plain, trained, tests))


def _estimate(job: Job, test: ImageSet, shortcuts: int) -> None:
    """Announce how long training and comparing take, where that is more than a few seconds."""
    few = test.subset(range(min(8, len(test))))
    start = time.perf_counter()
    frozen_features(job.method.clip, few)
    each = (time.perf_counter() - start) / len(few)
    models = 2
    if job.removed_concepts is not None or (job.edits is not None and job.edits.removal is not None):
        models += DRAWS if job.method.cut == "feature" else INSIDE
    training = estimate(job)
    seconds = each * (len(job.training_set[0]) + models * (len(test) + 2 * EDITED * shortcuts))
    seconds += 0.0 if training is None else models * training.training + training.calibration
    if seconds > 5:
        note(f"{models} models to train and to compare on {len(test)} test images: about {seconds:.0f} s")


def _training_images(run: PathLike, spec: Spec, data: PathLike | ImageSet | None) -> ImageSet:
    """The images that a run was trained on, before the draw of shots."""
    if isinstance(data, ImageSet):
        return data
    return run_images(run, spec.split) if data is None else open_data(data, spec.split)
