"""A labeling session: which image comes next, what the model takes it for, and how far the labels lead.

Answers go to an `AnswerFile` before anything else happens. After every few answers a worker thread trains the
probe again, chooses the next images, and then forecasts what more labels would bring; questions are answered
from what is there meanwhile.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dear.clip.model import Clip
from dear.data.duplicates import Duplicates, find_duplicates
from dear.data.images import TEMPLATE, ImageSet
from dear.data.names import readable
from dear.errors import InputError
from dear.runs.class_lists import find_twins
from dear.tasks.labeling.answers import Answer, AnswerFile, Kind
from dear.tasks.labeling.learn import Learned, describe_forecast, forecast_more, learn
from dear.tasks.labeling.next import counts_of, text_features
from dear.unlabeled import UNLABELED

BATCH = 5  #: answers after which the probe is trained again
GROUP = 12  #: similar images that are confirmed at once
LEAST_CONFIDENCE = 0.5  #: of a guess that is offered in a group
LEASE = 120.0  #: seconds for which an image that a tab shows is not shown in another


@dataclass
class _Tab:
    """What one browser tab did and shows."""

    history: list[list[str]] = field(default_factory=list)  #: paths of its answers
    shown: dict[int, float] = field(default_factory=dict)  #: places, and until when no other tab shows them


class LabelingSession:
    """The state behind a labeling page.

    Args:
        images: the images to label, all readable.
        features: their unit features [n, E], on the CPU.
        clip: reads class names.
        file: where answers go.
        classes: names to start with; those of the file are added.
        template: prompt with `{}`.
        pool: how the user names the images, for the final command.
        backbone: how the user names the backbone, for the final command.

    Raises:
        InputError: two classes are the same words to CLIP.
    """

    def __init__(
        self,
        images: ImageSet,
        features: Tensor,
        clip: Clip,
        file: AnswerFile,
        classes: Sequence[str] = (),
        template: str = TEMPLATE,
        pool: str = "",
        backbone: str = "",
    ) -> None:
        self.images, self.features, self.clip, self.file = images, features, clip, file
        self.template, self.pool, self.backbone = template, pool, backbone
        self.paths = tuple(images.key(index) for index in range(len(images)))
        self._place = {path: index for index, path in enumerate(self.paths)}
        self._lock = threading.RLock()
        self._tabs: dict[str, _Tab] = {}
        self._learned = Learned()
        self._wake, self._idle = threading.Event(), threading.Event()
        self._closed = False
        self._texts: dict[str, Tensor] = {}
        self.answers = file.read()
        new = [name for name in dict.fromkeys(map(readable, classes)) if name not in self.answers.classes]
        self._check_classes((*self.answers.classes, *new))
        if new:
            self._write([Answer("", "class", name) for name in new])
        self._train()
        self._worker = threading.Thread(target=self._work, name="labeling", daemon=True)
        self._wake.set()
        self._worker.start()

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order in which they appeared."""
        return self.answers.classes

    def close(self) -> None:
        """End the worker."""
        self._closed = True
        self._wake.set()
        self._worker.join(timeout=60)

    def wait(self, seconds: float = 60) -> bool:
        """Wait until the worker has nothing to do."""
        return self._idle.wait(seconds)

    def answer(self, places: Sequence[int], kind: Kind, label: str = "", tab: str = "") -> None:
        """Record an answer about some images; it is on disk when this returns.

        Raises:
            InputError: a place or a class does not exist, or the kind needs a label.
        """
        for place in places:
            if not 0 <= place < len(self.paths):
                raise InputError(f"image must be from 0 to {len(self.paths) - 1}, got {place}")
        if kind not in ("label", "skip", "none", "checked") or not places:
            raise InputError(f"kind must be label, skip, none or checked with at least 1 image, got {kind!r}")
        if kind == "label" and label not in self.classes:
            raise InputError(f"label must be one of the classes, got {label!r}; add the class first")
        paths = [self.paths[place] for place in places]
        with self._lock:
            before = len(self.answers.labels)
            self._write([Answer(path, kind, label if kind == "label" else "") for path in paths])
            self._tab(tab).history.append(paths)
            self._tab(tab).shown.clear()
            if len(self.answers.labels) >= self._learned.labels + BATCH or before == 0:
                self._retrain()

    def undo(self, tab: str = "") -> int | None:
        """Take back the last answer of a tab; the place of its first image, None where there is none."""
        with self._lock:
            history = self._tab(tab).history
            if not history:
                return None
            paths = history.pop()
            self._write([Answer(path, "undo") for path in paths])
            return self._place[paths[0]]

    def add_class(self, name: str) -> str:
        """Add a class and return its name as it is shown.

        Raises:
            InputError: the name is empty, or CLIP reads it as an existing one.
        """
        name = readable(name)
        with self._lock:
            self._check_classes((*self.classes, name))
            self._write([Answer("", "class", name)])
            self._retrain()
        return name

    def state(self, tab: str = "", mode: str = "one", place: int | None = None) -> dict[str, Any]:
        """Everything that the page shows, with the next image, group or suspect for a tab.

        Args:
            tab: the browser tab; images that it shows are not shown to others for two minutes.
            mode: "one" image, a "group" of similar images, or "check" labels that look wrong.
            place: the image to show instead of the next one.
        """
        with self._lock:
            if place is not None and not 0 <= place < len(self.paths):
                raise InputError(f"image must be from 0 to {len(self.paths) - 1}, got {place}")
            if mode not in ("one", "group", "check"):
                raise InputError(f"mode must be one, group or check, got {mode!r}")
            if mode == "group":
                item: dict[str, Any] | None = self._group(tab)
            elif mode == "check":
                item = self._suspect(tab)
            else:
                item = self._one(tab, place)
            counts = counts_of(self.answers.labels, self.classes)
            return {
                "classes": [{"name": name, "labels": counts[name]} for name in self.classes],
                "images": len(self.paths),
                "labels": len(self.answers.labels),
                "none": len(self.answers.none),
                "skipped": len(self.answers.skipped),
                "suspects": len(self._suspects()),
                "training": not self._idle.is_set(),
                "seconds": round(self._learned.seconds, 2),
                "forecast": describe_forecast(
                    self._learned.forecast, [name for name, count in counts.items() if not count]
                ),
                "command": self.command(),
                "mode": mode,
                "item": item,
            }

    def command(self) -> str:
        """The command that trains the final method."""
        words = ["dear", "adapt", "--data", str(self.file.path), "--data-root", self.pool]
        words += ["--unlabeled", self.pool, "--backbone", self.backbone, "--out", "run"]
        return " ".join(shlex.quote(word) for word in words)

    # Questions

    def _one(self, tab: str, place: int | None) -> dict[str, Any] | None:
        if place is None:
            free = (index for index in self._learned.queue if self._is_free(index, tab))
            place = next(free, None)
        if place is None:
            place = next((index for index in range(len(self.paths)) if self._is_free(index, tab)), None)
        if place is None:
            return None
        self._lease(tab, [place])
        return {"place": place, "path": self.paths[place], "guesses": self._guesses(place)}

    def _group(self, tab: str) -> dict[str, Any] | None:
        """Unanswered images with the same confident guess, of the class with the fewest labels first."""
        learned = self._learned
        if learned.probabilities is None:
            return None
        confidence, best = learned.probabilities.max(dim=1)
        counts = counts_of(self.answers.labels, self.classes)
        order = sorted(range(len(learned.classes)), key=lambda column: counts[learned.classes[column]])
        for column in order:
            rows = ((best == column) & (confidence >= LEAST_CONFIDENCE)).nonzero()[:, 0]
            rows = rows[confidence[rows].argsort(descending=True, stable=True)]
            free = [row for row in rows.tolist() if self._is_free(row, tab)][:GROUP]
            if len(free) > 1:
                self._lease(tab, free)
                shown = [
                    {"place": row, "path": self.paths[row], "confidence": round(float(confidence[row]), 3)}
                    for row in free
                ]
                return {"label": learned.classes[column], "images": shown}
        return None

    def _suspects(self) -> list[tuple[int, str, float]]:
        labels, checked = self.answers.labels, self.answers.checked
        return [
            suspect
            for suspect in self._learned.suspects
            if self.paths[suspect[0]] not in checked
            and labels.get(self.paths[suspect[0]], suspect[1]) != suspect[1]
        ]

    def _suspect(self, tab: str) -> dict[str, Any] | None:
        for place, suggestion, confidence in self._suspects():
            path = self.paths[place]
            return {
                "place": place,
                "path": path,
                "label": self.answers.labels[path],
                "guesses": [[suggestion, round(confidence, 3)]],
            }
        return None

    def _guesses(self, place: int) -> list[list[Any]]:
        learned = self._learned
        if learned.probabilities is None:
            return []
        values, columns = learned.probabilities[place].topk(min(3, len(learned.classes)))
        pairs = zip(columns.tolist(), values.tolist(), strict=True)
        return [[learned.classes[column], round(value, 3)] for column, value in pairs]

    def _is_free(self, place: int, tab: str) -> bool:
        path, now = self.paths[place], time.monotonic()
        answered = path in self.answers.labels or path in self.answers.none or path in self.answers.skipped
        others = (other for name, other in self._tabs.items() if name != tab)
        return not answered and not any(other.shown.get(place, 0.0) > now for other in others)

    def _lease(self, tab: str, places: Sequence[int]) -> None:
        until = time.monotonic() + LEASE
        self._tab(tab).shown = dict.fromkeys(places, until)

    def _tab(self, name: str) -> _Tab:
        return self._tabs.setdefault(name, _Tab())

    def _write(self, answers: Sequence[Answer]) -> None:
        self.file.add(answers)
        self.answers = self.file.read()  # with the answers of other processes

    def _check_classes(self, names: Sequence[str]) -> None:
        twins = find_twins(tuple(names))
        if twins is not None:
            raise InputError(f"classes must differ for CLIP, got {twins[0]!r} and {twins[1]!r}")

    # The worker

    def _retrain(self) -> None:
        self._idle.clear()
        self._wake.set()

    def _work(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._closed:
                return
            self._idle.clear()
            self._train()
            if not self._wake.is_set():  # new labels are learned first
                self._forecast()
            if not self._wake.is_set():
                self._idle.set()

    @cached_property
    def _copies(self) -> Duplicates:
        """Copies among the images, which the worker searches once."""
        return find_duplicates(self.images)

    def _current_labels(self) -> tuple[tuple[str, ...], Tensor, Tensor | None]:
        """Class names, labels [n] and text features [C, E] at this moment."""
        with self._lock:
            names, answers = self.classes, self.answers
        for name in names:
            if name not in self._texts:
                texts = text_features(self.clip, [name], self.template)
                assert texts is not None
                self._texts[name] = texts[0]
        labels = torch.full((len(self.paths),), UNLABELED, dtype=torch.int64)
        for path, name in answers.labels.items():
            if path in self._place and name in names:
                labels[self._place[path]] = names.index(name)
        return names, labels, torch.stack([self._texts[name] for name in names]) if names else None

    def _train(self) -> None:
        """Train the probe and choose the next images."""
        began = time.monotonic()
        names, labels, texts = self._current_labels()
        with self._lock:
            unusable = self.answers.none | self.answers.skipped
        exclude = torch.tensor([path in unusable for path in self.paths])
        learned = learn(self.features, labels, names, texts, exclude, self._copies.units)
        with self._lock:
            self._learned = replace(
                learned, forecast=self._learned.forecast, seconds=time.monotonic() - began
            )

    def _forecast(self) -> None:
        """Cross-validate the probe, and forecast the gain of more labels."""
        _, labels, texts = self._current_labels()
        forecast = forecast_more(self.features, labels, texts, self._copies.units)
        if forecast is None:
            return
        with self._lock:
            self._learned = replace(self._learned, forecast=forecast)
