"""Accuracy with few labels, with and without unlabeled images, for every kind of method.

    python research/labels/unlabeled.py --backbone SMALL --root DATA \
        --datasets dtd_partial10,world:textures --foreign eurosat --jobs 2 --out unlabeled.csv

A dataset is a folder in --root that holds `index.csv`, or a task of the attribute world, which `mini` answers
instead of --backbone. Labels are drawn from the training images and half of the test images; the other half
is the test. Pools, all without labels: "rest" is everything that was not drawn; "unbalanced" has 60 images of
one class, 2 of another, and a geometric series between; "foreign" is the rest and, to 30 % of the pool,
images of --foreign; "none" is labeled only. Labels are k random images per class ("random"); as many images
in total at random, as someone labels who cannot know the classes before ("any"); or those that `choose_next`
names ("chosen"). Methods of the product run through `prepare` and `fit`, so that its decision counts; where
it leaves a pool out, --forced also trains with the pool (pool "rest, forced"). "probe" is that of
`dear.unlabeled`.

A row is added to --out as soon as it is measured, also with several --jobs, first draws before second ones.
"""

from __future__ import annotations

import csv
import fcntl
import io
import itertools
import os
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from measure.jobs import workers
from measure.script import arguments, names, numbers
from measure.transductive import scikit_learn, stata, transclip
from torch import Tensor

from dear.clip.factory import load
from dear.clip.model import Clip
from dear.data.images import FileImages, ImageSet, ListedImages, unlabeled_images
from dear.data.open import WORLD, open_data
from dear.runs.feature_cache import FeatureCache
from dear.runs.spec import Spec
from dear.tasks.labeling.next import text_features
from dear.tasks.speed import machine
from dear.train.fit import fit
from dear.train.setup.prepare import Job, prepare, recipe_for
from dear.train.setup.roles import roles_for
from dear.train.setup.unlabeled import Pool
from dear.unlabeled import (
    UNLABELED,
    choose_next,
    compare_with_labeled_only,
    fit_semi_supervised_probe,
    judge_pool,
    mean_confidence,
    measure_nearness,
)
from dear.unlabeled.pool import MAX_FOREIGN_SHARE

Row = dict[str, Any]
QUICK = ("linear-probe", "lp-plus-plus", "proker")  # on frozen features: each decides itself
TRAINED = ("dear", "mmrl", "coop", "promptsrc")  # by steps through a tower
PRODUCT = (*QUICK, *TRAINED)
REFERENCES = ("transclip", "stata", "SelfTrainingClassifier", "LabelSpreading", "LogisticRegression")
MOST, LEAST, FOREIGN = 60, 2, 0.3
NAMES = {
    "caltech101": "Caltech101",
    "dtd_partial10": "DTD, 10 classes",
    "eurosat": "EuroSAT",
    "oxford_pets": "OxfordPets",
}


#: options of all scripts of this folder
OPTIONS: dict[str, Any] = {
    "backbone": "",
    "root": ".",
    "datasets": "world:textures",
    "device": "cpu",
    "files": str(Path(tempfile.gettempdir()) / "dear-unlabeled"),
    "out": Path,
}


