"""Answers of a run for images: `dear predict`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from dear._io.image_file import open_image
from dear._io.memory import in_batches
from dear._io.pixels import resize_crop
from dear.clip.device import pick_device
from dear.clip.images import normalize
from dear.clip.model import Clip
from dear.data.images import threaded
from dear.errors import TrainingError, UsageError
from dear.methods.base import Method
from dear.train.evaluate import BATCH
from dear.train.folder import load_run
from dear.train.precision import in_precision
from dear.workflows.options import PathLike

ImageLike = PathLike | Image.Image


@dataclass(frozen=True)
class Answer:
    """What a method says of one image: class names with probabilities, likeliest first."""

    image: str
    classes: tuple[tuple[str, float], ...]


def predict_run(
    run: PathLike | Method,
    images: Sequence[ImageLike],
    *,
    classes: Sequence[str] | None = None,
    template: str | None = None,
    top: int = 5,
    mode: str | None = None,
    backbone: PathLike | Clip | None = None,
    device: str = "auto",
) -> list[Answer]:
    """Answers for images, among the run's classes or others.

    The template is the one the run was trained with, for its own classes and for others, unless `template`
    says otherwise.
    """
    if top < 1:
        raise UsageError(f"top = {top}: ask for at least one answer per image")
    method = run if isinstance(run, Method) else load_run(run, backbone, pick_device(device))
    method.pick_mode(mode)
    method = on_classes(method, classes, template)
    best = probabilities(method, images, mode).topk(min(top, len(method.classes)), dim=-1)
    return [
        Answer(name_of(p), tuple((method.classes[c], v) for c, v in zip(found, values, strict=True)))
        for p, found, values in zip(images, best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def on_classes(method: Method, classes: Sequence[str] | None, template: str | None) -> Method:
    """The method on other classes, with another template, or both; what is None stays as trained.

    Raises:
        UsageError: a class is named twice, or the method cannot name other classes.
    """
    if classes is None and template is None:
        return method
    names = method.classes if classes is None else classes
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise UsageError(f"the class {twice!r} is named twice; name it once")
    return method.with_classes(names, template)


def probabilities(method: Method, images: Iterable[ImageLike], mode: str | None = None) -> Tensor:
    """Class probabilities [n, C] of images under CLIP's temperature, on the CPU."""
    mode, method = method.pick_mode(mode), in_precision(method, "auto")
    items = list(images)
    parts = [torch.empty(0, len(method.classes))]

    def answer(rows: range) -> Tensor:
        pixels = views(method.clip, items[rows.start : rows.stop])
        return method.logits(pixels, mode).softmax(dim=-1).float().cpu()

    for _, part in in_batches(answer, len(items), BATCH):
        parts.append(part)
    found = torch.cat(parts)
    if not bool(found.isfinite().all()):
        first = int((~found.isfinite().all(dim=-1)).nonzero()[0])
        raise TrainingError(
            f"{name_of(items[first])}: the model's scores are not finite numbers; use float32, or train it "
            "again with a lower lr",
            hint="recipe",
        )
    return found


def views(clip: Clip, images: Sequence[ImageLike]) -> Tensor:
    """CLIP's view of images given as files or Pillow images, normalized [n, 3, S, S] on its device."""
    size = clip.config.vision.image_size
    raw = torch.stack(threaded(lambda image: resize_crop(open_image(image), size), images))
    return normalize(raw.to(clip.device), clip.config.mean, clip.config.std)


def name_of(image: ImageLike) -> str:
    """How an image is called in answers."""
    if isinstance(image, Image.Image):
        return str(getattr(image, "filename", "")) or "image in memory"
    return os.fspath(image)
