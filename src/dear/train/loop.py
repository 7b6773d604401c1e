"""The training loop: optimizes the learned tensors of a method by a recipe; it reads and writes no files.

A step is launched kernel by kernel or replayed from a recording; which of the two is chosen once per run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from dear.errors import TrainingError, reason_of
from dear.methods.base import Method
from dear.methods.frozen import Frozen, Loss
from dear.runs.recipe import Line, Recipe
from dear.train.feed import Feed, seeded_generator
from dear.train.frozen import FrozenViews, StepFeed, StepInputs
from dear.train.recording import Inputs, StepRecording, can_record

_log = logging.getLogger("dear")
_LEAST_RECORDED = 50  # steps; a shorter training is not recorded
LOG_EVERY = 10  #: steps between two lines of the log; between them nothing waits for the device

OnStep = Callable[[int, int, Mapping[str, float | int]], None]
"""Called with steps done, steps in all and the last line of the log."""


@dataclass(frozen=True)
class StepParts:
    """The objects that a training step uses."""

    method: Method  #: bound to the backbone it trains with
    feed: Feed
    learned: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler

    def gradients(self, inputs: StepInputs) -> Loss:
        """The loss of a step's inputs; sets the gradients of the learned tensors."""
        loss = self.method.loss_from_frozen(*inputs)
        self.method.backward(loss, self.scaler.scale)
        return loss

    def update(self) -> None:
        """Update the learned tensors."""
        self.scaler.step(self.optimizer)
        self.scaler.update()


class EagerStep:
    """A step launched kernel by kernel."""

    def __init__(self, parts: StepParts, inputs: StepFeed) -> None:
        self.parts, self.inputs = parts, inputs

    def __call__(self, number: int) -> Loss:
        """Take step `number` (from 0); the loss before its update."""
        return self.launch(self.inputs.at(number))

    def launch(self, inputs: StepInputs) -> Loss:
        """A step on these inputs."""
        self.parts.optimizer.zero_grad(set_to_none=True)
        loss = self.parts.gradients(inputs)
        self.parts.update()
        return loss


