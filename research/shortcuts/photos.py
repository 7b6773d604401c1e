r"""Marks in photos: are they found, does a model use them, can it be repaired?

    python research/shortcuts/photos.py find --data caltech101/index.csv oxford_pets/index.csv \
        --out research/results/shortcuts_photos.csv
    python research/shortcuts/photos.py repair --data … --backbone FOLDER --seeds 1 2 3 \
        --out research/results/shortcuts_photos_repair.csv
    python research/shortcuts/photos.py repair --method dear --data … --backbone FOLDER --marks blur \
        --out research/results/shortcuts_photos_dear.csv
    python research/shortcuts/photos.py reliance --data caltech101/index.csv --backbone FOLDER \
        --out research/results/shortcuts_photos_own.csv
    python research/shortcuts/photos.py anchor --data … --out research/results/shortcuts_photos_anchor.csv

A draw is ten classes with up to 30 images each, of all splits; classes that the audit finds in the data as
they are (`dear audit --data`) are left out. *find*: every mark in one class of five draws per dataset each;
found means that this class comes first and its kind is named. Then forty draws as they are: every finding
counts as a false alarm. *anchor*: CleanVision on the same draws.

*repair*: eight classes, 16 images each to learn from and up to 12 to test on; a logistic regression on the
backbone's features, or DeAR. Columns: accuracy on the test images; share of test images of the other classes
that get the marked class's name as they are (plain) and with the mark planted into them (marked). The repair
is chosen by cross-validation on the training images with the product's own edits, never with the planted mark
itself. *reliance*: a model trained on the data as it is, and what its own classes' marks do to the answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from measure.script import add_options, parser_of, where
from photo_anchor import anchor
from photo_reliance import reliance
from photo_repair import repair
from photo_sets import CLASSES, MOST, NAMES, Photos, joined, listed
from PIL import Image
from plants import PLANTS, plant

from dear.shortcuts.find import Shortcut, find_shortcuts
from dear.shortcuts.properties import ImageMeasurements, measure_properties
from dear.tasks.speed import add_rows

DRAWS, CLEAN = 5, 20


def measured_with(
    photos: Photos, drawn: list[list[int]], planted: Sequence[Image.Image]
) -> ImageMeasurements:
    """What was measured of a draw, the images of its first class replaced."""
    rest = photos.measured.subset([place for places in drawn[1:] for place in places])
    return joined(measure_properties(listed(planted, [0] * len(planted), ("marked",))), rest)


def find(args: argparse.Namespace) -> None:
    rows = []
    for source in args.data:
        photos = Photos(source)
        for number, (name, (_, kinds)) in enumerate(PLANTS.items()):
            for seed in range(DRAWS):
                drawn = photos.draw(CLASSES, MOST, np.random.default_rng((seed, number)))
                labels = [label for label, places in enumerate(drawn) for _ in places]
                planted = plant(name, [photos.image(place) for place in drawn[0]], seed)
                shortcuts = find_shortcuts(measured_with(photos, drawn, planted), labels, NAMES)
                first = shortcuts[0] if shortcuts else None
                named = first is not None and first.label == 0 and first.kind in kinds
                rows.append(_row(photos, name, seed, shortcuts, int(named), len(planted)))
        for seed in range(CLEAN):
            drawn = photos.draw(CLASSES, MOST, np.random.default_rng((seed, 99)))
            labels = [label for label, places in enumerate(drawn) for _ in places]
            measured = photos.measured.subset([place for places in drawn for place in places])
            shortcuts = find_shortcuts(measured, labels, NAMES)
            rows.append(_row(photos, "none", seed, shortcuts, int(bool(shortcuts)), len(drawn[0])))
    add_rows(args.out, rows)
    _summary(rows)


def _row(
    photos: Photos, mark: str, seed: int, shortcuts: Sequence[Shortcut], hit: int, images: int
) -> dict[str, object]:
    first = shortcuts[0] if shortcuts else None
    return {
        "dataset": photos.name, "mark": mark, "draw": seed, "images": images, "named_or_alarm": hit,
        "findings": len(shortcuts), "kind": "" if first is None else first.kind,
        "look": "" if first is None else first.look, "score": "" if first is None else round(first.score, 3),
        **where(),
    }  # fmt: skip


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


def main() -> None:
    parser = parser_of(__doc__)
    parts = {"find": find, "repair": repair, "reliance": reliance, "anchor": anchor}
    parser.add_argument("what", choices=tuple(parts))
    parser.add_argument(
        "--data", nargs="+", required=True, help="tables of images, as dear.data.open_data takes them"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--method", default="linear-probe", choices=("linear-probe", "dear"))
    parser.add_argument("--marks", nargs="*", help="some of the marks")
    add_options(parser, backbone=(str, "for repair and reliance: what dear.load takes"))
    add_options(parser, classes=(0, "of reliance: at most so many; 0: all"))
    add_options(parser, others=(60, "of reliance: test images of other classes"))
    add_options(parser, seeds=([1], "draws of repair and anchor"))
    args = parser.parse_args()
    parts[args.what](args)


if __name__ == "__main__":
    main()
