r"""Which concepts the audit finds when all images of one class show a value, and its alarms on clean images.

    python research/shortcuts/planted_concepts.py --backbone mini --csv research/results/planted_concepts.csv
    python research/shortcuts/planted_concepts.py --backbone SMALL \
        --csv research/results/planted_concepts.csv \
        --data DATA/caltech101/index.csv,DATA/dtd/index.csv,DATA/oxford_pets/index.csv

Without `--data`: in tasks of the attribute world one class shows one place, color, or texture, and no image
of the other classes does. With `--data`: the images of one class are tinted, or show a large letter. A
concept counts as found where it is associated with the labels, as `dear audit --data --backbone` decides;
`without_rule` is the same if a value of one class were compared with no random directions. `elsewhere` counts
findings of other concepts, and all findings where nothing was planted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from measure.script import arguments, record
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

import dear
from dear.data.images import ImageSet
from dear.data.shots import few_shot
from dear.heads.concept_words import known_concepts, readable_words, value_features
from dear.tasks.audit.association import Association, associate, nearest_values, one_class
from dear.tasks.audit.findings import ASSOCIATED
from dear.tasks.audit.verdict import judge
from dear.utils.text import fill_template

EACH, MOST = 16, 12  #: images per class, and classes, at most
KINDS = {"place": "Location", "color": "Color", "texture": "Texture"}
BALANCED = 0.17  #: share of a class's images with its own value where all values are as frequent

Plant = tuple[str, str, int, Tensor, Tensor]  #: name, concept, class (-1: none), features [n, E], labels [n]


def main() -> None:
    args = arguments(
        __doc__,
        backbone="mini",
        data=("", "labeled sets with commas between; empty: tasks of the attribute world"),
        classes=(6, "classes that show each value, one at a time"),
        csv=(Path, "file to which rows are added"),
    )
    clip = dear.load(args.backbone)
    sets = [partial(photos, clip, name, args.classes) for name in args.data.split(",") if name]
    for plants in sets or [partial(worlds, clip)]:
        rows: dict[tuple[str, str], dict[str, float]] = {}
        for images, (name, concept, label, features, labels) in plants():
            row = rows.setdefault((images.name, name), dict.fromkeys(COUNTS, 0))
            row["planted"] += label >= 0
            for rule, findings in verdicts(clip, images, features, labels).items():
                hit = label >= 0 and any(matches(one, concept, label) for one in findings)
                row[f"found{rule}"] += hit
                row[f"elsewhere{rule}"] += len(findings) - hit
        for (data, name), row in rows.items():
            facts = {"backbone": clip.name, "data": data, "plant": name}
            record(args.csv, [facts | row], machine_last=True)


COUNTS = ("planted", "found", "found_without_rule", "elsewhere", "elsewhere_without_rule")


def matches(one: Association, concept: str, label: int) -> bool:
    """Whether a finding is the planted one."""
    return one.concept == concept and (
        one.strong or (one.one_class is not None and one.one_class[0] == label)
    )


def verdicts(
    clip: dear.Clip, images: ImageSet, features: Tensor, labels: Tensor
) -> dict[str, list[Association]]:
    """The concepts that are associated with the labels, with the rule and without it."""
    names = clip.encode_text([fill_template(images.template, name) for name in images.classes]).float()
    concepts = [one for one in known_concepts().values() if len(readable_words(clip, one.words)) > 1]
    result: dict[str, list[Association]] = {"": [], "_without_rule": []}
    for concept in concepts:
        words, values = value_features(clip, concept)
        with_rule = associate(concept.name, words, values, features, labels, names)
        plain = one_class(with_rule.table, nearest_values(names, values))
        for rule, one in (("", with_rule), ("_without_rule", replace(with_rule, one_class=plain))):
            if judge(one, None, (), len(concepts), images.classes).verdict == ASSOCIATED:
                result[rule].append(one)
    return result


def worlds(clip: dear.Clip) -> Iterator[tuple[ImageSet, Plant]]:
    """One class with one value; the other classes show all others."""
    for kind, concept in KINDS.items():
        parts = []
        for share in (1.0, BALANCED):
            images = dear.open_data(f"world:shortcut-{kind}@{share}", "train")
            parts.append((images, clip.encode_image(images.pixels(range(len(images)), clip.config.view))))
        (aligned, aligned_features), (mixed, others) = parts
        yield mixed, ("none", "", -1, *first(others, mixed.labels, EACH))
        for label in range(len(mixed.classes)):
            value = aligned.groups[int((aligned.labels == label).nonzero()[0, 0])]
            rest = torch.tensor([group != value for group in mixed.groups]) & (mixed.labels != label)
            features = torch.cat([aligned_features[aligned.labels == label], others[rest]])
            labels = torch.cat([aligned.labels[aligned.labels == label], mixed.labels[rest]])
            yield mixed, (kind, concept, label, *first(features, labels, EACH))


def first(features: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` images of each class."""
    rows = torch.cat([(labels == label).nonzero()[:count, 0] for label in labels.unique()])
    return features[rows], labels[rows]


def photos(clip: dear.Clip, data: str, classes: int) -> Iterator[tuple[ImageSet, Plant]]:
    """One class tinted, or with a letter."""
    images = dear.open_data(data, "train")
    images = few_shot(images.select_classes(images.classes[:MOST]), EACH, 1)
    clean = encode(clip, images, lambda image: image)
    yield images, ("none", "", -1, clean, images.labels)
    for name, concept, edit in EDITS:
        for label in range(min(classes, len(images.classes))):
            rows = (images.labels == label).nonzero()[:, 0]
            features = clean.clone()
            features[rows] = encode(clip, images.subset(rows.tolist()), edit)
            yield images, (name, concept, label, features, images.labels)


def encode(clip: dear.Clip, images: ImageSet, edit: Callable[[Image.Image], Image.Image]) -> Tensor:
    """Features of edited images, [n, E]."""
    return clip.encode_image([edit(images.image(place).convert("RGB")) for place in range(len(images))])


def tint(color: tuple[int, int, int]) -> Callable[[Image.Image], Image.Image]:
    return lambda image: Image.blend(image, Image.new("RGB", image.size, color), 0.5)


def letter(image: Image.Image) -> Image.Image:
    image, font = image.copy(), ImageFont.load_default(size=round(0.5 * image.height))
    box = (0.02 * image.width, 0.02 * image.height)
    ImageDraw.Draw(image).text(
        box, "S", fill=(255, 255, 255), stroke_fill=(0, 0, 0), stroke_width=2, font=font
    )
    return image


EDITS = (
    ("red tint, 50 %", "Color", tint((255, 0, 0))),
    ("blue tint, 50 %", "Color", tint((0, 0, 255))),
    ("a large letter", "Text", letter),
)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
