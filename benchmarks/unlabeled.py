"""Accuracy with few labels, with and without unlabeled images, for every kind of method.

python benchmarks/unlabeled.py --backbone SMALL --datasets flowers/,pets/ --foreign cars/ --out unlabeled.csv

Labels are drawn from the training images and half of the test images; the other half is the test. Pools, all
without labels: "rest" is everything that was not drawn; "unbalanced" has 60 images of one class, 2 of
another, and a geometric series between; "foreign" is the rest and, to 30 % of the pool, images of --foreign;
"none" is labeled only. Labels are k random images per class ("random"); as many images in total at random, as
someone labels who cannot know the classes before ("any"); or those that `choose_next` names ("chosen").
Methods of the product run through `prepare` and `fit`, so that its decision counts. "probe" is that of
`dear.unlabeled`.

Rows are written as they are measured; --part 0/8 computes every eighth cell, --seconds starts no cell
afterwards.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from measure.transductive import scikit_learn, stata, transclip
from torch import Tensor

from dear.clip.factory import load
from dear.clip.model import Clip
from dear.data.images import FileImages, ImageSet, ListedImages, unlabeled_images
from dear.data.open import open_data
from dear.runs.feature_cache import FeatureCache
from dear.runs.spec import Spec
from dear.tasks.labeling.choose import text_features
from dear.train.fit import fit
from dear.train.setup.prepare import prepare
from dear.train.setup.roles import roles_for
from dear.unlabeled import UNLABELED, choose_next, decide_on_pool, fit_semi_supervised_probe

COLUMNS = (
    "dataset",
    "labels_per_class",
    "labels",
    "draw",
    "pool",
    "method",
    "accuracy",
    "pool_images",
    "used",
)
COLUMNS += ("foreign", "reason", "seconds")
PRODUCT = ("linear-probe", "lp-plus-plus", "proker", "mmrl", "dear")
TRAINED = ("mmrl", "dear")  # by steps through a tower
REFERENCES = ("transclip", "stata", "SelfTrainingClassifier", "LabelSpreading", "LogisticRegression")
MOST, LEAST, FOREIGN = 60, 2, 0.3


@dataclass(eq=False)
class Bench:
    """A backbone and datasets whose features are computed once."""

    clip: Clip
    files: Path  #: where images that are no files are written
    foreign: str = ""  #: dataset of the foreign images
    sets: dict[str, tuple[ListedImages, ListedImages]] = field(default_factory=dict)

    def open(self, name: str) -> tuple[ListedImages, ListedImages]:
        """Images to draw from, and test images."""
        if name not in self.sets:
            train, test = (open_data(name, split) for split in ("train", "test"))
            folder = self.files / name.replace(":", "-").replace("/", "-")
            generator = np.random.default_rng(0)
            rows: list[int] = []
            for label in range(len(test.classes)):
                members = generator.permutation(np.flatnonzero(test.labels.numpy() == label))
                rows += members[: len(members) // 2].tolist()
            rest = sorted(set(range(len(test))) - set(rows))
            first, more = listed(train, folder / "train"), listed(test, folder / "test")
            source = replace(
                first,
                items=(*first.items, *(more.items[row] for row in rows)),
                labels=torch.cat([first.labels, more.labels[rows]]),
            )
            self.sets[name] = (source, more.subset(rest))
        return self.sets[name]

    @lru_cache(maxsize=64)  # noqa: B019 - the bench lives as long as the process
    def features(self, name: str) -> tuple[Tensor, Tensor]:
        """Unit features of both, on the CPU."""
        return tuple(  # type: ignore[return-value]
            F.normalize(FeatureCache().image_features(self.clip, images), dim=1).cpu()
            for images in self.open(name)
        )

    def texts(self, name: str) -> Tensor:
        """Unit text features times CLIP's scale [C, E]."""
        images = self.open(name)[0]
        texts = text_features(self.clip, images.classes, images.template)
        assert texts is not None
        return texts.cpu()


def listed(images: ImageSet, folder: Path) -> ListedImages:
    """The images as a list of files, so that features are cached; others are written to `folder`."""
    if isinstance(images, FileImages):
        items = tuple(images.path(row) for row in range(len(images)))
    else:
        folder.mkdir(parents=True, exist_ok=True)
        items = tuple(folder / f"{row:05}.png" for row in range(len(images)))
        for row, path in enumerate(items):
            if not path.exists():
                images.image(row).save(path.with_suffix(f".{os.getpid()}.tmp"), "PNG")
                os.replace(path.with_suffix(f".{os.getpid()}.tmp"), path)
    return ListedImages(items, images.labels, images.classes, images.template, images.name)