@dataclass(eq=False)
class Bench:
    """Backbones, and datasets whose features are computed once."""

    backbone: str  #: for photos
    root: Path  #: the folder that holds the datasets
    files: Path  #: where images that are no files are written
    foreign: str = ""  #: dataset of the foreign images
    device: str = "cpu"
    share: float = 0.0  #: most that all unlabeled images weigh relative to all labels; 0: the product decides
    sets: dict[str, tuple[ListedImages, ListedImages]] = field(default_factory=dict)
    pools: dict[Any, Pool] = field(default_factory=dict)  #: the last pool, for other methods

    @lru_cache(maxsize=2)  # noqa: B019 - the bench lives as long as the process
    def clip(self, name: str) -> Clip:
        """The backbone of a dataset."""
        return load("mini" if name.startswith(WORLD) else self.backbone, device=self.device)

    def open(self, name: str) -> tuple[ListedImages, ListedImages]:
        """Images to draw from, and test images."""
        if name not in self.sets:
            path = name if name.startswith(WORLD) else str(self.root / name / "index.csv")
            train, test = (open_data(path, split) for split in ("train", "test"))
            folder = self.files / name.replace(":", "-")
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

    @lru_cache(maxsize=64)  # noqa: B019
    def features(self, name: str) -> tuple[Tensor, Tensor]:
        """Unit features of both, on the CPU."""
        return tuple(  # type: ignore[return-value]
            F.normalize(FeatureCache().image_features(self.clip(name), images), dim=1).cpu()
            for images in self.open(name)
        )

    @lru_cache(maxsize=64)  # noqa: B019
    def texts(self, name: str) -> Tensor:
        """Unit text features times CLIP's scale [C, E]."""
        images = self.open(name)[0]
        texts = text_features(self.clip(name), images.classes, images.template)
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
        return np.random.default_rng(zlib.crc32(f"{self.dataset} {self.draw}".encode()))


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


def measure(bench: Bench, cell: Cell, method: str, alone: float | None, forced: bool) -> Iterator[Row]:
    """Rows of one method and pool.

    Args:
        bench: what is loaded already.
        cell: the labels and the pool.
        method: a method of the product, "probe", or one of `REFERENCES`.
        alone: accuracy without the pool where it is known, so that it is not measured again.
        forced: also measure with the pool where it is left out.
    """
    drawn, pool, foreign = draw_cell(bench, cell)
    count = 0 if cell.pool == "none" else len(pool) + len(foreign)

    def row(accuracy: float, facts: Mapping[str, Any], began: float, name: str = cell.pool) -> Row:
        return {
            "dataset": NAMES.get(cell.dataset, cell.dataset),
            "backbone": "mini" if cell.dataset.startswith(WORLD) else Path(bench.backbone).name,
            "labels_per_class": cell.shots,
            "labels": cell.choice,
            "draw": cell.draw,
            "pool": f"{name}, share {bench.share:g}" if bench.share and count else name,
            "method": method,
            "accuracy": round(100 * accuracy, 2),
            "pool_images": count,
            "used": facts.get("used", count),
            "foreign": facts.get("foreign", ""),
            "reason": facts.get("reason", ""),
            **cross_validation(facts),
            "seconds": round(time.perf_counter() - began, 2),
        }

    began = time.perf_counter()
    if method not in PRODUCT:
        images, test = bench.open(cell.dataset)
        features, tests = bench.features(cell.dataset)
        rest = features[pool]
        if foreign:
            rest = torch.cat([rest, bench.features(bench.foreign)[0][foreign]])
        inputs = (features[drawn], images.labels[drawn], rest if count else rest[:0])
        scores, facts = measure_features(method, *inputs, bench.texts(cell.dataset), tests)
        yield row(float((scores.argmax(dim=1) == test.labels).double().mean()), facts, began)
        return
    product = Product(bench, cell.dataset, method, cell.draw, drawn)
    if not count:
        yield row(product.alone(), {}, began)
        return
    decided = product.pool(pool, foreign, bench)
    facts = decided.to_dict()
    if decided.teacher is not None:
        yield row(product.train(decided), facts, began)
        return
    yield row(product.alone() if alone is None else alone, facts, began)
    if forced and decided.reason != "far":
        began = time.perf_counter()
        used = product.pool(pool, foreign, bench, weight=1.0)
        yield row(product.train(used), {**facts, "used": used.used}, began, f"{cell.pool}, forced")


