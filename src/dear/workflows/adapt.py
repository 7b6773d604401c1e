"""The practitioner's path, one function a command: adapt, evaluate and predict with a run folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dear._io.image_file import open_image
from dear._io.memory import in_batches
from dear._io.pixels import resize_crop
from dear.clip.device import pick_device
from dear.clip.factory import load
from dear.clip.images import normalize
from dear.clip.model import Clip
from dear.clip.tokenizer import clean
from dear.data.images import ImageSet, threaded
from dear.data.open import open_data
from dear.data.shots import few_shot
from dear.errors import DataError, TrainingError, UsageError
from dear.heads.roles import RoleMap
from dear.methods import build_method
from dear.methods.base import Method
from dear.train.evaluate import BATCH, Evaluation, evaluate
from dear.train.folder import load_run
from dear.train.loop import Progress
from dear.train.precision import backbone_in
from dear.train.recipe import Recipe
from dear.train.run import Trained, train

PathLike = str | os.PathLike[str]
ImageLike = PathLike | Image.Image


def check_task(images: ImageSet) -> None:
    """Refuse a training set that no classifier can be made from, with a sentence that says why.

    Raises:
        DataError: one class, a class without images, or classes that CLIP reads as the same words.
    """
    if len(images.classes) < 2:
        raise DataError(
            f"{images.name}: has only the class {images.classes[0]!r}; a classifier needs at least two"
        )
    counts = torch.bincount(images.labels, minlength=len(images.classes)).tolist()
    for name, count in zip(images.classes, counts, strict=True):
        if count == 0:
            raise DataError(f"{images.name}: the class {name!r} has no images; add some or remove the class")
    read: dict[str, str] = {}
    for name in images.classes:
        other = read.setdefault(clean(name), name)
        if other is not name:
            raise DataError(
                f"{images.name}: the classes {other!r} and {name!r} are the same words to CLIP, which "
                "ignores case; rename one or merge them"
            )


def adapt(
    data: PathLike | ImageSet,
    out: PathLike | None = None,
    *,
    method: str = "dear",
    backbone: PathLike | Clip = "mini",
    roles: PathLike | RoleMap | None = None,
    shots: int | None = 16,
    seed: int = 1,
    template: str | None = None,
    root: PathLike | None = None,
    device: str = "auto",
    resume: bool = False,
    recipe: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    allow_other_roles: bool = False,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> Trained:
    """Adapt a backbone to a person's own images: `dear adapt`.

    Args:
        data: what `open_data` takes (its training split is used), or an image set.
        out: run folder; None keeps the result in memory.
        method: name of the method.
        backbone: what `dear.load` takes, or a loaded backbone.
        roles: role map or its file, for methods that use roles; None: the backbone's own or Table 2.
        shots: images a class to train on; None or 0: all.
        seed: of the draw, the learned tensors' start, the order and the views.
        template: prompt with `{}`; None: the dataset's.
        root: folder of the benchmarks, for a benchmark name.
        device: "auto", "cpu", "cuda", …
        resume: continue an interrupted run in `out`.
        recipe: changes to the method's recipe (epochs, batch, lr, …).
        options: the method's own options.
        allow_other_roles: accept a role map made on other weights.
        progress: told after every step.
        stop: asked after every step; True stops.

    Raises:
        DearError: anything a user can mend, in one sentence.
    """
    images = data if isinstance(data, ImageSet) else open_data(data, "train", root=root, template=template)
    check_task(images)
    if shots is not None and shots < 0:
        raise UsageError(f"shots = {shots}: ask for at least 1 image a class, or for all with 0")
    if shots:
        images = few_shot(images, shots, seed)
    clip = backbone if isinstance(backbone, Clip) else load(backbone, device=pick_device(device))
    if roles is not None and not isinstance(roles, RoleMap):
        roles = RoleMap.load(roles)
    built = build_method(
        method,
        clip,
        images.classes,
        roles=roles,
        allow_other_roles=allow_other_roles,
        template=images.template if template is None else template,
        seed=seed,
        **(options or {}),
    )
    plan = Recipe.of(built, **{"seed": seed, **(recipe or {})})
    return train(built, images, plan, out, resume, progress, stop)


def evaluate_run(
    run: PathLike | Method,
    data: PathLike | ImageSet,
    *,
    split: str = "test",
    backbone: PathLike | Clip | None = None,
    root: PathLike | None = None,
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Accuracy of a run on a labeled set, in every mode: `dear evaluate`."""
    method = run if isinstance(run, Method) else load_run(run, backbone, pick_device(device))
    images = data if isinstance(data, ImageSet) else open_data(data, split, root=root)
    return evaluate(method, images, progress=progress)


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
    """Answers for images, among the run's classes or others: `dear predict`."""
    if top < 1:
        raise UsageError(f"top = {top}: ask for at least one answer an image")
    method = run if isinstance(run, Method) else load_run(run, backbone, pick_device(device))
    if classes is not None:
        twice = next((name for place, name in enumerate(classes) if name in classes[:place]), None)
        if twice is not None:
            raise UsageError(f"the class {twice!r} is named twice; name it once")
        method = method.with_classes(classes, template)
    best = probabilities(method, images, mode).topk(min(top, len(method.classes)), dim=-1)
    return [
        Answer(name_of(p), tuple((method.classes[c], v) for c, v in zip(found, values, strict=True)))
        for p, found, values in zip(images, best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def probabilities(method: Method, images: Iterable[ImageLike], mode: str | None = None) -> Tensor:
    """Class probabilities [n, C] of images under CLIP's temperature, on the CPU."""
    mode = method.pick_mode(mode)
    items = list(images)
    parts = [torch.empty(0, len(method.classes))]

    def answer(rows: range) -> Tensor:
        pixels = views(method.clip, items[rows.start : rows.stop])
        return method.logits(pixels, mode).softmax(dim=-1).float().cpu()

    with backbone_in(method, "auto"):
        for _, part in in_batches(answer, len(items), BATCH):
            parts.append(part)
    found = torch.cat(parts)
    if not bool(found.isfinite().all()):
        first = int((~found.isfinite().all(dim=-1)).nonzero()[0])
        raise TrainingError(
            f"{name_of(items[first])}: the model's scores are not finite numbers; use float32, or train it "
            "again with a lower lr"
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
