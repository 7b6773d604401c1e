"""Shortcuts in real images: objects on textures, and PACS with every class tied to a domain.

    python benchmarks/shortcuts_real.py composites --backbone FOLDER --objects caltech101/index.csv \
        --backgrounds dtd/index.csv --out benchmarks/results/shortcuts_real.csv
    python benchmarks/shortcuts_real.py domains --backbone FOLDER --data pacs/index.csv --out …

A composite is a real object image, scaled to a share of the frame, on a real background; no masks are needed.
In training every class has a background (or domain) of its own, in the test all occur. A logistic regression
on the frozen features is measured untouched, without the concept's words, without the span of examples,
without LEACE, and without the truest heads (those whose contribution the value explains best on the examples)
beside random heads.
"""

from __future__ import annotations

import argparse
import csv
import random
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from shortcuts import probe, scored
from torch import Tensor

import dear
from dear.data import open_data
from dear.data.images import ImageSet
from dear.data.listed import ListedImages
from dear.heads.ablate import Collected, collect
from dear.heads.choose import choose
from dear.heads.repair import Repair, remove_examples, remove_heads, remove_span
from dear.heads.truth import explained_variance
from dear.heads.values import Concept, value_features

FIELDS = ("task", "seed", "way", "draw", "accuracy", "worst_group", "chosen")
HEADS, DRAWS, SIDE = 8, 5, 224


def composite(subject: Image.Image, background: Image.Image, share: float, rng: random.Random) -> Image.Image:
    """A subject at a share of the frame's side, somewhere on a background that fills the frame."""
    frame = ImageOps.fit(background.convert("RGB"), (SIDE, SIDE))
    side = round(SIDE * share)
    small = ImageOps.fit(subject.convert("RGB"), (side, side))
    frame.paste(small, (rng.randrange(SIDE - side + 1), rng.randrange(SIDE - side + 1)))
    return frame


def by_class(images: ImageSet, name: str) -> list[int]:
    label = images.classes.index(name)
    return [index for index, own in enumerate(images.labels.tolist()) if own == label]


def listed(items: list[tuple[Image.Image, int, str]], classes: tuple[str, ...]) -> ListedImages:
    """Images, labels and values as a set with groups."""
    opened, labels, values = zip(*items, strict=True)
    return ListedImages(tuple(opened), torch.tensor(labels), classes, groups=tuple(values))


def composites(args: argparse.Namespace, seed: int) -> tuple[ListedImages, ListedImages, ListedImages, str]:
    """Training, test and example images: six classes on six textures."""
    rng = random.Random(seed)
    train, test = (open_data(args.objects, split) for split in ("train", "test"))
    backs, other_backs = (open_data(args.backgrounds, split) for split in ("train", "test"))
    classes = tuple(rng.sample([name for name in train.classes if len(by_class(test, name)) >= 6], 6))
    others = [name for name in train.classes if name not in classes]
    values = tuple(rng.sample(list(backs.classes), 6))

    def made(objects: ImageSet, name: str, ground: ImageSet, value: str, count: int) -> list[Image.Image]:
        places, grounds = by_class(objects, name), by_class(ground, value)
        return [
            composite(objects.image(rng.choice(places)), ground.image(rng.choice(grounds)), args.share, rng)
            for _ in range(count)
        ]

    learn = [
        (image, label, values[label])
        for label, name in enumerate(classes)
        for image in made(train, name, backs, values[label], 16)
    ]
    check = [
        (image, label, value)
        for label, name in enumerate(classes)
        for value in values
        for image in made(test, name, other_backs, value, 5)
    ]
    shown = [
        (image, number, value)
        for number, value in enumerate(values)
        for image in (made(train, rng.choice(others), backs, value, 1)[0] for _ in range(10))
    ]
    return listed(learn, classes), listed(check, classes), listed(shown, values), "texture"


def domains(args: argparse.Namespace, seed: int) -> tuple[ListedImages, ListedImages, ListedImages, str]:
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
    check = [(im, y, v) for y, name in enumerate(classes) for v in values for im in of(test, name, v, 10)]
    others = [name for name in train.classes if name not in classes]
    shown = [(im, k, v) for k, v in enumerate(values) for name in others for im in of(train, name, v, 4)]
    return listed(learn, classes), listed(check, classes), listed(shown, values), "style"


Builder = Callable[[argparse.Namespace, int], tuple[ListedImages, ListedImages, ListedImages, str]]


def ways(
    clip: dear.Clip, seen: Collected, examples: Collected, shown: ListedImages, concept: str, labels: Tensor
) -> list[tuple[str, int, Repair | None, str]]:
    """(way, draw, removal, chosen)."""
    words = tuple(name.replace("_", " ") for name in shown.classes)
    named = Concept(concept, words, ("{}", "a photo of {}.", f"a {{}} {concept}"))
    offers = {
        "words": remove_span(seen, value_features(clip, named)[1], concept),
        "examples": remove_examples(seen, examples.features, shown.labels, concept),
        "leace": remove_examples(seen, examples.features, shown.labels, concept, leace=True),
    }
    share = explained_variance(examples.outputs, examples.maps, shown.labels).flatten()
    count = len(share) // len(seen.layers)
    ranked = [
        (seen.layers[place // count], place % count) for place in share.argsort(descending=True).tolist()
    ]
    truest = remove_heads(seen, ranked[:HEADS], concept)
    choice = choose(seen, labels, {"words": offers["words"], "examples": offers["examples"], "heads": truest})
    found: list[tuple[str, int, Repair | None, str]] = [("untouched", 0, None, "")]
    found += [(name, 0, repair, "") for name, repair in offers.items()]
    found += [("truest heads", 0, truest, ""), ("automatic", 0, choice.repair, choice.way)]
    rng = random.Random(1)
    for draw in range(DRAWS):
        found.append(("random heads", draw, remove_heads(seen, rng.sample(ranked, HEADS), "random"), ""))
    return found


def main() -> None:
    """Parse, build, measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=("composites", "domains"))
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--objects")
    parser.add_argument("--backgrounds")
    parser.add_argument("--data")
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    clip = dear.load(args.backbone)
    layers = clip.config.vision.last_third
    build: Builder = composites if args.task == "composites" else domains
    out = Path(args.out)
    fresh = not out.exists()
    with out.open("a", newline="") as file:
        writer = csv.writer(file)
        if fresh:
            writer.writerow(FIELDS)
        for seed in range(1, args.seeds + 1):
            train, test, shown, concept = build(args, seed)
            seen, tested, examples = (collect(clip, images, layers) for images in (train, test, shown))
            for way, draw, repair, chosen in ways(clip, seen, examples, shown, concept, train.labels):
                parts = [
                    images.features if repair is None else repair.apply(images) for images in (seen, tested)
                ]
                weight, bias = probe(parts[0], train.labels)
                answers = (F.normalize(parts[1], dim=-1) @ weight.T + bias).argmax(dim=1)
                accuracy, worst = scored(answers, test.labels, test.groups or ())
                writer.writerow((args.task, seed, way, draw, round(accuracy, 4), round(worst, 4), chosen))
            file.flush()
            print(args.task, seed, flush=True)


if __name__ == "__main__":
    main()