def cross_validation(facts: Mapping[str, Any]) -> Row:
    """Labels that were held out, and the accuracy that the pool added there, in percent."""
    measured = facts.get("cross_validation", {})
    gain = 100 * (measured["with_unlabeled"] - measured["labeled_only"]) if measured else None
    return {
        "held_out": measured.get("images", 0),
        "held_out_gain": "" if gain is None else round(gain, 2),
        "standard_error": round(100 * measured["standard_error"], 2) if measured else "",
    }


@dataclass(frozen=True)
class Product:
    """A method trained as `dear adapt` trains it, with and without a pool."""

    bench: Bench
    dataset: str
    method: str
    seed: int
    drawn: list[int]  #: rows of the labeled images

    def spec(self, weight: float | None = 0.0) -> Spec:
        """What is trained, in defaults."""
        return Spec(method=self.method, seed=self.seed, calibrate=False, unlabeled_weight=weight)

    def job(self, unlabeled: ImageSet | None = None, weight: float | None = 0.0) -> Job:
        """The training that `prepare` returns."""
        images = self.bench.open(self.dataset)[0]
        clip = self.bench.clip(self.dataset)
        roles = roles_for(clip, images, None)[0] if self.method == "dear" else None
        labeled = images.subset(self.drawn)
        return prepare(self.spec(weight), labeled, drawn=True, clip=clip, roles=roles, unlabeled=unlabeled)

    def accuracy(self, job: Job) -> float:
        """Of the trained method on test images."""
        model = fit(job)
        accuracies = model.evaluate(self.bench.open(self.dataset)[1]).accuracy
        return accuracies[model.method.pick_mode(None)]

    def alone(self) -> float:
        """Accuracy without a pool."""
        return self.accuracy(self.job())

    def train(self, pool: Pool) -> float:
        """Accuracy with a pool."""
        if self.bench.share and pool.teacher is not None:
            weight = min(1.0, self.bench.share * len(self.drawn) / pool.used)
            pool = replace(pool, teacher=replace(pool.teacher, weight=weight))
        job = replace(self.job(), pool=pool)
        walked, rows = job.training_set
        recipe = recipe_for(
            self.spec().changed(balance=False), job.method, walked.labels[rows]
        )  # as `prepare`
        return self.accuracy(replace(job, recipe=recipe))

    def pool(self, rows: list[int], foreign: list[int], bench: Bench, weight: float | None = None) -> Pool:
        """What the product decides about a pool; the same for all methods that do not decide themselves."""
        items = [bench.open(self.dataset)[0].items[row] for row in rows]
        if foreign:
            others = bench.open(bench.foreign)[0].items
            items += [others[row] for row in foreign]
        key = (self.dataset, tuple(self.drawn), tuple(items), weight, self.method in TRAINED or self.method)
        if key not in bench.pools:
            pool = self.job(unlabeled_images(items), weight).pool
            assert pool is not None
            bench.pools.clear()  # cells come pool by pool
            bench.pools[key] = pool
        return bench.pools[key]


def measure_features(
    method: str, labeled: Tensor, labels: Tensor, pool: Tensor, texts: Tensor, tests: Tensor
) -> tuple[Tensor, dict[str, object]]:
    """Scores [n, C] of the test features, and what was decided."""
    if method == "probe":
        features = torch.cat([labeled, pool])
        known = torch.cat([labels, torch.full((len(pool),), UNLABELED)])
        if not len(pool):
            return fit_semi_supervised_probe(labeled, labels, texts).probe.logits(tests), {}
        near = measure_nearness(pool, labeled)
        kept = torch.cat([torch.ones(len(labeled), dtype=torch.bool, device=labels.device), ~near.foreign])
        reason, facts = "far", dict[str, object]()
        if near.share <= MAX_FOREIGN_SHARE:
            comparison = compare_with_labeled_only(features[kept], known[kept], texts)
            fit = fit_semi_supervised_probe(features[kept], known[kept], texts)
            reason = judge_pool(comparison, mean_confidence(fit.probabilities, known[kept]))
            facts = comparison.to_dict()
        if reason not in ("helps", "unknown"):
            kept = known != UNLABELED
        decision = {
            "used": int(kept.sum()) - len(labels),
            "foreign": int(near.foreign.sum()),
            "reason": reason,
            "cross_validation": facts,
        }
        return fit_semi_supervised_probe(features[kept], known[kept], texts).probe.logits(tests), decision
    scale = float(texts.norm(dim=1).mean())
    if method == "transclip":
        return transclip(labeled, labels, pool, texts / scale, scale)(tests), {}
    if method == "stata":
        return stata(labeled, labels, pool, texts / scale, scale)(tests), {}
    scores = scikit_learn(method, labeled, labels, pool)(tests)
    return F.pad(scores, (0, len(texts) - scores.shape[1]), value=-1.0), {}


