"""The practitioner's path, one function a command: adapt, evaluate and predict with a run folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dear.clip.factory import load
from dear.clip.images import normalise, open_image, resize_crop
from dear.clip.model import Clip
from dear.clip.tokenizer import clean
from dear.data.open import open_data
from dear.data.pictures import PictureSet, threaded
from dear.data.shots import few_shot
from dear.errors import DataError, TrainingError, UsageError
from dear.heads.roles import RoleMap
from dear.memory import in_batches
from dear.methods import build_method
from dear.methods.base import Method
from dear.train.evaluate import BATCH, Evaluation, evaluate
from dear.train.folder import load_run
from dear.train.loop import Progress
from dear.train.precision import backbone_in
from dear.train.recipe import Recipe
from dear.train.run import Trained, train

PathLike = str | os.PathLike[str]
Picture = PathLike | Image.Image


def pick_device(device: str) -> str:
    """The device that "auto" means: a GPU if there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def check_task(pictures: PictureSet) -> None:
    """Refuse a training set that no classifier can be made from, with a sentence that says why.

    Raises:
        DataError: one class, a class without pictures, or classes that CLIP reads as the same words.
    """
    if len(pictures.classes) < 2:
        raise DataError(
            f"{pictures.name}: has only the class {pictures.classes[0]!r}; a classifier needs at least two"
        )
    counts = torch.bincount(pictures.labels, minlength=len(pictures.classes)).tolist()
    for name, count in zip(pictures.classes, counts, strict=True):
        if count == 0:
            raise DataError(
                f"{pictures.name}: the class {name!r} has no pictures; add some or remove the class"
            )
    read: dict[str, str] = {}
    for name in pictures.classes:
        other = read.setdefault(clean(name), name)
        if other is not name:
            raise DataError(
                f"{pictures.name}: the classes {other!r} and {name!r} are the same words to CLIP, which "
                "ignores case; rename one or merge them"
            )


def adapt(
    data: PathLike | PictureSet,
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
    """Adapt a backbone to a person's own pictures: `dear adapt`.

    Args:
        data: what `open_data` takes (its training split is used), or a picture set.
        out: run folder; None keeps the result in memory.
        method: name of the method.
        backbone: what `dear.load` takes, or a loaded backbone.
        roles: role map or its file, for methods that use roles; None: the backbone's own or Table 2.
        shots: pictures a class to train on; None or 0: all.
        seed: of the draw, the learned tensors' start, the order and the views.
        template: prompt with `{}`; None: the data set's.
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
    pictures = (
        data if isinstance(data, PictureSet) else open_data(data, "train", root=root, template=template)
    )
    check_task(pictures)
    if shots is not None and shots < 0:
        raise UsageError(f"shots = {shots}: ask for at least 1 picture a class, or for all with 0")
    if shots:
        pictures = few_shot(pictures, shots, seed)
    clip = backbone if isinstance(backbone, Clip) else load(backbone, device=pick_device(device))
    if roles is not None and not isinstance(roles, RoleMap):
        roles = RoleMap.load(roles)
    built = build_method(
        method,
        clip,
        pictures.classes,
        roles=roles,
        allow_other_roles=allow_other_roles,
        template=pictures.template if template is None else template,
        seed=seed,
        **(options or {}),
    )
    plan = Recipe.of(built, **{"seed": seed, **(recipe or {})})
    return train(built, pictures, plan, out, resume, progress, stop)


def evaluate_run(
    run: PathLike | Method,
    data: PathLike | PictureSet,
    *,
    split: str = "test",
    backbone: PathLike | Clip | None = None,
    root: PathLike | None = None,
    device: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Accuracy of a run on a labelled set, in every mode: `dear evaluate`."""
    method = run if isinstance(run, Method) else load_run(run, backbone, pick_device(device))
    pictures = data if isinstance(data, PictureSet) else open_data(data, split, root=root)
    return evaluate(method, pictures, progress=progress)


@dataclass(frozen=True)
class Answer:
    """What a method says of one picture: class names with probabilities, likeliest first."""

    picture: str
    classes: tuple[tuple[str, float], ...]


def predict_run(
    run: PathLike | Method,
    pictures: Sequence[Picture],
    *,
    classes: Sequence[str] | None = None,
    template: str | None = None,
    top: int = 5,
    mode: str | None = None,
    backbone: PathLike | Clip | None = None,
    device: str = "auto",
) -> list[Answer]:
    """Answers for pictures, among the run's classes or others: `dear predict`."""
    if top < 1:
        raise UsageError(f"top = {top}: ask for at least one answer a picture")
    method = run if isinstance(run, Method) else load_run(run, backbone, pick_device(device))
    if classes is not None:
        twice = next((name for place, name in enumerate(classes) if name in classes[:place]), None)
        if twice is not None:
            raise UsageError(f"the class {twice!r} is named twice; name it once")
        method = method.with_classes(classes, template)
    best = probabilities(method, pictures, mode).topk(min(top, len(method.classes)), dim=-1)
    return [
        Answer(name_of(p), tuple((method.classes[c], v) for c, v in zip(found, values, strict=True)))
        for p, found, values in zip(pictures, best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def probabilities(method: Method, pictures: Iterable[Picture], mode: str | None = None) -> Tensor:
    """Class probabilities [n, C] of pictures under CLIP's temperature, on the CPU."""
    mode = method.pick_mode(mode)
    items = list(pictures)
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


def views(clip: Clip, pictures: Sequence[Picture]) -> Tensor:
    """CLIP's view of pictures given as files or Pillow images, normalised [n, 3, S, S] on its device."""
    size = clip.config.vision.image_size
    raw = torch.stack(threaded(lambda picture: resize_crop(open_image(picture), size), pictures))
    return normalise(raw.to(clip.device), clip.config.mean, clip.config.std)


def name_of(picture: Picture) -> str:
    """How a picture is called in answers."""
    if isinstance(picture, Image.Image):
        return str(getattr(picture, "filename", "")) or "picture in memory"
    return os.fspath(picture)
