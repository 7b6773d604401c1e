"""The Classify tab: any images, any class names; the frozen and the adapted answers side by side."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from PIL import Image

from dear._io.image_file import MAX_PIXELS, open_image, square
from dear.errors import InputError, UsageError
from dear.methods.dear import DeAR
from dear.methods.zeroshot import ZeroShot
from dear.studio.desk import Desk, Tell

MOST_IMAGES, MOST_CLASSES = 24, 1000
TITLES = {"zero-shot": "zero-shot CLIP", "fused": "adapted, fused", "decoupled": "adapted, decoupled"}


@dataclass(frozen=True)
class Verdict:
    """What the models say of one image.

    Attributes:
        name: of the image.
        image: itself.
        answers: model or mode -> (class, probability), likeliest first.
        shares: class token or attribute -> its part of the margin of the fused answer over the runner-up;
            empty for methods without attributes.
        runner_up: the class the margin is over.
    """

    name: str
    image: Image.Image
    answers: Mapping[str, tuple[tuple[str, float], ...]]
    shares: Mapping[str, float]
    runner_up: str


def parse_classes(text: str) -> list[str]:
    r"""Class names from a text: one a line, or with commas between; repeated ones count once.

    >>> parse_classes("cat, dog\n\n cat")
    ['cat', 'dog']

    Raises:
        UsageError: there are fewer than two, or far too many.
    """
    names = list(dict.fromkeys(part.strip() for part in text.replace("\n", ",").split(",") if part.strip()))
    if len(names) < 2:
        raise UsageError("write at least two class names, one a line")
    if len(names) > MOST_CLASSES:
        raise UsageError(f"{len(names)} classes are too many for the studio; it takes {MOST_CLASSES}")
    return names


def open_uploads(paths: Sequence[str]) -> list[tuple[str, Image.Image]]:
    """The images of uploaded files, with their names.

    Raises:
        InputError: there is none, there are too many, or one is not an image (named without its folder).
    """
    if not paths:
        raise InputError("choose an image first: drop one, take one with the camera, or click an example")
    if len(paths) > MOST_IMAGES:
        raise InputError(f"{len(paths)} images at once are too many; choose at most {MOST_IMAGES}")
    found: list[tuple[str, Image.Image]] = []
    pixels = 0
    for path in paths:
        name = Path(path).name
        try:
            image = open_image(path)
        except InputError as error:
            raise InputError(str(error).replace(str(path), name)) from None
        pixels += image.width * image.height
        if pixels > MAX_PIXELS:
            raise InputError(
                f"{name}: with it the images have more than {MAX_PIXELS:,} pixels together; choose fewer"
            )
        found.append((name, image))
    return found


@torch.no_grad()
def classify(
    desk: Desk,
    images: Sequence[tuple[str, Image.Image]],
    classes: Sequence[str],
    template: str,
    top: int = 3,
    tell: Tell | None = None,
) -> list[Verdict]:
    """Ask the frozen and the adapted model.

    Args:
        desk: the studio's desk.
        images: names and images.
        classes: any class names; the adapter is put on them.
        template: prompt with `{}`.
        top: answers kept of each model.
        tell: told what is being done.

    Raises:
        DearError: the method cannot name these classes, or the template has no `{}`.
    """
    trained = desk.find_model(tell)
    same = tuple(classes) == trained.classes and template == trained.template
    model = trained if same else trained.with_classes(classes, template)
    frozen = ZeroShot(desk.clip, classes, template=template)
    pixels = desk.pixels([image for _, image in images])
    logits = {"zero-shot": frozen.logits(pixels), **model.all_logits(pixels)}
    votes = model.votes(pixels) if isinstance(model, DeAR) else None  # [B, 1 + A, C]
    verdicts = []
    for row, (name, image) in enumerate(images):
        answers = {mode: _best(scores[row], classes, top) for mode, scores in logits.items()}
        shares: dict[str, float] = {}
        runner_up = ""
        if votes is not None and isinstance(model, DeAR):
            first, second = logits["fused"][row].topk(2).indices.tolist()
            parts = (votes[row, :, first] - votes[row, :, second]).tolist()
            shares = dict(zip(("class", *model.attributes), parts, strict=True))
            runner_up = classes[second]
        verdicts.append(Verdict(name, image, answers, shares, runner_up))
    return verdicts


def _best(logits: torch.Tensor, classes: Sequence[str], top: int) -> tuple[tuple[str, float], ...]:
    best = logits.float().softmax(dim=-1).topk(min(top, len(classes)))
    return tuple((classes[c], p) for c, p in zip(best.indices.tolist(), best.values.tolist(), strict=True))


def share_rows(verdicts: Sequence[Verdict]) -> dict[str, dict[str, float]]:
    """For `figures.decision_shares`: a row an image that says what was weighed against what."""
    rows: dict[str, dict[str, float]] = {}
    for number, verdict in enumerate(verdicts, 1):
        if verdict.shares:
            answer = verdict.answers["fused"][0][0]
            rows[f"{number}. {answer}, not {verdict.runner_up}"] = dict(verdict.shares)
    return rows


def verdicts_html(verdicts: Sequence[Verdict]) -> str:
    """The answers as cards: an image, and a column a model with bars."""
    return (
        f'<div class="dear-cards">{"".join(_card(number, v) for number, v in enumerate(verdicts, 1))}</div>'
    )


def _card(number: int, verdict: Verdict) -> str:
    columns = []
    for mode, answers in verdict.answers.items():
        rows = "".join(
            f"<li><span>{escape(name)}</span><span>{100 * share:.0f}&nbsp;%</span>"
            f'<i style="width:{100 * share:.1f}%"></i></li>'
            for name, share in answers
        )
        columns.append(f"<div><h4>{escape(TITLES.get(mode, mode))}</h4><ol>{rows}</ol></div>")
    name = escape(verdict.name)
    return (
        f'<article aria-label="{name}"><figure><img alt="{name}" src="{_data_url(verdict.image)}">'
        f"<figcaption>{number}. {name}</figcaption></figure>"
        f'<div class="dear-answers">{"".join(columns)}</div></article>'
    )


def _data_url(image: Image.Image, side: int = 192) -> str:
    file = io.BytesIO()
    square(image, side).save(file, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
