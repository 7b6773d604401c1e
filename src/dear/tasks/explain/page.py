"""The pages of `dear explain`: bars per part, heatmaps, influential heads, answers without a part."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dear.images.views import resize_crop
from dear.report.page import Table, Thumbnail, percent, render, thumbnail
from dear.tasks.explain.dataset import SetExplanation
from dear.tasks.explain.explanation import (
    AVERAGE,
    FIXED,
    MLPS,
    THRESHOLD,
    UNKNOWN,
    Bar,
    Explanation,
    Explanations,
)

TERMS = {
    "bar": "what one part of the model adds to the score of a class, above the mean of all classes and "
    "relative to what the same part adds for an average training image; the bars of a class sum to its "
    "score, its calibrated logit",
    AVERAGE.lower(): "the score of the class when every part is at its mean over the training images: what "
    "any image gets",
    "role": "heads that react to the same thing, such as the place or the color",
    "heatmap": "a bar by patch of the image: red speaks for the class, blue against it; a map sums to its "
    "bar, and what does not come from a patch of this image is spread evenly over all patches",
    "without heads": "what the heads add to the image's feature is replaced by its mean over the training "
    "images; nothing else changes, and nothing is trained again",
    "without a concept": "as before for its heads, and the directions of its words are removed from the "
    "feature",
    "lead": "how far the score of the class is ahead of that of the other class",
    MLPS: "the parts of the layers outside the heads",
    FIXED.lower(): "learned terms that are the same for all images; they vary a little because features are "
    "brought to the same length",
    THRESHOLD.lower(): "the logit of the probability from which an image has the label, with which its score "
    "is compared; scores of several labels are not taken above the mean of all classes",
    UNKNOWN.lower(): "the comparison with stored training images, which is not a sum of parts",
}

_SIDE, _NEAR = 224, 160  # pixels
_MAPS, _WITHOUT, _COLUMNS = (
    8,
    6,
    8,
)  # heatmaps of groups, answers without a part of each kind, parts in a table
_FOR, _AGAINST = (178, 24, 43), (33, 102, 172)
_KIND_ORDER = ("role", "layer", "heads", "token", "rest", "average")


def explanations_page(result: Explanations) -> str:
    """The page of some images."""
    exact = min((one.exact for one in result), default=1.0)
    images = len({one.image for one in result})
    sums = "the bars of a class sum to its score"
    return render(
        "explain.html",
        title="Why this answer" if len(result) == 1 else "Why these answers",
        lead=f"{images} image{'s' * (images != 1)}, answered by {result.method}.",
        images=[explanation_values(one) for one in result],
        notices=result.notices,
        notes={**result.notes, "sum": sums if exact == 1 else f"{sums}; {percent(exact)} is decomposed"},
        terms=_terms({bar.name for one in result for bar in one.bars}),
    )


def _terms(parts: Collection[str]) -> dict[str, str]:
    """The words that a page with these parts uses."""
    unused = {name for name in (AVERAGE, FIXED, MLPS, THRESHOLD, UNKNOWN) if name not in parts}
    return {word: text for word, text in TERMS.items() if word not in {u.lower() for u in unused} | unused}


def explanation_values(one: Explanation, name: str | None = None) -> dict[str, Any]:
    """What the component `explanation` shows of one image."""
    classes, sure = (one.answer, one.other), dict(one.probabilities)
    lines = (("name", one.answer), ("soft", percent(sure[one.answer])))
    images = [Thumbnail(thumbnail(one.view, _SIDE), "the image", lines)]
    largest = float(one.maps[""].abs().max())
    for place, label in enumerate(classes if one.threshold is None else classes[:1]):
        words = f"evidence for {label}"
        score = f"score {format_part(one.scores[place])}, {percent(sure[label])}"
        caption = (("name", words), ("soft", score))
        images.append(heatmap(one.view, one.maps[""][place], words, *caption, scale=largest))
    title = name or os.path.basename(one.image) or one.image
    return {
        "name": title if one.threshold is None else f"{title}: {one.answer}",
        "question": f"What speaks for {one.answer}, and what for {one.other}"
        if one.threshold is None
        else f"What speaks for {one.answer}, compared with its threshold",
        "sentence": one.sentence,
        "notices": one.notices,
        "classes": classes,
        "images": images,
        "bars": bar_rows(one.bars),
        "totals": tuple(format_part(score) for score in one.scores),
        "maps": _group_maps(one),
        "heads": _heads(one, classes),
        "without": _without(one),
        "neighbors": [
            Thumbnail(thumbnail(near.image, _NEAR), "a reference image", (("name", near.label),))
            for near in one.neighbors
        ],
    }


def _group_maps(one: Explanation) -> list[Thumbnail]:
    """The heatmaps of the groups of heads and tokens with the strongest maps, with their bars."""
    bars = {bar.name: bar for bar in one.bars}
    groups = [name for name in one.maps if name]
    groups = sorted(groups, key=lambda name: -float(one.maps[name][0].abs().sum()))[:_MAPS]
    scale = max((float(one.maps[name][0].abs().max()) for name in groups), default=1.0)
    return [
        heatmap(
            one.view,
            one.maps[name][0],
            name,
            ("name", name),
            ("soft", format_part(bars[name].answer)),
            scale=scale,
        )
        for name in groups
    ]


def _heads(one: Explanation, classes: Sequence[str]) -> Table:
    """The most influential heads; groups and phrases only where heads are grouped by role."""
    columns: dict[str, list[str]] = {"head": [f"layer {head.layer}, head {head.head}" for head in one.heads]}
    if all(bar.kind != "layer" for bar in one.bars):
        columns["group"] = [head.group for head in one.heads]
    if any(head.phrases for head in one.heads):
        columns["phrases"] = ["; ".join(head.phrases[:3]) for head in one.heads]
    labels = len(columns)
    columns["answer"] = [format_part(head.answer) for head in one.heads]
    columns["other"] = [format_part(head.other) for head in one.heads]
    return Table((*[*columns][:labels], *classes), tuple(zip(*columns.values(), strict=True)), labels)


def bar_rows(bars: Sequence[Bar]) -> list[dict[str, Any]]:
    """Bars for the page by kind, layers from the last to the first, else the largest difference first.

    Widths are percent of half a row.
    """
    layers = {bar.name: -number for number, bar in enumerate(bars) if bar.kind == "layer"}
    widest = max(max(abs(bar.answer), abs(bar.other)) for bar in bars) or 1.0
    return [
        {
            "name": bar.name,
            "kind": bar.kind,
            "texts": (format_part(bar.answer), format_part(bar.other)),
            "widths": (100 * bar.answer / widest, 100 * bar.other / widest),
        }
        for bar in sorted(
            bars, key=lambda bar: (_KIND_ORDER.index(bar.kind), layers.get(bar.name, -abs(bar.lead)))
        )
    ]


def format_part(value: float) -> str:
    """A part for people.

    >>> format_part(0.5), format_part(-0.001)
    ('+0.50', '+0.00')
    """
    return f"{round(value, 2) + 0.0:+.2f}"


def _without(one: Explanation) -> Table | None:
    """The answers without the concepts and without the heads that matter most."""
    changed = [(f"{o.name}: {o.value}", o) for o in one.without_concepts[:_WITHOUT]]
    changed += [
        (f"heads of {o.name}", o) for o in sorted(one.without_heads, key=lambda o: -o.lead_drop)[:_WITHOUT]
    ]
    if not changed:
        return None
    rows = []
    for name, without in changed:
        removed = ["its words"] if without.value else []
        removed += [f"{without.heads} head{'s' * (without.heads != 1)}"] if without.heads else []
        answer = f"{without.answer} ({percent(without.probability)})"
        rows.append((name, " and ".join(removed), format_part(one.lead - without.lead_drop), answer))
    marks = tuple("best" if o.answer != one.predicted else "" for _, o in changed)
    return Table(("without", "what is removed", "lead", "answer"), tuple(rows), 2, marks)


def set_page(result: SetExplanation) -> str:
    """The page of a set."""
    hits, rows, marks = result.answers == result.labels, [], []
    order = result.values.abs().mean(0).argsort(descending=True).tolist()[:_COLUMNS]
    for name, right, count, mixture in result.mixtures():
        values = tuple(format_part(float(mixture[place])) for place in order)
        first = result.parts[int(mixture.argmax())]
        rows.append((name, "right" if right else "wrong", first, str(count), *values))
        marks.append("first" if right else "")
    unusual = []
    for place, distance in zip(result.unusual, result.distances, strict=True):
        lines = (
            ("name", f"answered {result.answer(place)}"),
            ("right" if hits[place] else "wrong", f"is {result.classes[int(result.labels[place])]}"),
            ("soft", f"{distance:.1f} standard deviations"),
        )
        image = thumbnail(result.images.image(place))
        unusual.append(Thumbnail(image, "an image answered for an unusual reason", lines))
    columns = ("class", "answers", "largest part", "images", *(result.parts[place] for place in order))
    return render(
        "explain_set.html",
        title=f"Why these answers: {result.images.name}",
        lead=f"{len(result.labels)} images, answered by {result.method}.",
        tiles=((str(len(result.labels)), "images"), (percent(float(hits.float().mean())), "answered right")),
        table=Table(columns, tuple(rows), 3, tuple(marks)),
        unusual=unusual,
        notices=result.notices,
        notes=result.notes,
        terms=_terms(result.parts),
    )


def apply_view(image: Image.Image, view: Any) -> Image.Image:
    """The part of an image that a model with this view sees."""
    return Image.fromarray(resize_crop(image, view).permute(1, 2, 0).numpy())


def overlay(image: Image.Image, values: Tensor, scale: float | None = None) -> Image.Image:
    """An image with a heatmap [S, S] over it: red for, blue against; strongest at `scale`.

    >>> overlay(Image.new("RGB", (8, 8), "white"), torch.eye(2)).size
    (224, 224)
    """
    base = image.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)
    gray = torch.frombuffer(bytearray(base.convert("L").tobytes()), dtype=torch.uint8).float()
    gray = gray.view(_SIDE, _SIDE, 1).expand(-1, -1, 3) * 0.6 + 255 * 0.4
    strongest = float(values.abs().max()) if scale is None else scale
    wide = F.interpolate(values[None, None].float() / max(strongest, 1e-12), (_SIDE, _SIDE), mode="bicubic")[
        0, 0
    ].clamp(-1, 1)
    color = torch.where(wide[..., None] > 0, torch.tensor(_FOR), torch.tensor(_AGAINST)).float()
    alpha = 0.85 * wide.abs()[..., None].sqrt() * (wide.abs()[..., None] > 0.04)
    mixed = (gray * (1 - alpha) + color * alpha).round().clamp(0, 255).to(torch.uint8)
    return Image.frombytes("RGB", (_SIDE, _SIDE), bytes(mixed.contiguous().flatten().tolist()))


def heatmap(
    image: Image.Image, values: Tensor, text: str, *lines: tuple[str, str], scale: float | None = None
) -> Thumbnail:
    """An overlay as an image of a gallery."""
    return Thumbnail(thumbnail(overlay(image, values, scale), side=_SIDE), text, lines)
