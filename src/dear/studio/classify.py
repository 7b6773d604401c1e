"""The Classify tab: the likeliest classes of images, "none of these", and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from dear.data.batches import image_set, pixels_for
from dear.errors import InputError, UsageError
from dear.images.open import MAX_PIXELS, open_image
from dear.images.views import square
from dear.methods.frozen import Frozen
from dear.methods.zeroshot import ZeroShot
from dear.report.page import render, thumbnail
from dear.runs.class_lists import resolve_classes, split_class_list
from dear.runs.model import Logits, Model
from dear.runs.ranking import Ranking
from dear.studio.state import StudioState
from dear.tasks.explain.page import apply_view, explanation_values, heatmap
from dear.tasks.explain.regions import where
from dear.tasks.explain.task import explainer_of, reference_images

Named = tuple[str, Image.Image]  #: an image with its name
Ranked = tuple[tuple[str, float], ...]  #: class names with probabilities, likeliest first

MOST_IMAGES, MOST_CLASSES = 24, 1000
REJECT = 0.05  #: share of images of trained classes that may be rejected, by default
MORE_LABELS = 3  #: labels that are not answered, shown with their probabilities
BEFORE = "before training"  #: the answer of the frozen backbone


@dataclass(frozen=True)
class Verdict:
    """The answers for one image."""

    name: str  #: of the image
    image: Image.Image
    #: mode of the model, or `BEFORE` -> (class, probability), likeliest first; the usual mode comes first
    answers: Mapping[str, Ranked]
    rejected: tuple[str, ...] = ()  #: modes for which the image is none of the classes
    labels: tuple[str, ...] | None = None  #: of several labels: those that the usual mode answers
    node: tuple[str, float] | None = (
        None  #: of a class tree: what the usual mode answers, and its probability
    )


def parse_classes(text: str, trained: Sequence[str]) -> tuple[str, ...]:
    r"""Class names from a text, one per line or with commas between; a `+` adds them to the trained ones.

    >>> parse_classes("cat, dog\n\n fox", ["cat"]), parse_classes("+fox", ["cat"])
    (('cat', 'dog', 'fox'), ('cat', 'fox'))
    """
    listed = split_class_list(text)
    names = resolve_classes(listed, trained) if listed else ()
    if not 2 <= len(names) <= MOST_CLASSES:
        raise UsageError(f"write 2 to {MOST_CLASSES:,} class names, one per line; got {len(names):,}")
    return names


def open_uploads(paths: Sequence[str]) -> list[Named]:
    """The images of uploaded files, with their names."""
    if not 1 <= len(paths) <= MOST_IMAGES:
        raise InputError(f"choose 1 to {MOST_IMAGES} images, or click an example; got {len(paths)}")
    images: list[Named] = []
    for path in paths:
        name = Path(path).name
        try:
            images.append((name, open_image(path)))
        except InputError as error:
            raise InputError(str(error).replace(str(path), name)) from None
        _check_total(images)
    return images


def _check_total(images: Sequence[Named]) -> None:
    """Refuse images that are too large together."""
    if sum(image.width * image.height for _, image in images) > MAX_PIXELS:
        raise InputError(
            f"{images[-1][0]}: all images together may have {MAX_PIXELS:,} pixels, and this one exceeds it; "
            "choose fewer or smaller images"
        )


def readable_uploads(paths: Sequence[str]) -> tuple[list[Named], list[str]]:
    """The images of the uploaded files that can be read, and a sentence for each other file."""
    try:
        return open_uploads(paths), []
    except InputError as error:
        if len(paths) < 2 or len(paths) > MOST_IMAGES:
            raise
        first = error
    images, complaints = [], []
    for path in paths:
        try:
            images += open_uploads([path])
        except InputError as error:
            complaints.append(str(error))
        _check_total(images)
    if not images or not complaints:  # nothing to show, or too large together
        raise first
    return images, complaints


@torch.no_grad()
def classify(
    state: StudioState,
    images: Sequence[Named],
    classes: Sequence[str],
    template: str,
    top: int = 3,
    reject: float | None = None,
) -> list[Verdict]:
    """Classify images in every mode of the model and, if it was trained, with the frozen backbone.

    `reject` is the share of images of trained classes that may be rejected as "none of these"; None rejects
    none. The images run through the image tower once, unless the model removes something from its feature.
    With several labels per image all classes are returned, and the frozen backbone, which has no thresholds,
    does not answer.
    """
    model = _on_classes(state.model, classes, template)
    several = model.method.several
    rankings = {mode: Ranking(model, len(classes) if several else top, mode, reject) for mode in model.modes}
    logits, features = _logits(model, [image for _, image in images])
    nearness = any(ranking.needs_nearness for ranking in rankings.values())
    near = model.calibrator.nearness(features) if nearness else None
    answers = {mode: ranking.answers(logits[mode], near) for mode, ranking in rankings.items()}
    if state.trained and not several:
        frozen = model.zero_shot()
        before = _frozen_logits(frozen, model, [image for _, image in images], features)
        answers[BEFORE] = Ranking(frozen, top).answers(before)
    usual = answers[model.pick_mode(None)]
    return [
        Verdict(
            name,
            image,
            {mode: each[row].classes for mode, each in answers.items()},
            tuple(mode for mode, each in answers.items() if each[row].rejected),
            usual[row].labels,
            usual[row].node,
        )
        for row, (name, image) in enumerate(images)
    ]


def _logits(model: Model, images: Sequence[Image.Image]) -> tuple[Logits, Tensor]:
    """Logits [n, C] in every mode, and the image feature [n, E] before the method, in one pass."""
    method = model.bound
    pixels = pixels_for(method.clip, image_set(images), range(len(images)))
    stage = method.inference_stage(pixels, method.clip)
    assert stage.feature is not None
    logits = {mode: scores.float().cpu() for mode, scores in method.logits_from_frozen(stage).items()}
    return logits, stage.feature


def _frozen_logits(frozen: Model, model: Model, images: Sequence[Image.Image], features: Tensor) -> Tensor:
    """Zero-shot logits [n, C] of the frozen backbone, from its features [n, E] where nothing is removed."""
    known = None if model.clip.correction is not None else Frozen(features)
    return frozen.logits(image_set(images), cached=False, frozen=known)["default"]


def _on_classes(model: Model, classes: Sequence[str], template: str) -> Model:
    same = tuple(classes) == model.classes and template == model.template
    return model if same else model.with_classes(classes, template)


def can_reject(model: Model, classes: Sequence[str]) -> bool:
    """Whether the model can answer "none of these" among these classes; several labels can be none."""
    if model.method.several:
        return False
    known = set(model.method.trained_classes)
    return model.calibration is not None and any(name in known for name in classes)


def notices(model: Model, classes: Sequence[str], reject: float | None) -> list[tuple[str, str]]:
    """Sentences about the answers, each with the tab that helps ("" for none)."""
    if isinstance(model.method, ZeroShot):
        return [("Nothing is trained yet: the frozen backbone answers, and always names one class.", "Train")]
    known = set(model.method.trained_classes)
    new = [name for name in classes if name not in known]
    sentences = []
    if new:
        sentences.append((f"{len(new)} of {len(classes)} classes were not trained, such as “{new[0]}”.", ""))
    if reject is not None and not model.method.several and not can_reject(model, classes):
        why = (
            "none of these classes was trained" if model.calibration is not None else "it has no calibration"
        )
        sentences.append((f"The model cannot answer “none of these”: {why}.", "Train"))
    return sentences


def verdicts_html(
    verdicts: Sequence[Verdict],
    sentences: Sequence[tuple[str, str]] = (),
    complaints: Sequence[str] = (),
) -> str:
    """The answers as cards: an image, its likeliest classes, and what other modes answer.

    `sentences` are notices with the tab that helps; `complaints` are about files that could not be read.
    """
    cards = [
        {
            "name": verdict.name,
            "source": thumbnail(square(verdict.image, 192), 192),
            "rejected": next(iter(verdict.answers)) in verdict.rejected,
            "ranked": next(iter(verdict.answers.values())),
            "node": verdict.node,
            "labels": None if verdict.labels is None else _split(verdict),
            "others": []
            if verdict.labels is not None
            else [
                (mode, ranked[0], mode in verdict.rejected)
                for mode, ranked in list(verdict.answers.items())[1:]
            ],
        }
        for verdict in verdicts
    ]
    return render("studio/cards.html", cards=cards, sentences=sentences, complaints=complaints)


def _split(verdict: Verdict) -> tuple[Ranked, Ranked]:
    """The answered labels of an image, and the likeliest other ones, with their probabilities."""
    ranked = next(iter(verdict.answers.values()))
    answered = tuple(pair for pair in ranked if pair[0] in (verdict.labels or ()))
    return answered, tuple(pair for pair in ranked if pair not in answered)[:MORE_LABELS]


def why_html(state: StudioState, images: Sequence[Named], classes: Sequence[str], template: str) -> str:
    """Why the first image got its answer, relative to the training images; of several labels, of each."""
    image = _first(images)
    model = _on_classes(state.model, classes, template)
    explainer = explainer_of(model, reference_images(model) or state.images, state.roles)
    explanations = [explanation_values(one) for one in explainer.explain([image])]
    return render("studio/why.html", explanations=explanations)


def where_html(state: StudioState, images: Sequence[Named], phrase: str) -> str:
    """Where the frozen backbone sees a phrase in the first image."""
    image = _first(images)
    regions = where(state.clip.plain, image, phrase)
    view = apply_view(image, state.clip.config.view)
    overlay = heatmap(view, regions, f"where {phrase} is", ("name", phrase))
    return render("studio/gallery.html", title=f"Where is {phrase.strip()}?", images=(overlay,))


def _first(images: Sequence[Named]) -> Image.Image:
    if not images:
        raise InputError("classify an image first; the panel explains the first one")
    return images[0][1]
