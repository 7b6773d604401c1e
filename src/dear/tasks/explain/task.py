"""Why a run answers as it does: `dear explain`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from PIL import Image

from dear.data.images import ImageSet
from dear.data.open import open_data
from dear.errors import DataError, UsageError
from dear.heads.known_roles import read_roles
from dear.images.views import resize_crop
from dear.report.page import Table, Thumbnail, percent, thumbnail
from dear.runs.images import training_images
from dear.runs.model import Model
from dear.tasks.explain.dataset import SetExplanation
from dear.tasks.explain.explainer import Explainer
from dear.tasks.explain.explanation import Bar, Explanation
from dear.tasks.explain.page import BarRow, ExplainFacts, ImageFacts, SetFacts, heat
from dear.utils.files import PathLike
from dear.utils.notices import note
from dear.utils.progress import Progress

_NEAR = 160


def explainer_of(
    model: Model,
    data: PathLike | None = None,
    root: PathLike | None = None,
    roles: PathLike | None = None,
    mode: str | None = None,
    progress: Progress | None = None,
) -> Explainer:
    """An explainer with the run's training images as reference while they are there, or with `data`.

    `root` is the folder of the benchmarks, for the name of one; `roles` a role map instead of the run's or
    the backbone's own; `progress` is called with ("reference", images done, images in all).
    """
    reference = open_data(data, "train", root=root) if data is not None else _reference_images(model)
    if reference is None:
        note("the run's training images are not found; name other images to see answers without a role")
    return Explainer(model, reference, None if roles is None else read_roles(roles), mode, progress)


def _reference_images(model: Model) -> ImageSet | None:
    """The images a model was trained on, where they can still be opened."""
    spec = model.spec
    if spec is None or spec.data is None:
        return None
    try:
        return training_images(spec)
    except DataError:
        return None


def check_question(model: Model, answer: str | None, against: str | None) -> None:
    """Refuse classes that the model does not have, before any work."""
    known = {name.casefold() for name in model.classes}
    for name in (answer, against):
        if name is not None and name.casefold() not in known:
            raise UsageError(f"the model has no class {name!r}; it has {', '.join(model.classes[:12])}")


def page_facts(
    explainer: Explainer, found: Sequence[Explanation], images: Sequence[Image.Image]
) -> ExplainFacts:
    """What the page of some images shows."""
    model, reference = explainer.model, explainer.reference
    exact = min(one.exact for one in found)
    notes = {
        "model": f"{explainer.method.title} on {model.clip.name}, mode {explainer.mode}",
        "classes": ", ".join(model.classes[:20]) + (" …" if len(model.classes) > 20 else ""),
        "sum": "the bars of a class sum to its score"
        if exact == 1
        else f"{percent(exact)} of the score is taken apart",
        "reference images": "none"
        if reference is None
        else f"{len(reference.images)} of {reference.images.name}",
    }
    return ExplainFacts(
        title="Why this answer" if len(found) == 1 else "Why these answers",
        lead=f"{len(found)} image{'s' * (len(found) != 1)}, answered by {explainer.method.title}.",
        images=tuple(_image(explainer, one, image) for one, image in zip(found, images, strict=True)),
        notes=notes,
    )


def _image(explainer: Explainer, one: Explanation, image: Image.Image) -> ImageFacts:
    image, classes, sure = seen(image, explainer.model), (one.answer, one.other), dict(one.probabilities)
    own = Thumbnail(
        thumbnail(image, 224), "the image", (("name", one.answer), ("soft", percent(sure[one.answer])))
    )
    largest = float(one.maps[""].abs().max())
    maps = []
    for place, name in enumerate(classes):
        words, score = f"where {name} comes from", f"score {one.scores[place]:+.2f}, {percent(sure[name])}"
        maps.append(heat(image, one.maps[""][place], words, ("name", words), ("soft", score), scale=largest))
    groups = sorted(explainer.groups.heads, key=lambda g: -float(one.maps[g][0].abs().sum()))[:8]
    bars = {bar.name: bar for bar in one.bars}
    largest = max(float(one.maps[group][0].abs().max()) for group in groups)
    roles = []
    for group in groups:
        score = f"{bars[group].answer:+.2f}"
        roles.append(heat(image, one.maps[group][0], group, ("name", group), ("soft", score), scale=largest))
    heads = tuple(
        (
            f"layer {head.layer}, head {head.head}",
            head.group,
            "; ".join(head.phrases[:3]),
            f"{head.answer:+.2f}",
            f"{head.other:+.2f}",
        )
        for head in one.heads
    )
    return ImageFacts(
        name=os.path.basename(one.image) or one.image,
        sentence=one.sentence,
        classes=classes,
        images=(own, *maps),
        bars=_bars(one.bars),
        roles=tuple(roles),
        heads=Table(("head", "role", "looks at", *classes), heads, labels=3),
        without=_without(one),
        neighbors=_neighbors(explainer, one),
        notices=one.notices,
    )


def _bars(bars: Sequence[Bar]) -> tuple[BarRow, ...]:
    """Bars for the page, those of heads and tokens first, the largest difference first."""
    widest = max(max(abs(bar.answer), abs(bar.other)) for bar in bars) or 1.0
    ordered = sorted(bars, key=lambda bar: (bar.kind == "rest", -abs(bar.decides)))
    return tuple(
        BarRow(
            bar.name,
            bar.kind,
            (f"{bar.answer:+.2f}", f"{bar.other:+.2f}"),
            (100 * bar.answer / widest, 100 * bar.other / widest),
        )
        for bar in ordered
    )


def _without(one: Explanation, most: int = 6) -> Table | None:
    """The answers without the concepts and without the heads that matter most."""
    found = [(f"{o.name}: {o.value}", o) for o in one.concepts[:most]]
    found += [(f"heads of {o.name}", o) for o in sorted(one.roles, key=lambda o: -o.lost)[:most]]
    if not found:
        return None
    rows = []
    for name, without in found:
        what = [f"{without.heads} head{'s' * (without.heads != 1)}"] if without.heads else []
        what = (["its words"] if without.value else []) + what
        answer = f"{without.answer} ({percent(without.probability)})"
        rows.append((name, " and ".join(what), f"{without.lost:+.2f}", answer))
    marks = tuple("best" if o.answer != one.probabilities[0][0] else "" for _, o in found)
    return Table(("without", "what is taken out", "lead lost", "answer"), tuple(rows), 2, marks)


def _neighbors(explainer: Explainer, one: Explanation) -> tuple[Thumbnail, ...]:
    known = explainer.reference
    if known is None:
        return ()
    return tuple(
        Thumbnail(
            thumbnail(known.images.image(place), _NEAR),
            "a reference image",
            (("name", known.images.classes[int(known.images.labels[place])]),),
        )
        for place in one.neighbors
    )


def seen(image: Image.Image, model: Model) -> Image.Image:
    """The part of an image that the model sees."""
    return Image.fromarray(resize_crop(image, model.clip.config.view).permute(1, 2, 0).numpy())


def set_facts(explainer: Explainer, found: SetExplanation, images: ImageSet, most: int = 8) -> SetFacts:
    """What the page of a set shows."""
    hits, model = found.answers == found.labels, explainer.method.title
    rows, marks = [], []
    order = found.values.abs().mean(0).argsort(descending=True).tolist()[:most]
    for label, name in enumerate(found.classes):
        for right in (True, False):
            mixture = found.mixture(label, right)
            if mixture is None:
                continue
            count = int(((found.labels == label) & (hits == right)).sum())
            first = found.parts[int(mixture.argmax())]
            values = tuple(f"{float(mixture[place]):+.2f}" for place in order)
            rows.append((name, "right" if right else "wrong", first, str(count), *values))
            marks.append("first" if right else "")
    places = {images.key(row): row for row in range(len(images))}
    unusual = []
    for place, distance in zip(found.unusual, found.distances, strict=True):
        lines = (
            ("name", f"answered {found.classes[int(found.answers[place])]}"),
            ("right" if hits[place] else "wrong", f"is {found.classes[int(found.labels[place])]}"),
            ("soft", f"{distance:.1f} standard deviations"),
        )
        image = thumbnail(images.image(places[found.images[place]]))
        unusual.append(Thumbnail(image, "an image answered for an unusual reason", lines))
    columns = ("class", "answers", "mostly by", "images", *(found.parts[place] for place in order))
    return SetFacts(
        title=f"Why: {found.name}",
        lead=f"{len(found.labels)} images, answered by {model}.",
        tiles=((str(len(found.labels)), "images"), (percent(float(hits.float().mean())), "answered right")),
        table=Table(columns, tuple(rows), 3, tuple(marks)),
        unusual=tuple(unusual),
        notices=found.notices,
        notes={"model": f"{model} on {explainer.model.clip.name}, mode {explainer.mode}"},
    )
