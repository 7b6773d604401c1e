"""The Train tab: one training at a time, in a thread of its own, watched, stopped and resumed."""

from __future__ import annotations

import io
import re
import threading
import time
import traceback
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dear._io.files import write_atomic
from dear.clip.factory import load
from dear.clip.model import Clip
from dear.data import ImageSet, few_shot, open_data
from dear.errors import DearError, RunError, UsageError
from dear.heads.discover import discover_roles
from dear.heads.known_roles import known_roles
from dear.heads.roles import RoleMap
from dear.methods import build_method, find_method
from dear.methods.base import Method
from dear.report.page import render
from dear.runs.evaluate import evaluate
from dear.runs.folder import FILES
from dear.runs.recipe import Recipe
from dear.studio.desk import Desk
from dear.studio.search import check_folder
from dear.train.run import Paused, train
from dear.workflows.plan import check_task

_TESTED = 120  # images for the accuracy that is shown while training


AUTOMATIC, DISCOVER, MIXED = "automatic", "found on these images", "all heads mixed"
ROLE_CHOICES = (AUTOMATIC, DISCOVER, MIXED)
"""Where roles come from: the backbone's own map or else found; always found; no head treated differently."""


@dataclass(frozen=True)
class Plan:
    """What to train."""

    data: str
    method: str = "dear"
    shots: int = 16
    epochs: int = 10
    seed: int = 1
    backbone: str = ""  #: empty: the one on the desk
    roles: str = AUTOMATIC  #: one of `ROLE_CHOICES`, or a role map file


