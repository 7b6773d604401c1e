"""Shortcuts in real images: objects on textures, and PACS with every class tied to a domain.

    python research/shortcuts/real.py composites --backbone FOLDER --objects caltech101/index.csv \
        --backgrounds dtd/index.csv --out research/results/shortcuts_real.csv
    python research/shortcuts/real.py domains --backbone FOLDER --data pacs/index.csv --out …

A composite is a real object image, scaled to a share of the frame's side, on a real background; no masks are
needed. Six classes are drawn from the twenty that the backbone tells best zero-shot in their plain training
images: where it cannot see the object, nothing can be learned but the background. In training every class has
a background (or domain) of its own, in the test all occur, with equally many images. A logistic regression on
the frozen features is measured: balanced (trained on as many images with all backgrounds: what the backbone
allows), untouched, without the concept's words, without the span of examples (ten per value, of other
classes), without LEACE on the same, without the span of bare backgrounds (composites only), without the
truest heads (those whose contribution the value explains best on the examples), automatic, and random heads.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from measure.script import add_options, numbers, parser_of, record
from measure.world import probe, scored
from PIL import Image, ImageOps
from torch import Tensor

import dear
from dear.data import open_data
from dear.data.images import ImageSet, ListedImages
from dear.heads.collect import HeadContributions, collect_contributions
from dear.heads.concept_words import Concept, value_features
from dear.heads.explained_variance import explained_variance
from dear.shortcuts.concept_trials import choose_concept_removal
from dear.shortcuts.removal import Removal, remove_examples, remove_heads, remove_span

HEADS, DRAWS, SIDE, EASY = 8, 5, 224, 20


@dataclass(frozen=True)
class Sets:
    """Images with the shortcut and without, test images, and examples of the values (their classes)."""

    train: ListedImages
    balanced: ListedImages
    test: ListedImages
    examples: ListedImages
    bare: ListedImages | None
    concept: str


def composite(subject: Image.Image, background: Image.Image, share: float, rng: random.Random) -> Image.Image:
    """A subject at a share of the frame's side, somewhere on a background that fills the frame."""
    frame = ImageOps.fit(background.convert("RGB"), (SIDE, SIDE))
    side = round(SIDE * share)
    small = ImageOps.fit(subject.convert("RGB"), (side, side))
    frame.paste(small, (rng.randrange(SIDE - side + 1), rng.randrange(SIDE - side + 1)))
    return frame


def by_class(images: ImageSet, name: str) -> list[int]:
    label = images.classes.index(name)
    return [index for index, figures in enumerate(images.labels.tolist()) if figures == label]


def listed(items: list[tuple[Image.Image, int, str]], classes: tuple[str, ...]) -> ListedImages:
    """Images, labels and values as a set with groups."""
    opened, labels, values = zip(*items, strict=True)
    return ListedImages(tuple(opened), torch.tensor(labels), classes, groups=tuple(values))


@lru_cache(maxsize=1)
def easy_classes(clip: dear.Clip, source: str) -> tuple[str, ...]:
    """The classes that zero-shot tells best in their plain training images."""
    images = open_data(source, "train")
    features = F.normalize(
        collect_contributions(clip, images, clip.config.vision.last_third[-1:]).features, dim=-1
    )
    texts = clip.encode_text([f"a photo of a {name}." for name in images.classes]).float()
    right = ((features @ F.normalize(texts, dim=-1).T).argmax(dim=1) == images.labels).double()
    share = {name: float(right[by_class(images, name)].mean()) for name in images.classes}
    return tuple(sorted(share, key=lambda name: (-share[name], name))[:EASY])


def composites(clip: dear.Clip, args: argparse.Namespace, seed: int) -> Sets:
    """Six classes on six textures."""
    rng = random.Random(seed)
    train, test = (open_data(args.objects, split) for split in ("train", "test"))
    backs, other_backs = (open_data(args.backgrounds, split) for split in ("train", "test"))
    classes = tuple(rng.sample(easy_classes(clip, args.objects), 6))
    others = [name for name in train.classes if name not in classes]
    values = tuple(rng.sample(list(backs.classes), 6))

    def made(objects: ImageSet, name: str, ground: ImageSet, value: str, count: int) -> list[Image.Image]:
        places, grounds = by_class(objects, name), by_class(ground, value)
        return [
            composite(objects.image(rng.choice(places)), ground.image(rng.choice(grounds)), args.share, rng)
            for _ in range(count)
        ]

    def learned(value_of: Callable[[int, int], str]) -> ListedImages:
        made_of = [
            (made(train, name, backs, value_of(label, number), 1)[0], label, value_of(label, number))
            for label, name in enumerate(classes)
            for number in range(16)
        ]
        return listed(made_of, classes)

    check = [
        (image, label, value)
        for label, name in enumerate(classes)
        for value in values
        for image in made(test, name, other_backs, value, args.test)
    ]
    shown = [
        (image, number, value)
        for number, value in enumerate(values)
        for image in (made(train, rng.choice(others), backs, value, 1)[0] for _ in range(10))
    ]
    bare = [(backs.image(row), number, v) for number, v in enumerate(values) for row in by_class(backs, v)]
    return Sets(
        learned(lambda label, number: values[label]),
        learned(lambda label, number: values[number % 6]),
        listed(check, classes),
        listed(shown, values),
        listed(bare, values),
        "texture",
    )


