"""The Classify tab: any images, any class names; the frozen and the adapted answers side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from dear.data.batches import image_set, pixels_for
from dear.errors import InputError, UsageError
from dear.images.views import MAX_PIXELS, open_image, square
from dear.methods.dear import DeAR
from dear.methods.zeroshot import ZeroShot
from dear.report.page import render, thumbnail
from dear.runs.class_lists import resolve_classes, split_class_list
from dear.runs.model import Model
from dear.studio.service_client import Ranked, ask_service
from dear.studio.state import StudioState
from dear.tasks.explain.explainer import Explainer
from dear.tasks.explain.page import heat, section, seen
from dear.tasks.explain.regions import where
from dear.utils.progress import Progress

Named = tuple[str, Image.Image]  #: an image with its name

MOST_IMAGES, MOST_CLASSES = 24, 1000
TITLES = {
    "zero-shot": "zero-shot CLIP",
    "auto": "adapted, auto",
    "fused": "adapted, fused",
    "decoupled": "adapted, decoupled",
    "default": "adapted",
    "service": "the running service",
}


@dataclass(frozen=True)
class Verdict:
    """The answers of the models for one image."""

    name: str  #: of the image
    image: Image.Image  #: itself
    #: model or mode -> (class, probability), likeliest first
    answers: Mapping[str, Ranked]
    #: class token, attribute with heads of its own, or all other attributes -> its part of the margin of the
    #: fused answer over the runner-up; empty where no attribute has heads
    shares: Mapping[str, float]
    runner_up: str  #: the class the margin is over
    refused: tuple[str, ...] = ()  #: modes for which the image is none of the classes


def parse_classes(text: str, trained: Sequence[str]) -> tuple[str, ...]:
    r"""Class names from a text, one per line or with commas between; a `+` adds them to the trained ones.

    >>> parse_classes("cat, dog\n\n fox", ["cat"]), parse_classes("+fox", ["cat"])
    (('cat', 'dog', 'fox'), ('cat', 'fox'))
    """
    listed = split_class_list(text)
    names = resolve_classes(listed, trained) if listed else ()
    if len(names) < 2:
        raise UsageError(f"write at least two class names, one per line; got {len(names)}")
    if len(names) > MOST_CLASSES:
        raise UsageError(f"{len(names)} classes are too many for the studio; it takes {MOST_CLASSES}")
    return names


def open_uploads(paths: Sequence[str]) -> list[Named]:
    """The images of uploaded files, with their names."""
    if not paths:
        raise InputError("choose an image first: drop one, take one with the camera, or click an example")
    if len(paths) > MOST_IMAGES:
        raise InputError(f"{len(paths)} images at once are too many; choose at most {MOST_IMAGES}")
    found: list[Named] = []
    for path in paths:
        name = Path(path).name
        try:
            found.append((name, open_image(path)))
        except InputError as error:
            raise InputError(str(error).replace(str(path), name)) from None
        _check_total(found)
    return found


def _check_total(images: Sequence[Named]) -> None:
    """Refuse images that are too large together."""
    if sum(image.width * image.height for _, image in images) > MAX_PIXELS:
        raise InputError(
            f"{images[-1][0]}: with it the images have more than {MAX_PIXELS:,} pixels together; choose fewer"
        )


def readable_uploads(paths: Sequence[str]) -> tuple[list[Named], list[str]]:
    """The images of the uploaded files that can be read, and a sentence for each other file."""
    try:
        return open_uploads(paths), []
    except InputError as error:
        if len(paths) < 2 or len(paths) > MOST_IMAGES:
            raise
        first = error
    found, complaints = [], []
    for path in paths:
        try:
            found += open_uploads([path])
        except InputError as error:
            complaints.append(str(error))
        _check_total(found)
    if not found or not complaints:  # nothing to show, or too large together
        raise first
    return found, complaints


@torch.no_grad()
def classify(
    state: StudioState,
    images: Sequence[Named],
    classes: Sequence[str],
    template: str,
    top: int = 3,
    progress: Progress | None = None,
    reject: float | None = None,
) -> list[Verdict]:
    """Classify images with the frozen and the adapted model, among any classes.

    `reject` is the share of images of trained classes that may be refused; None refuses none.
    """
    model = _on_classes(state.find_model(progress), classes, template)
    scale = model.scale
    limits = {} if reject is None else {mode: scale.threshold(reject, mode) for mode in model.modes}
    opened = [image for _, image in images]
    logits = {"zero-shot": model.frozen().logits(opened)["default"]}
    logits |= {mode: scale.calibrated(scores, mode) for mode, scores in model.logits(opened).items()}
    remote = [] if state.service is None else ask_service(state.service, opened, classes, top)
    near = None
    if limits and scale.needs_nearness:
        near = scale.nearness(model.features(opened, cached=False))
    refused = {
        mode: (scale.score(logits[mode], near, mode) < limit.value).tolist() for mode, limit in limits.items()
    }
    votes, method = None, model.bound
    with_heads: list[str] = []
    if isinstance(method, DeAR) and method.roles is not None:
        with_heads = [name for name in method.attributes if method.roles.select("core", name)]
    if isinstance(method, DeAR) and with_heads:  # else the attributes' tokens stand for nothing
        votes = method.votes(pixels_for(method.clip, image_set(opened), range(len(opened))))  # [B, 1 + A, C]
    verdicts = []
    for row, (name, image) in enumerate(images):
        answers = {mode: _best(scores[row], classes, top) for mode, scores in logits.items()}
        if remote:
            answers["service"] = remote[row]
        shares: dict[str, float] = {}
        runner_up = ""
        if votes is not None and isinstance(method, DeAR):
            first, second = logits["fused"][row].topk(2).indices.tolist()
            parts = (votes[row, :, first] - votes[row, :, second]).tolist()
            shares = dict(zip(method.voters, parts, strict=True))
            hidden = [name for name in method.attributes if name not in with_heads]
            if hidden:  # no head has their role, so one bar stands for all of them
                shares["others"] = sum(shares.pop(name) for name in hidden)
            runner_up = classes[second]
        none = tuple(mode for mode, rows in refused.items() if rows[row])
        verdicts.append(Verdict(name, image, answers, shares, runner_up, none))
    return verdicts


def _on_classes(model: Model, classes: Sequence[str], template: str) -> Model:
    same = tuple(classes) == model.classes and template == model.template
    return model if same else model.with_classes(classes, template)


def _best(logits: torch.Tensor, classes: Sequence[str], top: int) -> Ranked:
    best = logits.float().softmax(dim=-1).topk(min(top, len(classes)))
    return tuple((classes[c], p) for c, p in zip(best.indices.tolist(), best.values.tolist(), strict=True))


def share_rows(verdicts: Sequence[Verdict]) -> dict[str, dict[str, float]]:
    """For `figures.decision_shares`: a row per image that says which class was weighed against which."""
    rows: dict[str, dict[str, float]] = {}
    for number, verdict in enumerate(verdicts, 1):
        if verdict.shares:
            answer = verdict.answers["fused"][0][0]
            rows[f"{number}. {answer}, not {verdict.runner_up}"] = dict(verdict.shares)
    return rows


def verdicts_html(
    verdicts: Sequence[Verdict], trusted: str = "", advice: str = "", complaints: Sequence[str] = ()
) -> str:
    """The answers as cards: an image, and a column with bars per model or mode, the trusted one marked.

    `advice` says why it is trusted; `complaints` are sentences about files that could not be read.
    """
    cards = [
        {
            "name": verdict.name,
            "source": thumbnail(square(verdict.image, 192), 192),
            "columns": [
                (TITLES.get(mode, mode), mode == trusted, answers, mode in verdict.refused)
                for mode, answers in verdict.answers.items()
            ],
        }
        for verdict in verdicts
    ]
    return render("studio/cards.html", cards=cards, advice=advice, complaints=complaints)


def which_to_trust(model: Model, classes: Sequence[str]) -> tuple[str, str]:
    """The mode to trust for these classes, and a sentence that says why."""
    mode = model.pick_mode(None)
    if isinstance(model.method, ZeroShot):
        return mode, "The model is zero-shot CLIP itself: nothing was trained."
    unknown = [name for name in classes if name not in set(model.classes)]
    if not unknown:
        return mode, f"Trust “{TITLES.get(mode, mode)}”: the model was trained on all these classes."
    if len(unknown) == len(classes):
        why = "the model was trained on none of these classes"
    else:
        why = f"{len(unknown)} of the {len(classes)} classes are new to the model, such as “{unknown[0]}”"
    return mode, f"Trust “{TITLES.get(mode, mode)}”: {why}."


def why_html(state: StudioState, images: Sequence[Named], classes: Sequence[str], template: str) -> str:
    """The adapted model's answer for the first image, explained."""
    image = _first(images)
    model = _on_classes(state.find_model(), classes, template)
    explainer = Explainer(model, state.images, state.roles)
    return render("studio/why.html", one=section(explainer.explain([image])[0]))


def where_html(state: StudioState, images: Sequence[Named], phrase: str) -> str:
    """Where the frozen backbone sees a phrase in the first image."""
    image = _first(images)
    found = where(state.clip.plain, image, phrase)
    shown = heat(seen(image, state.clip.config.view), found, f"where {phrase} is", ("name", phrase))
    return render("studio/gallery.html", title=f"Where is {phrase.strip()}?", images=(shown,))


def _first(images: Sequence[Named]) -> Image.Image:
    if not images:
        raise InputError("classify an image first; the panel explains the first one")
    return images[0][1]
