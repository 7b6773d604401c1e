"""Eight marks planted into one class of photos: are they found, does a probe use them, can it be repaired?

    python benchmarks/shortcuts_photos.py find --data caltech101/index.csv oxford_pets/index.csv \
        --out benchmarks/results/shortcuts_photos.csv
    python benchmarks/shortcuts_photos.py repair --data … --backbone FOLDER \
        --out benchmarks/results/shortcuts_photos_repair.csv

A draw is ten classes with up to 30 images each, of all splits; classes that the audit finds in the data as
they are (`dear audit --data`) are left out. *find*: every mark in one class of five draws per dataset each;
found means that this class comes first and its kind is named. Then forty draws as they are: every finding
counts as a false alarm.

*repair*: eight classes, 16 images each to learn from and up to 12 to test on; a logistic regression on the
backbone's features. Columns: accuracy on the test images; share of test images of the other classes that get
the marked class's name as they are (plain) and with the mark planted into them (marked). The repair is chosen
by cross-validation on the training images with the product's own edits, never with the planted mark itself.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from shortcut_plants import PLANTS, plant
from torch import Tensor

import dear
from dear.data import open_data
from dear.data.images import ImageSet, ListedImages
from dear.photos import Measured, Shortcut, find_shortcuts, measure
from dear.photos.directions import edit_directions, random_directions
from dear.photos.edits import random_edit, transfer
from dear.runs.batches import over_batches, pixels_for
from dear.workflows.speed import add_rows, machine

CLASSES, MOST, DRAWS, CLEAN = 10, 30, 5, 20
LEARN, TEST, FOLDS, RANDOM = 16, 12, 4, 5
NAMES = tuple(str(number) for number in range(CLASSES))


class Photos:
    """All images of a dataset, measured once, without the classes that stand out as they are."""

    def __init__(self, source: str) -> None:
        parts = [open_data(source, split) for split in ("train", "test")]
        self.name = Path(source).parent.name
        self.images = [(part, index) for part in parts for index in range(len(part))]
        self.labels = torch.cat([part.labels for part in parts]).numpy()
        self.classes = parts[0].classes
        found = [measure(part) for part in parts]
        own = find_shortcuts(found[0], parts[0].labels.tolist(), self.classes)
        self.own = {one.class_name for one in own}
        values, small, hashes = (
            np.concatenate([getattr(one, name) for one in found]) for name in ("values", "small", "hashes")
        )
        self.measured = Measured(values, small, hashes, (None,) * len(values))

    def image(self, place: int) -> Image.Image:
        """One image."""
        part, index = self.images[place]
        return part.image(index)

    def draw(self, count: int, most: int, rng: np.random.Generator) -> list[list[int]]:
        """Images of some classes, at most so many of each."""
        usable = [label for label, name in enumerate(self.classes) if name not in self.own]
        chosen = rng.choice(usable, count, replace=False)
        return [rng.permutation(np.flatnonzero(self.labels == label))[:most].tolist() for label in chosen]


def measured_with(photos: Photos, drawn: list[list[int]], planted: Sequence[Image.Image]) -> Measured:
    """What was measured of a draw, the images of its first class replaced."""
    rest = photos.measured.subset([place for own in drawn[1:] for place in own])
    images = ListedImages(tuple(planted), torch.zeros(len(planted), dtype=torch.int64), ("marked",))
    first = measure(images)
    joined = (
        np.concatenate([getattr(one, name) for one in (first, rest)])
        for name in ("values", "small", "hashes")
    )
    return Measured(*joined, (None,) * (len(first) + len(rest)))


def find(args: argparse.Namespace) -> None:
    rows = []
    for source in args.data:
        photos = Photos(source)
        for number, (name, (_, kinds)) in enumerate(PLANTS.items()):
            for seed in range(DRAWS):
                drawn = photos.draw(CLASSES, MOST, np.random.default_rng((seed, number)))
                labels = [label for label, own in enumerate(drawn) for _ in own]
                planted = plant(name, [photos.image(place) for place in drawn[0]], seed)
                found = find_shortcuts(measured_with(photos, drawn, planted), labels, NAMES)
                first = found[0] if found else None
                named = first is not None and first.label == 0 and first.kind in kinds
                rows.append(_row(photos, name, seed, found, int(named), len(planted)))
        for seed in range(CLEAN):
            drawn = photos.draw(CLASSES, MOST, np.random.default_rng((seed, 99)))
            labels = [label for label, own in enumerate(drawn) for _ in own]
            measured = photos.measured.subset([place for own in drawn for place in own])
            found = find_shortcuts(measured, labels, NAMES)
            rows.append(_row(photos, "none", seed, found, int(bool(found)), len(drawn[0])))
    add_rows(Path(args.out), rows)
    _summary(rows)


def _row(
    photos: Photos, mark: str, seed: int, found: Sequence[Shortcut], hit: int, images: int
) -> dict[str, object]:
    first = found[0] if found else None
    return {
        "dataset": photos.name, "mark": mark, "draw": seed, "images": images, "named_or_alarm": hit,
        "findings": len(found), "kind": "" if first is None else first.kind,
        "look": "" if first is None else first.look, "score": "" if first is None else round(first.score, 3),
        **_where(),
    }  # fmt: skip


def _where() -> dict[str, object]:
    known = machine(torch.device("cpu"))
    return {name: known[name] for name in ("date", "machine", "torch", "dear")}


def _hit(row: dict[str, object]) -> int:
    return int(str(row["named_or_alarm"]))


def _summary(rows: Sequence[dict[str, object]]) -> None:
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        for mark in (*PLANTS, "none"):
            hits = [_hit(row) for row in rows if (row["dataset"], row["mark"]) == (dataset, mark)]
            print(f"{dataset:12s} {mark:12s} {sum(hits)} of {len(hits)}")
    marked = [_hit(row) for row in rows if row["mark"] != "none"]
    clean = [_hit(row) for row in rows if row["mark"] == "none"]
    print(f"named first {np.mean(marked):.1%} of {len(marked)}")
    print(f"false alarms {np.mean(clean):.1%} of {len(clean)}")


def features(clip: dear.Clip, images: Sequence[Image.Image]) -> Tensor:
    def encode(some: ImageSet, rows: list[int]) -> Tensor:
        return clip.encode_image(pixels_for(clip, some, rows)).float().cpu()

    return torch.cat(over_batches(list(images), encode, clip.device)[0])


class Probe:
    """Logistic regression on unit features, with directions removed from the centered feature or not."""

    def __init__(self, seen: Tensor, labels: np.ndarray, removed: Tensor | None = None) -> None:
        from sklearn.linear_model import LogisticRegression

        self.removed, self.center = removed, seen.mean(dim=0)
        self.model = LogisticRegression(C=100, max_iter=200).fit(self._read(seen), labels)

    def _read(self, seen: Tensor) -> np.ndarray:
        if self.removed is not None:
            basis = self.removed.float()
            seen = seen - (seen - self.center) @ basis.T @ basis
        return torch.nn.functional.normalize(seen, dim=-1).numpy()

    def __call__(self, seen: Tensor) -> np.ndarray:
        """Labels of features [n, E]."""
        answers: np.ndarray = self.model.predict(self._read(seen))
        return answers


def trained(way: str, seen: Tensor, copies: Tensor, labels: np.ndarray, seed: int = 1) -> Probe:
    """The probe without a repair ("nothing"), or with one."""
    if way == "copies":
        return Probe(torch.cat((seen, *copies)), np.tile(labels, 1 + len(copies)))
    if way == "directions":
        return Probe(seen, labels, edit_directions(seen.repeat(len(copies), 1), torch.cat(list(copies))))
    return Probe(seen, labels, random_directions(seen.shape[1], seed=seed) if way == "random" else None)


def choose(seen: Tensor, copies: Tensor, labels: np.ndarray) -> str:
    """The way with the fewest extra answers on folds that were not trained on, plain accuracy kept."""
    scores = {}
    for way in ("nothing", "copies", "directions"):
        right, extra = [], []
        for fold in range(FOLDS):
            held = np.arange(len(labels)) % FOLDS == fold
            probe = trained(way, seen[~held], copies[:, ~held], labels[~held])
            plain, moved = probe(seen[held]), probe(copies[1, held])
            other = labels[held] != 0
            right.append((plain == labels[held]).mean())
            extra.append((moved == 0)[other].mean() - (plain == 0)[other].mean())
        scores[way] = (float(np.mean(right)), float(np.mean(extra)))
    usable = {way: one for way, one in scores.items() if one[0] >= scores["nothing"][0] - 0.03}
    return min(usable, key=lambda way: round(usable[way][1], 3))


class Sets:
    """Eight classes of a dataset to learn from and to test on, with their features as they are."""

    def __init__(self, photos: Photos, clip: dear.Clip, seed: int) -> None:
        drawn = photos.draw(8, LEARN + TEST, np.random.default_rng(seed))
        self.name = photos.name
        self.images = [photos.image(place) for own in drawn for place in own[:LEARN]]
        self.labels = np.repeat(np.arange(8), LEARN)
        self.test = [(photos.image(place), label) for label, own in enumerate(drawn) for place in own[LEARN:]]
        self.clean = features(clip, self.images)
        self.tested = features(clip, [image for image, _ in self.test])


def repair(args: argparse.Namespace) -> None:
    clip = dear.load(args.backbone)
    for source in args.data:
        sets = Sets(Photos(source), clip, args.seed)
        for name in args.marks or PLANTS:
            row = _cell(clip, sets, name)
            add_rows(Path(args.out), [row])
            print({key: value for key, value in row.items() if key not in _where()}, flush=True)


def _cell(clip: dear.Clip, sets: Sets, name: str) -> dict[str, object]:
    """One mark in the first class: the probe untouched, repaired, random directions, and on clean photos."""
    rng, labels = random.Random(1), sets.labels
    marked = plant(name, sets.images[:LEARN])
    images = [*marked, *sets.images[LEARN:]]
    seen = torch.cat((features(clip, marked), sets.clean[LEARN:]))
    classes = [str(number) for number in range(8)]
    measured = measure(ListedImages(tuple(images), torch.tensor(labels), tuple(classes)))
    found = next((one for one in find_shortcuts(measured, labels.tolist(), classes) if one.label == 0), None)
    result: dict[str, object] = {"dataset": sets.name, "mark": name, "found": "", "chosen": ""}
    ways = ["nothing"]
    copies = seen[None]
    if found is not None:
        mask = None if found.mark is None else found.mark.mask
        varied = features(clip, [random_edit(found.kind, image, rng) for image in images])
        toward = [transfer(found.kind, image, rng.choice(marked), mask, found.name) for image in images]
        copies = torch.stack((varied, features(clip, toward)))  # [2, n, E]
        chosen = choose(seen, copies, labels)
        result |= {"found": found.kind, "chosen": chosen}
        ways += ["copies", "directions"]
    others = [(image, label) for image, label in sets.test if label != 0]
    planted = features(clip, [PLANTS[name][0](image, rng) for image, _ in others])
    truth = np.array([label for _, label in sets.test])

    def called(probe: Probe) -> tuple[float, ...]:
        plain = probe(sets.tested)
        right, before = (plain == truth).mean(), (plain[truth != 0] == 0).mean()
        return float(right), float(before), float((probe(planted) == 0).mean())

    figures = {way: called(trained(way, seen, copies, labels)) for way in ways}
    drawn = [called(trained("random", seen, copies, labels, seed)) for seed in range(RANDOM)]
    figures["random"] = tuple(float(np.mean(column)) for column in zip(*drawn, strict=True))
    figures["clean"] = called(Probe(sets.clean, labels))
    for way in ("nothing", "copies", "directions", "random", "clean"):
        for title, value in zip(("accuracy", "plain", "marked"), figures.get(way, ("",) * 3), strict=True):
            result[f"{way}_{title}"] = value if value == "" else round(float(value), 4)
    return result | _where()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("find", "repair"))
    parser.add_argument(
        "--data", nargs="+", required=True, help="tables of images, as dear.data.open_data takes them"
    )
    parser.add_argument("--backbone", help="for repair: what dear.load takes")
    parser.add_argument("--marks", nargs="*", help="some of the marks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    (find if args.what == "find" else repair)(args)


if __name__ == "__main__":
    main()