def domains(clip: dear.Clip, args: argparse.Namespace, seed: int) -> Sets:
    """Four classes of PACS, each in a domain of its own in training; the others are examples."""
    rng = random.Random(seed)
    train, test = (open_data(args.data, split) for split in ("train", "test"))
    assert train.domains is not None
    values = tuple(sorted(set(train.domains)))
    classes = tuple(rng.sample(list(train.classes), len(values)))

    def of(images: ImageSet, name: str, value: str, count: int) -> list[Image.Image]:
        assert images.domains is not None
        places = [index for index in by_class(images, name) if images.domains[index] == value]
        return [images.image(index) for index in rng.sample(places, min(count, len(places)))]

    learn = [(im, y, values[y]) for y, name in enumerate(classes) for im in of(train, name, values[y], 16)]
    even = [(im, y, v) for y, name in enumerate(classes) for v in values for im in of(train, name, v, 4)]
    check = [(im, y, v) for y, name in enumerate(classes) for v in values for im in of(test, name, v, 50)]
    others = [name for name in train.classes if name not in classes]
    shown = [(im, k, v) for k, v in enumerate(values) for name in others for im in of(train, name, v, 4)]
    learned, balanced, tested = (listed(part, classes) for part in (learn, even, check))
    return Sets(learned, balanced, tested, listed(shown, values), None, "style")


def ways(clip: dear.Clip, sets: Sets, seen: HeadContributions) -> list[tuple[str, int, Removal, str]]:
    """(way, draw, removal, chosen)."""
    layers, concept, shown = clip.config.vision.last_third, sets.concept, sets.examples
    examples = collect_contributions(clip, shown, layers)
    words = tuple(name.replace("_", " ") for name in shown.classes)
    named = Concept(concept, words, ("{}", "a photo of {}.", f"a {{}} {concept}"))
    offers = {
        "words": remove_span(seen, value_features(clip, named)[1], concept),
        "examples": remove_examples(seen, examples.features, shown.labels, concept),
        "leace": remove_examples(seen, examples.features, shown.labels, concept, leace=True),
    }
    if sets.bare is not None:
        bare = collect_contributions(clip, sets.bare, layers[-1:]).features
        offers["bare backgrounds"] = remove_examples(seen, bare, sets.bare.labels, concept)
    share = explained_variance(examples.outputs, examples.maps, shown.labels).flatten()
    count = len(share) // len(seen.layers)
    order = share.argsort(descending=True).tolist()
    ranked = [(seen.layers[place // count], place % count) for place in order]
    truest = remove_heads(seen, ranked[:HEADS], concept)
    offered = {"words": offers["words"], "examples": offers["examples"], "heads": truest}
    choice = choose_concept_removal(seen, sets.train.labels, offered)
    candidates = [(name, 0, repair, "") for name, repair in offers.items()]
    candidates += [("truest heads", 0, truest, ""), ("automatic", 0, choice.removal, choice.way)]
    rng = random.Random(1)
    for draw in range(DRAWS):
        candidates.append(("random heads", draw, remove_heads(seen, rng.sample(ranked, HEADS), "random"), ""))
    return candidates


def measured(learn: Tensor, labels: Tensor, test: Tensor, images: ListedImages) -> dict[str, float]:
    """Accuracy of a logistic regression."""
    weight, bias = probe(learn, labels)
    answers = (F.normalize(test, dim=-1) @ weight.T + bias).argmax(dim=1)
    accuracy, worst = scored(answers, images.labels, images.groups or ())
    return {"accuracy": round(accuracy, 4), "worst_group": round(worst, 4)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("task", choices=("composites", "domains"))
    parser.add_argument("--backbone", required=True)
    add_options(parser, objects=str, backgrounds=str, data=str)
    add_options(parser, share=(0.5, "the object's share of the frame's side"))
    add_options(parser, test=(12, "test images per class and background"))
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    clip = dear.load(args.backbone)
    layers = clip.config.vision.last_third
    build = composites if args.task == "composites" else domains
    for seed in args.seeds:
        sets = build(clip, args, seed)
        train, even, test = (
            collect_contributions(clip, part, layers) for part in (sets.train, sets.balanced, sets.test)
        )
        labels = sets.train.labels
        rows = [
            ("balanced", 0, "", measured(even.features, sets.balanced.labels, test.features, sets.test)),
            ("untouched", 0, "", measured(train.features, labels, test.features, sets.test)),
        ]
        for way, draw, repair, chosen in ways(clip, sets, train):
            rows.append(
                (way, draw, chosen, measured(repair.apply(train), labels, repair.apply(test), sets.test))
            )
        share = args.share if args.task == "composites" else ""
        head = {"task": args.task, "share": share, "seed": seed}
        candidates = [
            {**head, "way": way, "draw": draw, **figures, "chosen": chosen}
            for way, draw, chosen, figures in rows
        ]
        record(args.out, candidates, machine_last=True)


if __name__ == "__main__":
    main()
