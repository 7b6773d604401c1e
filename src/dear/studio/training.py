"""The Train tab: one training at a time, in a background thread, with its status and its result."""

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

from dear.clip.factory import load
from dear.clip.model import Clip
from dear.data import ImageSet, few_shot
from dear.data.images import even_subset
from dear.errors import DearError, RunError, UsageError
from dear.heads.discover import discover_roles
from dear.heads.roles import RoleMap
from dear.methods import find_method
from dear.report.page import Thumbnail, render, thumbnail
from dear.runs.folder import FILES
from dear.runs.model import Model
from dear.runs.several_labels import SeveralLabelsEvaluation
from dear.runs.spec import Spec
from dear.studio.state import StudioState, check_folder
from dear.tasks.check import check_labels
from dear.tasks.evaluate import HeldOutAccuracy, held_out_accuracy, open_held_out
from dear.train.fit import fit
from dear.train.run import Paused
from dear.train.setup.focus import check_focus
from dear.train.setup.prepare import Job, check_held_out, check_task, open_training, prepare
from dear.utils.files import write_atomic

_TESTED = 120  # images for the accuracy during training
_SUSPECTS = 12  # labels that look wrong, at most

AUTOMATIC, DISCOVER, MIXED = "automatic", "discovered on these images", "all heads mixed"
ROLE_CHOICES = (AUTOMATIC, DISCOVER, MIXED)
"""Origin of roles: the backbone's map or else discovered; always discovered; the same role for every head."""


@dataclass(frozen=True)
class TrainingResult:
    """What a finished training reports."""

    used: int  #: training images
    available: int  #: images of the training split
    unreadable: int  #: images that could not be read
    accuracy: HeldOutAccuracy | None  #: on the test split; None where the data has none
    mode: str  #: the usual mode of the model
    notices: tuple[str, ...] = ()
    suspects: tuple[Thumbnail, ...] = ()  #: training images whose labels look wrong
    wrong: int = 0  #: number of labels that look wrong


@dataclass
class TrainingStatus:
    """The state of a training, for display."""

    state: str = "idle"  #: "idle", "running", "stopped", "finished" or "failed"
    message: str = "No training yet."  #: a sentence for people
    step: int = 0  #: finished steps, of `steps`
    steps: int = 0
    lines: list[Mapping[str, float | int]] = field(default_factory=list)  #: the log
    #: (step, mode -> accuracy) after each epoch
    accuracy: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    result: TrainingResult | None = None  #: of a finished training

    @property
    def busy(self) -> bool:
        """Whether a training is running."""
        return self.state == "running"


