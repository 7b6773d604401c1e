"""Why a run answers as it does: `dear explain`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from PIL import Image

from dear._io.files import PathLike
from dear._io.image_file import open_image
from dear._io.notes import note
from dear._io.progress import Progress
from dear.data.images import ImageSet
from dear.data.open import open_data
from dear.errors import DataError, UsageError
from dear.heads.known_roles import read_roles
from dear.report.explain_page import BarRow, ExplainFacts, ImageFacts, SetFacts, heat
from dear.report.page import Table, Thumbnail, percent, thumbnail
from dear.runs.explain import Explainer
from dear.runs.explain_set import SetExplanation
from dear.runs.explanation import Bar, Explanation
from dear.runs.model import Model

_NEAR = 160


def explainer_of(
    model: Model,
    data: PathLike | None = None,
    root: PathLike | None = None,
    roles: PathLike | None = None,
    mode: str | None = None,
    progress: Progress | None = None,
) -> Explainer:
    """An explainer with the run's training images as reference, or others.

    Args:
        model: the run.
        data: reference images; None: those that the run was trained on, while they are there.
        root: folder of the benchmarks, for the name of one.
        roles: role map; None: the run's, or the backbone's own.
        mode: way to predict; None: the usual one.
        progress: called with ("reference", images done, images in all).
    """
    reference = open_data(data, "train", root=root) if data is not None else training_images(model)
    if reference is None:
        note("the run's training images are not found; name other images to see answers without a role")
    return Explainer(model, reference, None if roles is None else read_roles(roles), mode, progress)


def training_images(model: Model) -> ImageSet | None:
    """The images a model was trained on, where they can still be opened."""
    spec = model.spec
    if spec is None or spec.data is None:
        return None
    try:
        return open_data(spec.data, spec.split, root=spec.root)
    except DataError:
        return None


def page_facts(
    explainer: Explainer, found: Sequence[Explanation], images: Sequence[Image.Image]
) -> ExplainFacts:
    """What the page of some images shows."""
    model = explainer.model
    reference = explainer.reference
    notes = {
        "model": f"{explainer.method.title} on {model.clip.name}, mode {explainer.mode}",
        "classes": ", ".join(model.classes[:20]) + (" …" if len(model.classes) > 20 else ""),
        "sum": "the bars of a class sum to its score"
        if all(one.exact == 1 for one in found)
        else f"{percent(min(one.exact for one in found))} of the score is taken apart",
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
    image = seen(image, explainer.model)
    classes = (one.answer, one.other)
    sure = dict(one.probabilities)
    own = Thumbnail(
        thumbnail(image, 224), "the image", (("name", one.answer), ("soft", percent(sure[one.answer])))
    )
    strongest = float(one.maps[""].abs().max())
    maps = [
        heat(
            image,
            one.maps[""][k],
            f"where {name} comes from",
            ("name", f"where {name} comes from"),
            ("soft", f"score {one.scores[k]:+.2f}, {percent(sure[name])}"),
            scale=strongest,
        )
        for k, name in enumerate(classes)
    ]
    groups = sorted(explainer.groups.heads, key=lambda g: -float(one.maps[g][0].abs().sum()))[:8]
    bars = {bar.name: bar for bar in one.bars}
    largest = max(float(one.maps[group][0].abs().max()) for group in groups)
    return ImageFacts(
        name=os.path.basename(one.image) or one.image,
        sentence=one.sentence,
        classes=classes,
        images=(own, *maps),
        bars=bar_rows(one.bars),
        roles=tuple(
            heat(
                image,
                one.maps[group][0],
                group,
                ("name", group),
                ("soft", f"{bars[group].answer:+.2f}"),
                scale=largest,
            )
            for group in groups
        ),
        heads=Table(
            ("head", "role", "looks at", *classes),
            tuple(
                (
                    f"layer {head.layer}, head {head.head}",
                    head.group,
                    "; ".join(head.phrases[:3]),
                    f"{head.answer:+.2f}",
                    f"{head.other:+.2f}",
                )
                for head in one.heads
            ),
            labels=3,
        ),
        without=without_table(one),
        neighbors=_neighbors(explainer, one),
        notices=one.notices,
    )


def bar_rows(bars: Sequence[Bar]) -> tuple[BarRow, ...]:
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


def without_table(one: Explanation, most: int = 6) -> Table | None:
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
    from dear._io.image_file import resize_crop

    view = resize_crop(image, model.clip.config.view)
    return Image.fromarray(view.permute(1, 2, 0).numpy())


def read_images(names: Sequence[PathLike]) -> list[Image.Image]:
    """Images of files."""
    return [open_image(name) for name in names]


def set_facts(explainer: Explainer, found: SetExplanation, images: ImageSet, most: int = 8) -> SetFacts:
    """What the page of a set shows."""
    rows, marks = [], []
    order = found.values.abs().mean(0).argsort(descending=True).tolist()[:most]
    for label, name in enumerate(found.classes):
        for right in (True, False):
            chosen = (found.labels == label) & ((found.answers == found.labels) == right)
            mixture = found.mixture(label, right)
            if mixture is None:
                continue
            first = found.parts[int(mixture.argmax())]
            values = tuple(f"{float(mixture[place]):+.2f}" for place in order)
            rows.append((name, "right" if right else "wrong", first, str(int(chosen.sum())), *values))
            marks.append("first" if right else "")
    names = {images.key(row): row for row in range(len(images))}
    unusual = tuple(
        Thumbnail(
            thumbnail(images.image(names[found.images[place]])),
            "an image answered for an unusual reason",
            (
                ("name", f"answered {found.classes[int(found.answers[place])]}"),
                (
                    "right" if found.answers[place] == found.labels[place] else "wrong",
                    f"is {found.classes[int(found.labels[place])]}",
                ),
                ("soft", f"{distance:.1f} standard deviations"),
            ),
        )
        for place, distance in zip(found.unusual, found.distances, strict=True)
    )
    accuracy = float((found.answers == found.labels).float().mean())
    return SetFacts(
        title=f"Why: {found.name}",
        lead=f"{len(found.labels)} images, answered by {explainer.method.title}.",
        tiles=((str(len(found.labels)), "images"), (percent(accuracy), "answered right")),
        table=Table(
            ("class", "answers", "mostly by", "images", *(found.parts[place] for place in order)),
            tuple(rows),
            3,
            tuple(marks),
        ),
        unusual=unusual,
        notices=found.notices,
        notes={"model": f"{explainer.method.title} on {explainer.model.clip.name}, mode {explainer.mode}"},
    )


def check_question(model: Model, answer: str | None, against: str | None) -> None:
    """Refuse classes that the model does not have, before any work."""
    for name in (answer, against):
        if name is not None and name.casefold() not in {known.casefold() for known in model.classes}:
            raise UsageError(f"the model has no class {name!r}; it has {', '.join(model.classes[:12])}")
