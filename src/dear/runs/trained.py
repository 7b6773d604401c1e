"""A trained method with everything that its run folder holds."""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from dear.calibration.reference import REFERENCE, Reference
from dear.calibration.scales import Calibration
from dear.clip.model import Clip
from dear.errors import UsageError
from dear.methods.base import Method, in_precision
from dear.runs.feature_cache import learned_digest
from dear.runs.folder import (
    load_run,
    locked,
    read_calibration,
    read_config,
    read_log,
    read_metrics,
    write_calibration,
    write_log,
    write_spec,
)
from dear.runs.recipe import Line
from dear.runs.spec import Spec, digest, plain
from dear.utils.files import write_json, write_safetensors

T = TypeVar("T", bound="TrainedRun")


class TrainedRun:
    """What a training left: method, calibration, features of the training images, settings and log.

    Args:
        method: trained or not; it may go on learning, the model answers with what it is at the time.
        calibration: from scores to probabilities; None: CLIP's own temperature.
        reference: features of its training images, to tell images of no class; None: their logits tell them.
        spec: what was trained, for `save`.
        metrics: of the training, for `save`.
        lines: the training's log, for `save`.
        path: the run folder it was read from.
        precision: of the backbone's matrices.
    """

    def __init__(
        self,
        method: Method,
        calibration: Calibration | None = None,
        *,
        reference: Reference | None = None,
        spec: Spec | None = None,
        metrics: dict[str, Any] | None = None,
        lines: list[Line] | None = None,
        path: Path | None = None,
        precision: str = "auto",
    ) -> None:
        self.method = method
        self.calibration = calibration
        self.reference = reference
        self.spec = spec
        self.path = path
        self.precision = precision
        self._metrics, self._lines = metrics, lines

    @classmethod
    def load(
        cls: type[T],
        path: str | os.PathLike[str],
        backbone: Any = None,
        device: str | torch.device = "cpu",
        *,
        allow_other: bool = False,
        precision: str = "auto",
    ) -> T:
        """The model of a finished run folder.

        Args:
            path: the run folder.
            backbone: a `Clip`, or what `dear.load` takes; None: the one the run names.
            device: where to load the backbone.
            allow_other: accept a backbone with other weights of the same shape.
            precision: of the backbone's matrices.

        Raises:
            RunError: the folder holds no finished run, or the backbone or the tensors do not fit it.
        """
        method = load_run(path, backbone, device, allow_other)
        reference = Reference.load(path, method.clip.config.embed_dim)
        return cls(
            method, read_calibration(path), reference=reference, spec=read_config(path), path=Path(path),
            precision=precision,
        )  # fmt: skip

    def save(self, folder: str | os.PathLike[str], **extra: Any) -> None:
        """Leave the run in a folder; `extra` goes into its `config.json`."""
        if self.spec is None:
            raise UsageError("this model was not trained, so there is no run to save")
        with locked(Path(folder)):
            spec = msgspec.structs.replace(self.spec, extra={**self.spec.extra, **plain(extra)})
            write_spec(Path(folder), self.method, spec)
            self.write(Path(folder))

    def write(self, folder: Path) -> None:
        """Write what was learned into a run folder that has its `config.json` and is locked."""
        method = self.method
        write_log(folder, self.lines)
        # One key: safetensors writes several in an order that changes from run to run.
        words = {"dear": f"{method.name} on {method.clip.fingerprint}"}
        write_safetensors(folder / "adapter.safetensors", method.adapter_state(), words)
        write_json(folder / "metrics.json", plain(self.metrics))
        self.write_answers(folder)

    def write_answers(self, folder: Path) -> None:
        """Write the calibration and the features that belong to it; None removes older ones."""
        write_calibration(folder, self.calibration)
        if self.reference is not None:
            self.reference.save(folder)
        else:
            (folder / REFERENCE).unlink(missing_ok=True)

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """What `metrics.json` holds: steps, seconds, evaluations."""
        if self._metrics is not None:
            return self._metrics
        return {"steps": 0} if self.path is None else read_metrics(self.path)

    @cached_property
    def lines(self) -> list[Line]:
        """The training's log."""
        if self._lines is not None:
            return self._lines
        return [] if self.path is None else read_log(self.path)

    @property
    def steps(self) -> int:
        """Training steps."""
        return int(self.metrics["steps"])

    @property
    def seconds(self) -> float:
        """Seconds of training, of all processes that trained it."""
        return float(self.metrics.get("seconds", 0.0))

    @property
    def clip(self) -> Clip:
        """The backbone, with its correction, as it was loaded."""
        return self.method.clip

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, in the order of logits and probabilities."""
        return self.method.classes

    @property
    def template(self) -> str:
        """The sentence around a class name."""
        return self.method.template

    @property
    def modes(self) -> tuple[str, ...]:
        """Ways to predict, the usual one first."""
        return self.method.modes

    @property
    def trained(self) -> tuple[bool, ...]:
        """Whether each class was trained."""
        known = set(self.method.trained_classes)
        return tuple(name in known for name in self.classes)

    @property
    def identity(self) -> str:
        """Changes with anything that decides an answer: backbone, correction, adapter, calibration."""
        found = hashlib.sha256(learned_digest("answers", self.method, *self.classes, self.template))
        calibration = None if self.calibration is None else msgspec.to_builtins(self.calibration)
        found.update(digest(calibration).encode())
        found.update(b"" if self.reference is None else self.reference.digest.encode())
        return f"sha256:{found.hexdigest()}"

    def pick_mode(self, mode: str | None) -> str:
        """The mode that is meant: the usual one for None."""
        return self.method.pick_mode(mode)

    @cached_property
    def bound(self) -> Method:
        """The method on the backbone in the model's precision; it shares everything learned."""
        return in_precision(self.method, self.precision)
