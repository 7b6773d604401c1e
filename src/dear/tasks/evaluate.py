"""Accuracy on labeled images, of a run or of the frozen backbone: `dear evaluate`, `dear zeroshot`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dear.calibration.calibration import Threshold
from dear.calibration.temperature import auroc
from dear.clip.model import Clip
from dear.data import halves
from dear.data.duplicates import find_duplicates
from dear.data.images import TEMPLATE, ImageSet, even_subset, targets_of
from dear.data.inputs import is_frame
from dear.data.open import HELD_OUT_SPLIT, open_data
from dear.data.texts import read_texts, resolve_texts
from dear.errors import DataError, DiskError, RunError, UsageError
from dear.heads.roles import RoleMap
from dear.methods import build_method
from dear.methods.texts import ClassTexts
from dear.runs.class_lists import ADD, combine_classes, split_class_list
from dear.runs.evaluation import Evaluation, Rejection, share_interval
from dear.runs.folder import add_metrics
from dear.runs.model import Model, Run
from dear.runs.predictions import Predictions
from dear.runs.several_labels import SeveralLabelsEvaluation
from dear.shortcuts.without import Without, remove_concepts
from dear.tasks.load import load_backbone, load_model
from dear.tasks.predict import predict
from dear.tasks.retrieve import gallery_of
from dear.utils.files import PathLike
from dear.utils.notices import warn
from dear.utils.progress import Progress

MEAN_PRECISION = "mean average precision"  #: what stands for accuracy where images have several labels
MOST_IMAGES = 1000  #: held-out images that are answered after training, at most


def evaluate(
    run: Run,
    data: PathLike | ImageSet,
    *,
    mode: str | None = None,
    data_root: PathLike | None = None,
    split: str = "test",
    margin: float | None = None,
    template: str | None = None,
    unreadable: str = "stop",
    unknown: PathLike | ImageSet | None = None,
    reject_share: float = 0.05,
    backbone: PathLike | Clip | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> Evaluation:
    """Accuracy of a run on a labeled set, in every mode.

    Classes that the run does not know are named with the template it was trained with, unless `template` is
    set. Features of image files come from the user's cache where they are known. A run folder keeps the
    figures in its `metrics.json`.

    Args:
        run: run folder, archive, `hf://owner/name`, method or model.
        data: what `open_data` takes, or an image set.
        mode: the mode of the report, checked before any work; None: the method's usual one.
        data_root: folder of the benchmarks, for the name of a benchmark.
        split: which images of `data`: "train", "test", "val" or "all".
        margin: added to every box of the data on each side, as a fraction of the box; None: as in training.
        template: prompt with `{}` for every class; None: the one the run was trained with.
        unreadable: "stop" refuses a set with images that cannot be read, "skip" leaves them out.
        unknown: images of none of the run's classes (a folder, a table, a benchmark, `world:NAME`, or a set,
            labels do not matter): also measure how well they are rejected.
        reject_share: share of images of known classes that may be rejected.
        backbone: for a run whose backbone moved.
        device: "auto", "cpu", "cuda", …
        progress: called with ("images", images done, images in all).

    Raises:
        DearError: anything a user can correct.

    Example:
        >>> evaluate("run", "photos/").accuracy                 # doctest: +SKIP
        {'fused': 0.81, 'decoupled': 0.79}
    """
    model = load_model(run, backbone, device).with_classes(template=template)
    mode = model.pick_mode(mode)
    boxes = margin if margin is not None else 0.0 if model.spec is None else model.spec.margin
    images = data if isinstance(data, ImageSet) else open_data(data, split, root=data_root, margin=boxes)
    if unknown is not None and model.method.several:
        raise UsageError("unknown: needs a run with one label per image; an empty set is 'none of these'")
    limit = None if unknown is None else _known_threshold(model, images.classes, reject_share, mode)
    evaluation = model.evaluate(
        images, scores=unknown is not None, unreadable=unreadable, cached=True, progress=progress
    )
    evaluation = replace(evaluation, mode=mode, title=f"{model.method.title} on {images.name}")
    if unknown is not None and limit is not None:
        outside = model.scores(gallery_of(unknown, data_root), mode, progress=progress)
        rejection = _rejection(evaluation, outside.float(), limit, reject_share)
        evaluation = replace(evaluation, rejection=rejection)
    if isinstance(run, str | os.PathLike) and (Path(run) / "config.json").is_file():
        name = os.fspath(data) if isinstance(data, str | os.PathLike) else images.name
        _add_to_metrics(run, f"evaluation of {name} ({split})", evaluation)
    return evaluation


def _add_to_metrics(run: PathLike, key: str, evaluation: Evaluation) -> None:
    values = evaluation.to_dict()
    figures = {"accuracy": values["modes"], "images": values["images"], "ece": values["ece"]}
    if isinstance(evaluation, SeveralLabelsEvaluation):
        figures["measure"] = MEAN_PRECISION
    try:
        add_metrics(run, **{key: figures})
    except (DiskError, RunError) as error:
        warn(f"not added to the metrics of the run: {error}")


def zeroshot(
    data: PathLike | ImageSet | Sequence[Any],
    classes: str | Sequence[str] | None = None,
    *,
    backbone: PathLike | Clip = "mini",
    data_root: PathLike | None = None,
    split: str = "test",
    margin: float = 0.0,
    template: str | None = None,
    texts: PathLike | Mapping[str, Any] | None = None,
    ensemble: bool = False,
    half: str = "all",
    without: str | Sequence[str] | Without | None = None,
    way: str = "auto",
    examples: PathLike | Mapping[str, PathLike] | Sequence[str] | None = None,
    roles: PathLike | RoleMap | None = None,
    unreadable: str = "stop",
    top: int = 5,
    device: str = "auto",
    progress: Progress | None = None,
) -> Evaluation | Predictions:
    """What a frozen backbone answers, without any training.

    Without `classes`, `data` is a labeled set, and the result is its accuracy. With `classes`, every image of
    `data` is answered with one of them; no labels are needed.

    Args:
        data: what `open_data` takes, or an image set; with `classes` also an image, a folder, or a list of
            images.
        classes: names, or a text with commas; None: those of the labeled set.
        backbone: what `load` takes, or a loaded backbone.
        data_root: folder of the benchmarks, for the name of a benchmark.
        split: which images of a labeled set: "train", "test", "val" or "all".
        margin: added to every box of the data on each side, as a fraction of the box.
        template: prompt with `{}`; None: the dataset's, or "a photo of a {}."
        texts: several texts per class, averaged: a JSON file or a mapping `{class: [sentence, …]}`; None: the
            column `texts` of the data where it has one.
        ensemble: average several prompts per class.
        half: "all" classes, or the "base" (first) or "novel" (second) half of a labeled set.
        without: concepts to remove, as measured on the training split of the labeled set.
        way: how they are removed; "auto" chooses.
        examples: images that show the values of the concept to remove.
        roles: role map, for removal by heads.
        unreadable: "stop" raises at an image that cannot be read, "skip" leaves it out.
        top: classes per image, with `classes`.
        device: "auto", "cpu", "cuda", …
        progress: called with ("images", images done, images in all).

    Returns:
        `Evaluation` of a labeled set; `Predictions` with `classes`.

    Raises:
        DearError: anything a user can correct.

    Example:
        >>> from PIL import Image
        >>> zeroshot([Image.new("RGB", (64, 64), "red")], "something red, something blue").labels
        ['something red']
    """
    if half not in ("all", "base", "novel"):
        raise UsageError(f"half must be all, base or novel, got {half!r}")
    if not without and roles is not None:
        raise UsageError("roles needs without, the concept to remove by heads")
    if not without and (examples is not None or way != "auto"):
        raise UsageError("way and examples need without, the concept or property to remove")
    if classes is not None and (without or half != "all"):
        raise UsageError("without and half are for a labeled set; leave them out, or leave out classes")
    removal = Without.of(without, way, examples) if without else None
    listed = None if texts is None else read_texts(texts)
    if classes is not None:
        names = split_class_list(classes) if isinstance(classes, str) else list(classes)
        added = next((name for name in names if name.startswith(ADD)), None)
        if added is not None:
            raise UsageError(
                f"classes: zeroshot has no trained classes to add {added!r} to; list every class"
            )
        combine_classes(names, ())
        prompt = template or TEMPLATE
        class_texts = _class_texts(listed, names, prompt)
        clip = load_backbone(backbone, device)
        method = build_method("zeroshot", clip, names, template=prompt, texts=class_texts, ensemble=ensemble)
        return predict(method, data, top=top, unreadable=unreadable, progress=progress)
    if isinstance(data, ImageSet):
        images = data
    elif isinstance(data, str | os.PathLike) or is_frame(data):
        images = open_data(data, split, root=data_root, template=template, margin=margin)
    else:
        raise UsageError("a list of images has no labels; name the classes to choose from with classes")
    if half != "all":
        images = images.select_classes(halves(images.classes)[half == "novel"])
    prompt = template or images.template
    class_texts = _class_texts(listed or getattr(images, "texts", None), images.classes, prompt)
    clip = load_backbone(backbone, device)
    if removal is not None:
        if isinstance(data, ImageSet):
            raise UsageError("without is measured on a training split; name a folder, a table or a benchmark")
        clip = remove_concepts(
            clip, open_data(data, "train", root=data_root, template=template), removal, roles
        ).clip
    several = targets_of(images) is not None
    method = build_method(
        "zeroshot",
        clip,
        images.classes,
        template=prompt,
        texts=class_texts,
        several=several,
        ensemble=ensemble,
    )
    evaluation = Model(method).evaluate(images, unreadable=unreadable, cached=True, progress=progress)
    note = "" if clip.correction is None else clip.correction.note
    title = f"{clip.name} on {images.name}, zero-shot{note and f', without {note}'}"
    return replace(evaluation, title=title, removed=note)


def _class_texts(
    texts: Mapping[str, Sequence[str]] | None, classes: Sequence[str], template: str
) -> ClassTexts:
    return ClassTexts(resolve_texts(texts, classes, template) if texts else {})


@dataclass(frozen=True)
class HeldOutAccuracy:
    """Accuracy on images that were not trained on, as fractions of 1."""

    images: int  #: how many images were answered
    available: int  #: how many held-out images there are, copies counted once
    before: float  #: accuracy of the frozen backbone (zero-shot)
    after: dict[str, float]  #: accuracy of the adapted model, by mode
    measure: str = "accuracy"  #: or `MEAN_PRECISION`, of a run with several labels
    copies: int = 0  #: copies of other held-out images, which are not counted


def open_held_out(data: PathLike | Any, root: PathLike | None = None, margin: float = 0.0) -> ImageSet | None:
    """The images that a training on a dataset holds out, or None where it holds out none."""
    try:
        images = open_data(data, HELD_OUT_SPLIT, root=root, margin=margin)
    except DataError:
        return None
    return images if len(images) else None


def held_out_accuracy(run: Run, images: ImageSet, progress: Progress | None = None) -> HeldOutAccuracy:
    """Accuracy before and after, on at most `MOST_IMAGES` images spread evenly over the set.

    Of copies of an image one counts; images that cannot be read are left out.
    """
    distinct = find_duplicates(images).distinct(images.labels.tolist())
    copies, images = len(images) - len(distinct), images.subset(distinct)
    some = even_subset(images, MOST_IMAGES)
    model = Model.of(run)
    before, after = (
        one.evaluate(some, unreadable="skip", cached=True, progress=progress)
        for one in (model.zero_shot(), model)
    )
    counts = len(before.labels), len(images)
    if isinstance(before, SeveralLabelsEvaluation) and isinstance(after, SeveralLabelsEvaluation):
        figures = before.mean_precision["default"], after.mean_precision
        return HeldOutAccuracy(*counts, *figures, measure=MEAN_PRECISION, copies=copies)
    return HeldOutAccuracy(*counts, before.accuracy["default"], after.accuracy, copies=copies)


def _known_threshold(model: Model, classes: Sequence[str], share: float, mode: str) -> Threshold:
    """The rejection threshold, where all classes were trained."""
    other = next((name for name in classes if name not in model.classes), None)
    if other is not None:
        raise UsageError(
            f"rejection is measured on images of trained classes only; the class {other!r} was not trained"
        )
    return model.calibrator.threshold(share, model.pick_mode(mode))


def _rejection(known: Evaluation, outside: Tensor, limit: Threshold, share: float) -> Rejection:
    """Compare the scores [m] of images of no class with those of known images [n]."""
    if known.scores is None:
        raise UsageError("the run has no calibration, so it cannot reject images", hint="calibrate")
    inside = known.scores[known.pick(None)].float()
    accepted = int((outside >= limit.value).sum())
    low, high = share_interval(accepted, len(outside))
    promised = limit.among(len(inside))
    return Rejection(
        auroc=auroc(inside, outside),
        refused=float((inside < limit.value).double().mean()),
        refused_low=promised[0],
        refused_high=promised[1],
        false_acceptance=accepted / len(outside),
        false_low=low,
        false_high=high,
        known=len(inside),
        unknown=len(outside),
        share=share,
    )
