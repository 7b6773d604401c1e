"""The Classify tab: any images, any class names; the frozen and the adapted answers side by side."""

from __future__ import annotations

import base64
import io
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from PIL import Image

from dear._io.image_file import MAX_PIXELS, open_image, square
from dear._io.progress import Progress
from dear.errors import InputError, UsageError
from dear.methods.dear import DeAR
from dear.methods.zeroshot import ZeroShot
from dear.report.page import render, thumbnail
from dear.runs.batches import image_set, pixels_for
from dear.runs.model import Model
from dear.studio.state import StudioState

_SECONDS = 30.0
Ranked = tuple[tuple[str, float], ...]  #: class names with probabilities, likeliest first

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
    answers: Mapping[str, tuple[tuple[str, float], ...]]
    #: class token, attribute with heads of its own, or all other attributes -> its part of the margin of the
    #: fused answer over the runner-up; empty where no attribute has heads
    shares: Mapping[str, float]
    runner_up: str  #: the class the margin is over
    refused: tuple[str, ...] = ()  #: modes for which the image is none of the classes


def parse_classes(text: str) -> list[str]:
    r"""Class names from a text: one per line, or with commas between; repeated ones count once.

    >>> parse_classes("cat, dog\n\n cat")
    ['cat', 'dog']
    """
    names = list(dict.fromkeys(part.strip() for part in text.replace("\n", ",").split(",") if part.strip()))
    if len(names) < 2:
        raise UsageError("write at least two class names, one per line")
    if len(names) > MOST_CLASSES:
        raise UsageError(f"{len(names)} classes are too many for the studio; it takes {MOST_CLASSES}")
    return names


def open_uploads(paths: Sequence[str]) -> list[tuple[str, Image.Image]]:
    """The images of uploaded files, with their names."""
    if not paths:
        raise InputError("choose an image first: drop one, take one with the camera, or click an example")
    if len(paths) > MOST_IMAGES:
        raise InputError(f"{len(paths)} images at once are too many; choose at most {MOST_IMAGES}")
    found: list[tuple[str, Image.Image]] = []
    for path in paths:
        name = Path(path).name
        try:
            found.append((name, open_image(path)))
        except InputError as error:
            raise InputError(str(error).replace(str(path), name)) from None
        _check_total(found)
    return found


def _check_total(images: Sequence[tuple[str, Image.Image]]) -> None:
    """Refuse images that are too large together."""
    if sum(image.width * image.height for _, image in images) > MAX_PIXELS:
        raise InputError(
            f"{images[-1][0]}: with it the images have more than {MAX_PIXELS:,} pixels together; choose fewer"
        )


def readable_uploads(paths: Sequence[str]) -> tuple[list[tuple[str, Image.Image]], list[str]]:
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
    images: Sequence[tuple[str, Image.Image]],
    classes: Sequence[str],
    template: str,
    top: int = 3,
    progress: Progress | None = None,
    reject: float | None = None,
) -> list[Verdict]:
    """Classify images with the frozen and the adapted model.

    Args:
        state: the studio's state.
        images: names and images.
        classes: any class names; the adapter is put on them.
        template: prompt with `{}`.
        top: answers kept of each model.
        progress: called with what is being done.
        reject: share of images of trained classes that may be refused; None refuses none.
    """
    trained = state.find_model(progress)
    same = tuple(classes) == trained.classes and template == trained.template
    model = trained if same else trained.with_classes(classes, template)
    limits = {} if reject is None else {mode: model.threshold(reject, mode) for mode in model.modes}
    opened = [image for _, image in images]
    logits = {"zero-shot": model.frozen().logits(opened)["default"]}
    logits |= {mode: model.calibrated(scores, mode) for mode, scores in model.logits(opened).items()}
    remote = [] if state.service is None else ask_service(state.service, opened, classes, top)
    near = None
    if limits and model.needs_nearness:
        near = model.nearness(model.features(opened, cached=False))
    refused = {
        mode: (model.score(logits[mode], near, mode) < limit.value).tolist() for mode, limit in limits.items()
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


def _best(logits: torch.Tensor, classes: Sequence[str], top: int) -> tuple[tuple[str, float], ...]:
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
    """The answers as cards: an image, and a column per model or mode with bars.

    Args:
        verdicts: the answers.
        trusted: the mode to trust, which is marked.
        advice: a sentence that says why.
        complaints: sentences about files that could not be read.
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


def check_service(address: str) -> str:
    """The address of an adapter of a service, as `http://127.0.0.1:8000/v1/models/pets`."""
    parts = urlsplit(address)
    path = parts.path.rstrip("/")
    if parts.scheme not in ("http", "https") or not parts.netloc or "/v1/models/" not in path:
        raise UsageError(
            f"service = {address!r}: give the address of an adapter, such as "
            "http://127.0.0.1:8000/v1/models/pets"
        )
    return f"{parts.scheme}://{parts.netloc}{path}"


def ask_service(
    address: str, images: Sequence[Image.Image], classes: Sequence[str], top: int
) -> list[Ranked]:
    """The service's answers for images among some classes. Its key is read from the environment: DEAR_KEY."""
    body = {"images": [_png(image) for image in images], "classes": list(classes), "top": top}
    headers = {"Content-Type": "application/json"}
    if os.environ.get("DEAR_KEY"):
        headers["Authorization"] = f"Bearer {os.environ['DEAR_KEY']}"
    request = urllib.request.Request(f"{address}/classify", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as reply:
            answers: Any = json.load(reply)["answers"]
        return [tuple((one["name"], float(one["probability"])) for one in a["classes"]) for a in answers]
    except urllib.error.HTTPError as error:
        raise InputError(f"the service at {address} refuses: {_sentence(error)}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"the service at {address} does not answer ({error})") from None


def _sentence(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"status {error.code}"


def _png(image: Image.Image) -> str:
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()
