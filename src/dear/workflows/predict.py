"""Answers of a run for images: `dear predict`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dear._io.files import PathLike
from dear._io.image_file import in_batches, normalize, read_views
from dear._io.progress import Progress
from dear.clip.factory import pick_device
from dear.clip.model import Clip
from dear.errors import TrainingError, UsageError
from dear.methods.base import Method, in_precision
from dear.methods.calibration import rejection_score, run_threshold
from dear.runs.evaluate import BATCH
from dear.runs.folder import load_run

ImageLike = PathLike | Image.Image
_CPU_BATCH = 16  # beyond it a CPU's caches overflow: `benchmarks/serve.py threads`


@dataclass(frozen=True)
class Answer:
    """What a method says of one image: class names with probabilities, likeliest first.

    `error` says why an image could not be read; it then has no classes.
    """

    image: str
    classes: tuple[tuple[str, float], ...]
    error: str | None = None
    rejected: bool = False  #: the image is none of the classes; the nearest ones are in `classes`


@dataclass(frozen=True)
class PredictOptions:
    """What is asked of a run.

    Attributes:
        classes: other class names; None: the run's own.
        template: prompt with `{}`; None: the one the run was trained with.
        top: answers per image.
        mode: how to predict; None: the method's usual mode.
        unreadable: "stop" raises at an image that cannot be read, "skip" answers it with an error.
        reject: share of images of trained classes that may be refused (0.05, say), so that images of no class
            are answered with "none of these"; None refuses none.
        add: `classes` are added to the run's own instead of replacing them.
    """

    classes: Sequence[str] | None = None
    template: str | None = None
    top: int = 5
    mode: str | None = None
    unreadable: str = "stop"
    reject: float | None = None
    add: bool = False

    def __post_init__(self) -> None:
        if self.top < 1:
            raise UsageError(f"top = {self.top}: ask for at least one answer per image")
        if self.unreadable not in ("stop", "skip"):
            raise UsageError(f"unreadable images: the policy is stop or skip, not {self.unreadable!r}")


def predict_run(
    run: PathLike | Method,
    images: Sequence[ImageLike],
    options: PredictOptions | None = None,
    *,
    backbone: PathLike | Clip | None = None,
    device: str = "auto",
    progress: Progress | None = None,
    **changes: Any,
) -> list[Answer]:
    """Answers for images, among the run's classes or others.

    The template is the one the run was trained with, for its own classes and for others, unless `template`
    says otherwise.

    Args:
        run: run folder, or a method.
        images: files or Pillow images; `dear._io.image_file.find_images` finds those of folders.
        options: see `PredictOptions`; its fields can also be given by name, as in `top=3`.
        backbone: for a run folder whose backbone moved.
        device: "auto", "cpu", "cuda", ...
        progress: told how many images are done.
        changes: fields of `options`.

    Raises:
        DearError: anything a user can correct, in one sentence.
    """
    asked = replace(options or PredictOptions(), **changes)
    mode = asked.mode
    method = run if isinstance(run, Method) else load_run(run, backbone, pick_device(device))
    method.pick_mode(mode)
    limit = None if asked.reject is None else run_threshold(method, method.pick_mode(mode), asked.reject)
    method = on_classes(method, asked.classes, asked.template, asked.add)
    found, scores, problems = _probabilities(method, images, mode, asked.unreadable == "skip", progress)
    best = found.topk(min(asked.top, len(method.classes)), dim=-1)
    answers = []
    for place, (image, which, values) in enumerate(
        zip(images, best.indices.tolist(), best.values.tolist(), strict=True)
    ):
        if place in problems:
            answers.append(Answer(name_of(image), (), problems[place]))
            continue
        named = tuple((method.classes[c], v) for c, v in zip(which, values, strict=True))
        refused = limit is not None and float(scores[place]) < limit.value
        answers.append(Answer(name_of(image), named, rejected=refused))
    return answers


def on_classes(
    method: Method, classes: Sequence[str] | None, template: str | None, add: bool = False
) -> Method:
    """The method on other classes, with another template, or both; what is None stays as trained.

    With `add`, the classes come to those of the method; one that it has already stays once.

    Raises:
        UsageError: a class is named twice, or the method cannot name other classes.
    """
    if classes is None and template is None:
        return method
    names = method.classes if classes is None else tuple(classes)
    if add and classes is not None:
        names = (*method.classes, *(name for name in names if name not in method.classes))
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise UsageError(f"the class {twice!r} is named twice; name it once")
    return method.with_classes(names, template)


def probabilities(method: Method, images: Iterable[ImageLike], mode: str | None = None) -> Tensor:
    """Class probabilities [n, C] of images, calibrated where the method is, on the CPU."""
    return _probabilities(method, list(images), mode)[0]


def probabilities_and_scores(
    method: Method, images: Iterable[ImageLike], mode: str | None = None
) -> tuple[Tensor, Tensor]:
    """`probabilities`, and the scores [n] that thresholds are compared with."""
    return _probabilities(method, list(images), mode)[:2]


def _probabilities(
    method: Method,
    images: Sequence[ImageLike],
    mode: str | None = None,
    skip: bool = False,
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor, dict[int, str]]:
    """Probabilities [n, C], scores [n], and why some images could not be read, by their place."""
    mode = method.pick_mode(mode)
    parts, scores = [torch.empty(0, len(method.classes))], [torch.empty(0)]
    problems: dict[int, str] = {}
    bound = in_precision(method, "auto")

    def answer(rows: range) -> tuple[Tensor, Tensor]:
        pixels, bad = readable_views(bound.clip, images[rows.start : rows.stop], skip)
        problems.update({rows.start + place: reason for place, reason in bad.items()})
        scaled = bound.calibrated(bound.logits(pixels, mode), mode).float()
        return scaled.softmax(dim=-1).cpu(), rejection_score(bound, scaled, mode).cpu()

    batch = _CPU_BATCH if bound.clip.device.type == "cpu" else BATCH
    for rows, (part, score) in in_batches(answer, len(images), batch):
        parts.append(part)
        scores.append(score)
        if progress is not None:
            progress("images", rows.stop, len(images))
    found = torch.cat(parts)
    broken = [int(row) for row in (~found.isfinite().all(dim=-1)).nonzero() if int(row) not in problems]
    if broken:
        raise TrainingError(
            f"{name_of(images[broken[0]])}: the model's scores are not finite numbers; use float32, or train "
            "it again with a lower lr",
            hint="recipe",
        )
    return found, torch.cat(scores), problems


def readable_views(
    clip: Clip, images: Sequence[ImageLike], skip: bool = False
) -> tuple[Tensor, dict[int, str]]:
    """CLIP's view of images, [n, 3, S, S] on its device, and why some could not be read, by their place.

    With `skip` an image that cannot be read is black; otherwise it raises `InputError`.
    """
    problems: dict[int, str] = {}
    raw = read_views(images, clip.config.view, problems if skip else None)
    return normalize(raw.to(clip.device), clip.config.mean, clip.config.std), problems


def views(clip: Clip, images: Sequence[ImageLike]) -> Tensor:
    """CLIP's view of images given as files or Pillow images, normalized [n, 3, S, S] on its device."""
    return readable_views(clip, images)[0]


def name_of(image: ImageLike) -> str:
    """How an image is called in answers."""
    if isinstance(image, Image.Image):
        return str(getattr(image, "filename", "")) or "image in memory"
    return os.fspath(image)