@dataclass(frozen=True)
class Cell:
    """One setting; `rows` and `pool` are places in the images to draw from."""

    dataset: str
    shots: int
    choice: str
    draw: int
    pool: str

    def generator(self) -> np.random.Generator:
        """The same for every pool and method."""
        words = f"{Path(self.dataset).parent.name}{Path(self.dataset).name} {self.draw}"
        return np.random.default_rng(zlib.crc32(words.encode()))


def draw_cell(bench: Bench, cell: Cell) -> tuple[list[int], list[int], list[int]]:
    """Rows of the labeled images, of the pool, and of foreign images in the next dataset."""
    images = bench.open(cell.dataset)[0]
    labels, classes = images.labels.numpy(), len(images.classes)
    generator = cell.generator()
    order = [generator.permutation(np.flatnonzero(labels == label)) for label in range(classes)]
    drawn = [int(row) for rows in order for row in rows[: cell.shots]]
    if cell.choice == "any":
        drawn = cell.generator().permutation(len(labels))[: cell.shots * classes].tolist()
    elif cell.choice == "chosen":
        drawn = choose_rows(bench, cell, cell.shots * classes)
    chosen = set(drawn)
    rest = [[int(row) for row in rows if int(row) not in chosen] for rows in order]
    if cell.pool == "unbalanced":
        most = min(MOST, max(map(len, rest)))
        counts = generator.permutation(np.geomspace(max(most, LEAST), LEAST, classes).round().astype(int))
        rest = [rows[:count] for rows, count in zip(rest, counts, strict=True)]
    pool = [row for rows in rest for row in rows]
    foreign: list[int] = []
    if cell.pool == "foreign":
        other = bench.open(bench.foreign)[0]
        foreign = generator.permutation(len(other))[: round(len(pool) * FOREIGN / (1 - FOREIGN))].tolist()
    return drawn, pool, foreign


def choose_rows(bench: Bench, cell: Cell, budget: int) -> list[int]:
    """Rows that `choose_next` names: first one label per class on average, then twice as many, and so on."""
    images = bench.open(cell.dataset)[0]
    features, texts = bench.features(cell.dataset)[0], bench.texts(cell.dataset)
    truth = images.labels
    labels = torch.full_like(truth, UNLABELED)
    rows: list[int] = []
    target = len(images.classes)
    while len(rows) < budget:
        more = min(target, budget) - len(rows)
        chosen = choose_next(
            features, more, labels=labels if rows else None, texts=texts, seed=cell.draw
        ).tolist()
        if not chosen:
            break
        labels[chosen] = truth[chosen]
        rows += chosen
        target *= 2
    return rows


def measure(bench: Bench, cell: Cell, method: str, device: str) -> list[object]:
    """One row of the table without the columns of the cell."""
    images, test = bench.open(cell.dataset)
    drawn, pool, foreign = draw_cell(bench, cell)
    count = 0 if cell.pool == "none" else len(pool) + len(foreign)
    began = time.perf_counter()
    if method in PRODUCT:
        accuracy, facts = measure_product(bench, cell, method, drawn, pool, foreign)
    else:
        features, tests = bench.features(cell.dataset)
        texts, labels = bench.texts(cell.dataset), images.labels[drawn]
        rest = features[pool]
        if foreign:
            rest = torch.cat([rest, bench.features(bench.foreign)[0][foreign]])
        if cell.pool == "none":
            rest = rest[:0]
        scores, facts = measure_features(method, features[drawn], labels, rest, texts, tests)
        accuracy = float((scores.argmax(dim=1) == test.labels).double().mean())
    seconds = time.perf_counter() - began
    values = (facts.get("used", count), facts.get("foreign", ""), facts.get("reason", ""))
    return [f"{100 * accuracy:.2f}", count, *values, f"{seconds:.2f}"]