class Trainer:
    """Starts, stops and resumes trainings of the studio."""

    def __init__(self, state: StudioState) -> None:
        self.state = state
        self.status = TrainingStatus()
        self.run: Path | None = None
        self.spec: Spec | None = None
        self.roles = AUTOMATIC
        self.owner = ""  #: the visitor who started the training
        self._job: Job | None = None  #: cached for `resume`
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._number = 0

    def start(self, spec: Spec, roles: str = AUTOMATIC, owner: str = "") -> None:
        """Start a training; `roles` is one of `ROLE_CHOICES`, or a role map file.

        An empty backbone in `spec` is the one of the studio.
        """
        epochs = int(spec.recipe.get("epochs", 1))
        if not 1 <= epochs <= 200:
            raise UsageError(f"epochs must be 1 to 200, got {epochs}")
        if not 0 <= spec.shots <= 10_000:
            raise UsageError(f"shots must be 0 (all) to 10,000, got {spec.shots}")
        with self.state.lock:
            self._require_idle()
            self._check_choices(spec, roles)
            images, test = self._open(spec)
            self._number += 1
            self.spec, self.roles, self.owner, self._job = spec, roles, owner, None
            self.run = self.state.folder / f"run-{self._number}"
            self._launch(images, test, resume=False)

    def resume(self) -> None:
        """Continue the training that was stopped."""
        with self.state.lock:
            self._require_idle()
            if self.spec is None or self.status.state != "stopped":
                raise UsageError("no training is stopped; start one")
            self._launch(*self._open(self.spec), resume=True)

    def stop(self, wait: float = 30.0) -> None:
        """Stop the training after its current step, and wait for its end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(wait)

    def may_stop(self, visitor: str) -> bool:
        """Whether this visitor may stop the training: its owner, or any visitor of a local studio."""
        return self.state.local or visitor == self.owner

    def wait(self, seconds: float) -> TrainingStatus:
        """The status after `seconds`, or as soon as the training ends."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self.status

    def download(self) -> Path:
        """The finished run as one zip file."""
        with self.state.lock:  # no other training can begin meanwhile
            if self.run is None or self.status.state != "finished" or self.spec is None:
                raise RunError("no run is finished yet")
            memory = io.BytesIO()
            with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
                for name in FILES:
                    if (self.run / name).is_file():
                        archive.write(self.run / name, f"run/{name}")
            words = re.sub(r"[^A-Za-z0-9]+", "-", Path(self.spec.data or "").name).strip("-") or "data"
            path = self.state.folder / f"{self.spec.method}-{words}.zip"
            write_atomic(path, memory.getvalue())
            return path

    def _require_idle(self) -> None:
        if self.status.busy:
            raise UsageError("a training is already running; stop it or wait for its end")

    def _check_choices(self, spec: Spec, roles: str) -> None:
        """Reject a wrong backbone or role map before any work starts."""
        allowed = sorted({"mini", self.state.clip.name})
        if spec.backbone and not self.state.local and spec.backbone not in allowed:
            raise UsageError(
                f"backbone must be {' or '.join(allowed)} in a studio that is open to other computers, got "
                f"{spec.backbone!r}"
            )
        if roles not in ROLE_CHOICES:
            RoleMap.load(roles)
        if spec.focus is not None:
            check_focus(find_method(spec.method))

    def _open(self, spec: Spec) -> tuple[ImageSet, ImageSet | None]:
        name = (spec.data or "").strip()
        if not name:
            raise UsageError("Images must name a folder or a task of the attribute world, got nothing")
        if not name.startswith("world:"):
            name = str(check_folder(self.state, name))
        images = open_training(spec.changed(data=name))
        check_task(images)
        test = open_held_out(name, spec.root)
        if test is not None:
            check_held_out(images, test)
        return images, test

    def _launch(self, images: ImageSet, test: ImageSet | None, resume: bool) -> None:
        before = self.status
        self.status = TrainingStatus("running", "Getting ready …")
        if resume:
            self.status.accuracy = before.accuracy
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._work, args=(images, test, resume), name="dear-training", daemon=True
        )
        self._thread.start()

    def _work(self, images: ImageSet, test: ImageSet | None, resume: bool) -> None:
        status = self.status
        try:
            model = self._train(images, test, resume, status)
            status.message = "Measuring accuracy …"
            status.result = self._result(model, test, status)
        except Paused:
            status.state = "stopped"
            status.message = f"Stopped after step {status.step} of {status.steps}. Resume continues it."
        except DearError as error:
            status.state, status.message = "failed", str(error)
        except Exception:  # a bug: the terminal shows the traceback
            traceback.print_exc()
            status.state, status.message = "failed", "An internal error; see the terminal."
        else:
            title = model.method.title
            self.state.use(model, f"{title}, trained on {images.name}", test or images)
            status.message = f"{title} is trained. All tabs use it now."
            status.state = "finished"

    def _train(self, images: ImageSet, test: ImageSet | None, resume: bool, status: TrainingStatus) -> Model:
        if self._job is None:
            self._job = self._prepare(images, status)
        job = self._job
        method, epochs = job.method, job.recipe.epochs
        tested = None if test is None else even_subset(test, _TESTED)
        began, first = time.monotonic(), -1

        def log(step: int, steps: int, line: Mapping[str, float | int]) -> None:
            nonlocal first
            first = step - 1 if first < 0 else first
            status.step, status.steps = step, steps
            if line and (not status.lines or status.lines[-1]["step"] != line["step"]):
                status.lines.append(dict(line))
            if tested is not None and step * epochs % steps == 0:
                status.message = f"Step {step} of {steps}, measuring accuracy …"
                result = Model(method).evaluate(tested)
                sets = result.mean_precision if isinstance(result, SeveralLabelsEvaluation) else None
                status.accuracy.append((step, sets or result.accuracy))
            seconds = (time.monotonic() - began) / (step - first) * (steps - step)
            status.message = f"Step {step} of {steps}, about {seconds:.0f} s remaining."

        def progress(stage: str, done: int, total: int | None) -> None:
            if stage == "calibration":
                status.message = f"Calibrating the probabilities, {done}% …"

        return fit(job, self.run, resume=resume, log=log, progress=progress, stop=self._stop.is_set)

    def _result(self, model: Model, test: ImageSet | None, status: TrainingStatus) -> TrainingResult:
        """Accuracy before and after, images that were not used, and labels that look wrong."""
        job = self._job
        assert job is not None

        def progress(stage: str, done: int, total: int | None) -> None:
            status.message = f"Measuring accuracy, {stage}: {done:,} of {total:,} …"

        wrong = dict(model.metrics.get("labels") or {}).get("look_wrong", 0)
        suspects = check_labels(job.images, model.clip.plain).suspects[:_SUSPECTS] if wrong else ()
        return TrainingResult(
            used=len(job.images),
            available=job.available,
            unreadable=len(job.unreadable),
            accuracy=None if test is None else held_out_accuracy(model, test, progress),
            mode=model.pick_mode(None),
            notices=job.notices,
            suspects=tuple(
                Thumbnail(
                    thumbnail(job.images.image(one.index)),
                    one.key,
                    (("name", f"{one.label}, or {one.suggestion}?"), ("soft", Path(one.key).name)),
                )
                for one in suspects
            ),
            wrong=wrong,
        )

    def _prepare(self, images: ImageSet, status: TrainingStatus) -> Job:
        """The training with its backbone and role map."""
        spec, clip = self.spec, self.state.clip
        assert spec is not None
        if spec.backbone and spec.backbone != clip.name:
            status.message = f"Loading the backbone {spec.backbone} …"
            clip = load(spec.backbone, device=str(clip.device))
        roles = None
        if find_method(spec.method).uses_roles or spec.focus is not None:
            roles = self._roles(
                clip, images if not spec.shots else few_shot(images, spec.shots, spec.seed), status
            )

        def progress(stage: str, done: int, total: int | None) -> None:
            status.message = f"Getting ready: {stage} {done}" + (f" of {total}" if total else "")

        return prepare(spec, images, clip=clip, roles=roles, progress=progress)

    def _roles(self, clip: Clip, images: ImageSet, status: TrainingStatus) -> RoleMap | None:
        """The chosen role map; None: `prepare` finds one as for `dear adapt`."""
        if self.roles == MIXED:
            vision = clip.config.vision
            return RoleMap.uniform("mixed", vision.last_third, vision.heads)
        if self.roles == AUTOMATIC:
            return self.state.roles if clip is self.state.clip else None
        if self.roles != DISCOVER:
            return RoleMap.load(self.roles)

        def progress(stage: str, done: int, total: int | None) -> None:
            if self._stop.is_set():
                raise UsageError("stopped during the discovery of roles; start again")
            status.message = f"Discovering head roles: {stage} {done}" + (f" of {total}" if total else "")

        return discover_roles(clip, images, concepts="tags", progress=progress)


def status_html(status: TrainingStatus) -> str:
    """The state of the training as HTML, also for screen readers."""
    return render("studio/status.html", status=status)