@lru_cache(maxsize=1)
def bench_of(backbone: str, root: str, files: str, foreign: str, device: str, share: float) -> Bench:
    """The bench of this process."""
    return Bench(backbone, Path(root), Path(files), foreign, device, share)


def read_images(place: Sequence[Any], dataset: str, roles: bool) -> None:
    """Write what later calls in other processes read: images of the world, features, role maps."""
    bench = bench_of(*place)
    bench.features(dataset)
    if roles:
        roles_for(bench.clip(dataset), bench.open(dataset)[0], None)


def measure_draw(
    place: Sequence[Any], cell: Cell, pools: Sequence[str], methods: Sequence[str], forced: bool, out: Path
) -> None:
    """Measure all methods and pools of one draw; every row is on disk before the next is measured."""
    bench = bench_of(*place)
    alone: dict[str, float] = {}
    for pool in pools:
        for method in methods:
            fixed = method in REFERENCES and method != "LogisticRegression"
            if (pool == "none" and fixed) or (pool != "none" and method == "LogisticRegression"):
                continue
            for row in measure(bench, replace(cell, pool=pool), method, alone.get(method), forced):
                if pool == "none":
                    alone[method] = row["accuracy"] / 100
                append(out, {**row, **machine(bench.clip(cell.dataset).device)})


def append(path: Path, row: Row) -> None:
    """Add a row to a CSV file in one piece, as other processes add rows, too."""
    text = io.StringIO()
    table = csv.DictWriter(text, list(row), lineterminator="\n")
    with open(path, "a", encoding="utf-8", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not os.fstat(file.fileno()).st_size:
            table.writeheader()
        table.writerow(row)
        file.write(text.getvalue())


def main() -> None:
    options = arguments(
        __doc__,
        **OPTIONS,
        methods=",".join(["probe", *PRODUCT, *REFERENCES]),
        shots="1,4,16",
        draws="1,2,3",
        pools="none,rest,unbalanced,foreign",
        choices="random",
        foreign=("", "dataset of the images in the pool 'foreign'"),
        forced=(False, "also train with pools that the product leaves out"),
        share=(0.0, "most that all unlabeled images weigh relative to all labels; 0: what the product does"),
        jobs=1,
    )
    place = (options.backbone, options.root, options.files, options.foreign, options.device, options.share)
    datasets, methods, pools = names(options.datasets), names(options.methods), names(options.pools)
    every = [*datasets, *([options.foreign] if options.foreign else [])]
    calls = [
        (place, Cell(dataset, shots, choice, draw, ""), pools if choice == "random" else pools[:2], methods)
        for draw, dataset, shots, choice in itertools.product(
            numbers(options.draws), datasets, numbers(options.shots), names(options.choices)
        )
    ]
    with workers(options.jobs) as run:
        for _ in run(read_images, [(place, dataset, "dear" in methods) for dataset in every]):
            pass
        for done, _ in enumerate(
            run(measure_draw, [(*call, options.forced, options.out) for call in calls]), 1
        ):
            print(f"{done} of {len(calls)} draws", flush=True)


if __name__ == "__main__":
    main()