def measure_product(
    bench: Bench, cell: Cell, method: str, drawn: list[int], pool: list[int], foreign: list[int]
) -> tuple[float, dict[str, object]]:
    """Accuracy of a method as `dear adapt` trains it, and what it recorded about the pool."""
    images, test = bench.open(cell.dataset)
    items = [images.items[row] for row in pool]
    if foreign:
        other = bench.open(bench.foreign)[0]
        items += [other.items[row] for row in foreign]
    unlabeled = None if cell.pool == "none" else unlabeled_images(items)
    labeled = images.subset(drawn)
    roles = roles_for(bench.clip, images, None)[0] if method == "dear" else None
    spec = Spec(method=method, seed=cell.draw, calibrate=False, unlabeled_weight=None if unlabeled else 0.0)
    job = prepare(spec, labeled, drawn=True, clip=bench.clip, roles=roles, unlabeled=unlabeled)
    model = fit(job)
    return model.evaluate(test).accuracy[
        model.method.pick_mode(None)
    ], {} if job.pool is None else job.pool.facts()


def measure_features(
    method: str, labeled: Tensor, labels: Tensor, pool: Tensor, texts: Tensor, tests: Tensor
) -> tuple[Tensor, dict[str, object]]:
    """Scores [n, C] of the test features, and what was decided."""
    if method == "probe":
        features = torch.cat([labeled, pool])
        known = torch.cat([labels, torch.full((len(pool),), UNLABELED)])
        if not len(pool):
            return fit_semi_supervised_probe(labeled, labels, texts).probe.logits(tests), {}
        decision = decide_on_pool(features, known, texts)
        kept = ~decision.foreign if decision.use else known != UNLABELED
        facts = {
            "used": int(kept.sum()) - len(labels),
            "foreign": int(decision.foreign.sum()),
            "reason": decision.reason,
        }
        return fit_semi_supervised_probe(features[kept], known[kept], texts).probe.logits(tests), facts
    scale = float(texts.norm(dim=1).mean())
    if method == "transclip":
        return transclip(labeled, labels, pool, texts / scale, scale)(tests), {}
    if method == "stata":
        return stata(labeled, labels, pool, texts / scale, scale)(tests), {}
    scores = scikit_learn(method, labeled, labels, pool)(tests)
    return F.pad(scores, (0, len(texts) - scores.shape[1]), value=-1.0), {}


def plan(args: argparse.Namespace) -> Iterator[tuple[Cell, str]]:
    """Cells in the order of their worth: first draws of all settings before second ones."""
    lists = (args.draws, args.shots, args.choices, args.pools, args.datasets, args.methods)
    for draw, shots, choice, pool, dataset, method in itertools.product(*lists):
        fixed = method in REFERENCES and method != "LogisticRegression"
        if (pool == "none" and fixed) or (pool != "none" and method == "LogisticRegression"):
            continue
        if choice != "random" and pool not in ("none", "rest"):
            continue
        yield Cell(dataset, shots, choice, draw, pool), method


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--datasets", required=True, type=lambda text: text.split(","))
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument(
        "--methods", type=lambda text: text.split(","), default=["probe", *PRODUCT, *REFERENCES]
    )
    parser.add_argument(
        "--shots", type=lambda text: [int(one) for one in text.split(",")], default=[1, 4, 16]
    )
    parser.add_argument("--draws", type=lambda text: [int(one) for one in text.split(",")], default=[1, 2, 3])
    parser.add_argument(
        "--pools", type=lambda text: text.split(","), default=["none", "rest", "unbalanced", "foreign"]
    )
    parser.add_argument("--foreign", default="", help="dataset of the images in the pool 'foreign'")
    parser.add_argument("--choices", type=lambda text: text.split(","), default=["random", "chosen"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "dear-unlabeled")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args = parser.parse_args()
    began = time.monotonic()
    bench = Bench(load(args.backbone, device=args.device), args.files, args.foreign)
    number, parts = (int(one) for one in args.part.split("/"))
    with open(args.out, "a", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        if not file.tell():
            table.writerow(COLUMNS)
        for place, (cell, method) in enumerate(plan(args)):
            if place % parts != number:
                continue
            if time.monotonic() - began > args.seconds:
                break
            path = Path(cell.dataset)
            name = path.parent.name if path.name == "index.csv" else path.name
            row = [name, cell.shots, cell.choice, cell.draw, cell.pool, method]
            table.writerow([*row, *measure(bench, cell, method, args.device)])
            file.flush()


if __name__ == "__main__":
    main()