class RecordedStep(EagerStep):
    """On a GPU: the frozen stage ahead of time for several steps, the rest recorded once and replayed.

    A last batch that is not full is launched kernel by kernel.
    """

    def __init__(self, parts: StepParts, inputs: StepFeed) -> None:
        super().__init__(parts, inputs)
        self.recording: StepRecording | None = None
        self._recordable = True
        self._updates = can_record(parts.optimizer)  # else the update is not part of the recording

    def __call__(self, number: int) -> Loss:
        """Take step `number`; see `EagerStep`."""
        parts, inputs = self.parts, self.inputs.at(number)
        flat = (*inputs.frozen, inputs.labels, inputs.domains)
        full = len(inputs.labels) == parts.feed.recipe.batch
        # The first step is launched, so that the optimizer allocates its state outside of the recording.
        ready = full and self._recordable and (not self._updates or bool(parts.optimizer.state))
        if ready and self.recording is None:
            self.recording = self._record(flat)
        if not full or self.recording is None:
            return self.launch(inputs)
        loss = self.recording(flat)
        if not self._updates:
            parts.update()
        return loss

    def _record(self, inputs: Inputs) -> StepRecording | None:
        """A recording of the step; None if the method cannot be recorded.

        Recording runs the step a few times; random numbers (dropout) go on as if it had not.
        """
        before = torch.cuda.get_rng_state(self.parts.feed.device)
        try:
            return StepRecording(
                self._gradients, inputs, self.parts.learned, self.parts.optimizer if self._updates else None
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._recordable = False
            torch.cuda.synchronize()
            _log.warning(
                "notice: a step of %s cannot be recorded, so training is slower (%s); `dynamic = True` in "
                "its class avoids the attempt",
                self.parts.method.title,
                reason_of(error),
            )
            return None
        finally:
            torch.cuda.set_rng_state(before, self.parts.feed.device)

    def _gradients(self, inputs: Inputs) -> Loss:
        """`StepParts.gradients` of the tensors of a step."""
        x, *others, labels, domains = inputs
        assert x is not None
        assert labels is not None
        return self.parts.gradients(StepInputs(Frozen(x, *others), labels, domains))


def make_step(parts: StepParts, steps: int, remaining: int, views: FrozenViews | None = None) -> EagerStep:
    """The step of a run of `steps` steps: recorded as a CUDA graph where that is possible and saves time.

    `remaining` steps follow; `views` are the frozen stages of all images, if they are known.
    """
    recipe = parts.feed.recipe
    record = (
        recipe.replay
        and not parts.method.dynamic
        and (views is None or recipe.views > 0)
        and parts.feed.device.type == "cuda"
        and not parts.scaler.is_enabled()
        and remaining >= _LEAST_RECORDED
    )
    inputs = StepFeed(parts.method, parts.feed, steps, views, ahead=record)
    return RecordedStep(parts, inputs) if record else EagerStep(parts, inputs)


class Loop:
    """Optimizes a method's learned tensors.

    All randomness is a function of the seed and the step, so the state to continue from is: learned tensors,
    optimizer, step, and the losses since the last line of the log.

    Args:
        method: bound to the backbone to train with; nothing else may change what it is bound to.
        feed: the batches.
        recipe: how to train.
        views: frozen stages of all images, if they are shared; None: computed by the recipe.
    """

    def __init__(self, method: Method, feed: Feed, recipe: Recipe, views: FrozenViews | None = None) -> None:
        if views is None and recipe.views:
            views = FrozenViews(method, feed.images, recipe)
        self.method, self.feed, self.recipe, self.views = method, feed, recipe, views
        self.dtype = method.clip.visual.dtype  # of the backbone's matrices
        self.steps = recipe.epochs * feed.steps_per_epoch
        self.rates = [recipe.rate(step, feed.steps_per_epoch) for step in range(self.steps)]
        self.step = 0
        self.learned = [p for p in method.parameters() if p.requires_grad]
        if not self.learned:
            self.steps = 0
        self.scaler = torch.amp.GradScaler(feed.device.type, enabled=self.dtype == torch.float16)
        self.lines: list[Line] = []
        self._window: list[Tensor] = []  # [1 + parts] a step, on the device
        self._names: tuple[str, ...] = ()
        self._step: EagerStep | None = None  # chosen at the first step

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """Created when it is first needed: a method without steps needs none."""
        return optimizer_of(self.learned, self.recipe, rates_of(self.method))

    def run(
        self,
        progress: OnStep | None = None,
        save: Callable[[], None] | None = None,
        save_every: int = 200,
        stop: Callable[[], bool] | None = None,
    ) -> bool:
        """Train from the current step to the last.

        Args:
            progress: called after every step.
            save: called after every epoch and every `save_every` steps, and before a pause.
            save_every: see `save`.
            stop: called after every step; True pauses.

        Returns:
            Whether training is complete; False: it was stopped.
        """
        per_epoch = self.feed.steps_per_epoch
        devices = [self.feed.device] if self.feed.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            if self.step == 0:
                torch.manual_seed(seeded_generator(self.recipe.seed, "prepare", 0).initial_seed())
                self.method.prepare(StepFeed(self.method, self.feed, self.steps, self.views).batches)
            while self.step < self.steps:
                self._train_step()
                ended = self.step % per_epoch == 0
                if ended or self.step % LOG_EVERY == 0:
                    self._flush()
                if ended:
                    self.method.after_epoch(self.step // per_epoch, self.recipe.epochs)
                if progress is not None:
                    progress(self.step, self.steps, self.lines[-1] if self.lines else {})
                paused = stop is not None and self.step < self.steps and stop()
                if save is not None and (paused or ended or self.step % save_every == 0):
                    self.check()
                    save()
                if paused:
                    return False
            self.method.finish()
        return True

    def _train_step(self) -> None:
        """One step."""
        torch.manual_seed(seeded_generator(self.recipe.seed, "step", self.step).initial_seed())
        rate = self.rates[self.step]
        for group in self.optimizer.param_groups:
            group_rate = rate * group["multiple"]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group_rate)  # in place: a recorded update reads this tensor
            else:
                group["lr"] = group_rate
        if self._step is None:
            parts = StepParts(self.method, self.feed, self.learned, self.optimizer, self.scaler)
            self._step = make_step(parts, self.steps, self.steps - self.step, self.views)
        loss = self._step(self.step)
        self._names = ("loss", *loss.parts)
        self._window.append(torch.stack([loss.total.detach(), *loss.parts.values()]))
        self.step += 1

    def check(self) -> list[list[float]]:
        """Losses since the last line, read from the device: `[steps][1 + parts]`."""
        rows: list[list[float]] = torch.stack(self._window).tolist() if self._window else []
        for number, row in enumerate(rows):
            not_finite = [n for n, value in zip(self._names, row, strict=True) if not math.isfinite(value)]
            if not_finite:
                step = self.step - len(rows) + number + 1
                part = next((n for n in not_finite if n != "loss"), "loss")
                rate = self.rates[step - 1]
                wider = "" if self.dtype == torch.float32 else ", or set its precision to float32"
                raise TrainingError(
                    f"training stopped: {part} is not a finite number at step {step} of {self.steps} "
                    f"(learning rate {rate:g}); lower the recipe's lr{wider}",
                    hint="recipe",
                )
        return rows

    def _flush(self) -> None:
        """Append a line with the mean losses since the last one to the log."""
        rows = self.check()
        if not rows:
            return
        epoch = (self.step - 1) // self.feed.steps_per_epoch + 1
        line: Line = {"step": self.step, "epoch": epoch, "lr": self.rates[self.step - 1]}
        for column, name in enumerate(self._names):
            line[name] = math.fsum(row[column] for row in rows) / len(rows)
        self.lines.append(line)
        self._window.clear()

    def state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The state to resume from: tensors by name, and metadata as text."""
        tensors = {f"method.{name}": t for name, t in self.method.adapter_state().items()}
        for number, entries in self.optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                if value is not None:
                    tensors[f"optimizer.{number}.{key}"] = torch.as_tensor(value)
        if self._window:
            tensors["window"] = torch.stack(self._window)
        if self.scaler.is_enabled():
            state = self.scaler.state_dict()
            tensors["scaler"] = torch.tensor([state["scale"], state["_growth_tracker"]])
        return tensors, {"step": str(self.step), "parts": " ".join(self._names)}

    def restore(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], lines: list[Line]) -> None:
        """Continue from the result of `state`; `lines` is the log, of which later steps are dropped."""
        self.step = int(metadata["step"])
        self._names = tuple(metadata["parts"].split())
        self.lines = [line for line in lines if line["step"] <= self.step]
        adapter = {
            name.removeprefix("method."): t for name, t in tensors.items() if name.startswith("method.")
        }
        self.method.load_adapter_state(adapter, "the saved state")
        entries: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".", 2)
                entries.setdefault(int(number), {})[key] = tensor
        self.optimizer.load_state_dict(
            {"state": entries, "param_groups": self.optimizer.state_dict()["param_groups"]}
        )
        if "window" in tensors:
            self._window = list(tensors["window"].to(self.feed.device))
        if "scaler" in tensors and self.scaler.is_enabled():
            scale, tracker = tensors["scaler"].tolist()
            state = {**self.scaler.state_dict(), "scale": scale, "_growth_tracker": int(tracker)}
            self.scaler.load_state_dict(state)


def rates_of(method: Method) -> list[float]:
    """The learning rate of each learned tensor as a multiple of the recipe's."""
    return [getattr(p, "lr_scale", 1.0) for p in method.parameters() if p.requires_grad]


def optimizer_of(
    learned: list[torch.nn.Parameter], recipe: Recipe, rates: Sequence[float] | None = None
) -> torch.optim.Optimizer:
    """The optimizer of the recipe over the learned tensors.

    `rates` are multiples of the learning rate, one per tensor (None: 1 for all); there is one parameter
    group per multiple, with the key "multiple".
    """
    parameters = learned or [
        torch.nn.Parameter(torch.zeros(0))
    ]  # zero-shot has none, but optimizers need one
    multiples = [1.0] * len(parameters) if rates is None or not learned else list(rates)
    groups = [
        {
            "params": [p for p, m in zip(parameters, multiples, strict=True) if m == multiple],
            "multiple": multiple,
        }
        for multiple in dict.fromkeys(multiples)
    ]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
    if parameters[0].is_cuda:  # one kernel for all tensors, which can be recorded
        for group in groups:
            group["lr"] = torch.tensor(recipe.lr, device=parameters[0].device)
        return torch.optim.AdamW(groups, weight_decay=recipe.weight_decay, fused=True, capturable=True)
    return torch.optim.AdamW(groups, recipe.lr, weight_decay=recipe.weight_decay)