@dataclass
class Watched:
    """The state of a training, for display.

    Attributes:
        state: "idle", "running", "stopped", "finished" or "failed".
        message: a sentence for people.
        step: steps done, of `steps`.
        steps: steps in all.
        lines: the log so far.
        accuracy: (step, mode -> share) measured after each epoch.
    """

    state: str = "idle"
    message: str = "Nothing has been trained yet."
    step: int = 0
    steps: int = 0
    lines: list[Mapping[str, float | int]] = field(default_factory=list)
    accuracy: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Whether a training is running."""
        return self.state == "running"


class Trainer:
    """Starts, stops and resumes trainings on the desk."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.watched = Watched()
        self.run: Path | None = None
        self.plan: Plan | None = None
        self.owner = ""  #: the visitor who began the training
        self._prepared: tuple[Clip, RoleMap | None] | None = None  #: of the plan, kept for `resume`
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._number = 0

    def start(self, plan: Plan, owner: str = "") -> None:
        """Begin a new training.

        Raises:
            UsageError: one is running, or the plan asks for nonsense.
            DearError: the data cannot be opened.
        """
        if not 1 <= plan.epochs <= 200 or not 0 <= plan.shots <= 10_000:
            raise UsageError("epochs must be 1 to 200 and shots 0 (all) to 10,000")
        with self.desk.lock:
            self._refuse_second()
            self._check_choices(plan)
            images, test = self._open(plan)
            self._number += 1
            self.plan, self.owner, self._prepared = plan, owner, None
            self.run = self.desk.folder / f"run-{self._number}"
            self._launch(plan, images, test, resume=False)

    def resume(self) -> None:
        """Continue the training that was stopped.

        Raises:
            UsageError: there is none.
        """
        with self.desk.lock:
            self._refuse_second()
            if self.plan is None or self.watched.state != "stopped":
                raise UsageError("there is no stopped training to resume; start one")
            self._launch(self.plan, *self._open(self.plan), resume=True)

    def stop(self, wait: float = 30.0) -> None:
        """Ask the running training to stop after its present step, and wait until it has."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(wait)

    def may_stop(self, visitor: str) -> bool:
        """Whether this visitor may stop the training: its owner, or anybody at this computer."""
        return self.desk.local or visitor == self.owner

    def wait(self, seconds: float) -> Watched:
        """The state after `seconds`, or as soon as the training ends."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self.watched

    def download(self) -> Path:
        """The finished run as one zip file.

        Raises:
            RunError: no run is finished.
        """
        with self.desk.lock:  # no other training can begin meanwhile
            if self.run is None or self.watched.state != "finished" or self.plan is None:
                raise RunError("there is no finished run to download yet")
            memory = io.BytesIO()
            with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
                for name in FILES:
                    if (self.run / name).is_file():
                        archive.write(self.run / name, f"run/{name}")
            words = re.sub(r"[^A-Za-z0-9]+", "-", Path(self.plan.data).name).strip("-") or "data"
            path = self.desk.folder / f"{self.plan.method}-{words}.zip"
            write_atomic(path, memory.getvalue())
            return path

    def _refuse_second(self) -> None:
        if self.watched.busy:
            raise UsageError("a training is running; stop it first, or wait until it is done")

    def _check_choices(self, plan: Plan) -> None:
        """Refuse a backbone or a role map before any work begins."""
        if plan.backbone and not self.desk.local and plan.backbone not in ("mini", self.desk.clip.name):
            raise UsageError("this studio is open to other computers; choose its own backbone or mini")
        if plan.roles not in ROLE_CHOICES:
            RoleMap.load(plan.roles)

    def _open(self, plan: Plan) -> tuple[ImageSet, ImageSet | None]:
        name = plan.data.strip()
        if not name:
            raise UsageError("name the images to train on: a task of the attribute world or a folder")
        if not name.startswith("world:"):
            name = str(check_folder(self.desk, name))
        images = open_data(name, "train")
        check_task(images)
        try:
            test = open_data(name, "test")
        except DearError:
            return images, None
        step = max(1, len(test) // _TESTED)
        return images, test.subset(range(0, len(test), step)) if len(test) else None

    def _launch(self, plan: Plan, images: ImageSet, test: ImageSet | None, resume: bool) -> None:
        before = self.watched
        self.watched = Watched("running", "Getting ready …")
        if resume:
            self.watched.accuracy = before.accuracy
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._work, args=(plan, images, test, resume), name="dear-training", daemon=True
        )
        self._thread.start()

    def _work(self, plan: Plan, images: ImageSet, test: ImageSet | None, resume: bool) -> None:
        watched = self.watched
        try:
            method = self._train(plan, images, test, resume, watched)
        except Paused:
            watched.state = "stopped"
            watched.message = (
                f"Stopped after step {watched.step} of {watched.steps}. Resume continues from there."
            )
        except DearError as error:
            watched.state, watched.message = "failed", str(error)
        except Exception:  # a fault of ours: the page says so, the terminal gets the trace
            traceback.print_exc()
            watched.state, watched.message = "failed", "An error inside dear; the terminal has the details."
        else:
            self.desk.use(method, f"{method.title} trained here on {plan.data}", test or images)
            watched.message = f"Done after {watched.steps} steps. The other tabs use this model now."
            watched.state = "finished"

    def _train(
        self, plan: Plan, images: ImageSet, test: ImageSet | None, resume: bool, watched: Watched
    ) -> Method:
        images = few_shot(images, plan.shots, plan.seed) if plan.shots else images
        if self._prepared is None:
            self._prepared = self._prepare(plan, images, watched)
        clip, roles = self._prepared
        preset = find_method(plan.method).preset()
        method = build_method(
            plan.method,
            clip,
            images.classes,
            roles=roles,
            template=images.template,
            seed=plan.seed,
            **preset.options,
        )
        recipe = Recipe.of(method, **{**preset.recipe, "epochs": plan.epochs, "seed": plan.seed})
        began, first = time.monotonic(), -1

        def progress(step: int, steps: int, line: Mapping[str, float | int]) -> None:
            nonlocal first
            first = step - 1 if first < 0 else first
            watched.step, watched.steps = step, steps
            if line and (not watched.lines or watched.lines[-1]["step"] != line["step"]):
                watched.lines.append(dict(line))
            if test is not None and step * plan.epochs % steps == 0:
                watched.message = f"Step {step} of {steps}, measuring accuracy …"
                watched.accuracy.append((step, evaluate(method, test).accuracy))
            left = (time.monotonic() - began) / (step - first) * (steps - step)
            watched.message = f"Step {step} of {steps}, about {left:.0f} s left."

        train(
            method, images, recipe, self.run, resume, progress, self._stop.is_set, preset=method.recommended()
        )
        return method

    def _prepare(self, plan: Plan, images: ImageSet, watched: Watched) -> tuple[Clip, RoleMap | None]:
        """The backbone and the role map of a plan."""
        clip = self.desk.clip
        if plan.backbone and plan.backbone != clip.name:
            watched.message = f"Loading the backbone {plan.backbone} …"
            clip = load(plan.backbone, device=str(clip.device))
        if not find_method(plan.method).uses_roles:
            return clip, None
        if plan.roles == MIXED:
            vision = clip.config.vision
            return clip, RoleMap.uniform("mixed", vision.last_third, vision.heads)
        if plan.roles not in ROLE_CHOICES:
            return clip, RoleMap.load(plan.roles)
        known = self.desk.roles if clip is self.desk.clip else known_roles(clip)
        if plan.roles == AUTOMATIC and known is not None:
            return clip, known

        def tell(stage: str, done: int, total: int | None) -> None:
            if self._stop.is_set():
                raise UsageError("stopped while the roles were being found; start again")
            watched.message = f"Finding the roles of the heads: {stage} {done}" + (
                f" of {total}" if total else ""
            )

        return clip, discover_roles(clip, images, concepts="tags", progress=tell)


def status_html(watched: Watched) -> str:
    """The state of the training as HTML, also for screen readers."""
    return render("studio/status.html", watched=watched)
