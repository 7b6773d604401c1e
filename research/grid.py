"""Many trainings in a few processes that share one GPU: rows of few-shot, base-to-novel, and unseen domains.

    export PYTHONPATH=src:benchmarks:research OMP_NUM_THREADS=1; nvidia-cuda-mps-control -d
    python research/grid.py research/grid_plan.txt --device cuda --jobs 14 --root DATA --small SMALL --out CSV

`dear bench` starts every cell from files, so that a cell of 400 steps takes a minute on a shared GPU. Here a
process keeps backbones, decoded images, and the frozen stages of test images; trainings are the same. Rows
are added as cells finish; cells that are in `--out` or `--skip` are left out.

A line of a plan: protocol, methods, datasets, images per class, seeds; several with commas. Cells are
computed in the order of the lines. A method is `name`, `name@preset`, `name[option=value]`; of DeAR also
`[roles=...]` (`measured`, or as in `dear ablate`) and `[variant=...]` (of `few_shot/trial.py`).
Datasets: names, or `dev`, the development sets, `report`, the others, `domains`, PACS and world:domains.

Photos: `small` and all-mixed roles (`[roles=measured]`: those of --roles); world: `mini` and its roles.
Caltech101 has the first 40 classes; EuroSAT every third test image if the data has no more.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import torch
from few_shot.trial import VARIANTS
from measure.jobs import workers
from measure.script import names, numbers, parser_of, read
from PIL import Image
from torch import Tensor

from dear.bench.protocols.held_out import split_sources
from dear.clip.factory import load
from dear.clip.model import Clip
from dear.data.images import ImageSet, ImageSetWrapper, select_domains
from dear.data.open import BENCHMARKS, open_data
from dear.data.shots import few_shot, halves
from dear.heads.known_roles import known_roles
from dear.heads.roles import RoleMap
from dear.heads.rules import derive_roles
from dear.images.views import Size, normalize, read_views
from dear.methods import find_method
from dear.methods.base import Method
from dear.methods.dear import DeAR
from dear.methods.frozen import Frozen
from dear.runs.recipe import Recipe
from dear.runs.spec import Spec
from dear.tasks.speed import add_rows, machine
from dear.train.frozen import reads_features
from dear.train.run import train
from dear.train.setup.prepare import explicit_options, recipe_for

PHOTOS = {
    "Caltech101": "caltech101",
    "DescribableTextures": "dtd_partial10",
    "OxfordPets": "oxford_pets",
    "EuroSAT": "eurosat",
    "PACS": "pacs",
}
GROUPS = {
    "dev": ["world:textures", "world:scenes", "DescribableTextures", "Caltech101"],
    "report": ["world:emblems", "world:fauna", "world:mixed", "world:vehicles", "EuroSAT", "OxfordPets"],
    "domains": ["PACS", "world:domains"],
}
CALTECH_CLASSES = 40
KEYS = ("protocol", "dataset", "held_out", "method", "shots", "seed")  #: of a cell in a CSV file
RECIPE = {field.name for field in fields(Recipe)} - {"seed"}
FACTORS = (0.001, 0.25, 0.5, 2.0)  #: of lambda, with `[factors=yes]`
AT_ONCE = 1000  #: test images at once
FIRST = 20  #: steps that `step_ms` leaves out: the first compile and record


@dataclass(frozen=True)
class Cell:
    """One training and its test."""

    protocol: str
    method: str
    dataset: str
    shots: int
    seed: int
    held_out: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """Values of `KEYS`."""
        return tuple(str(getattr(self, name)) for name in KEYS)


@dataclass(frozen=True)
class Place:
    """Where data and backbones are."""

    root: str
    small: str
    roles: str
    device: str
    epochs: int  #: 0: those of the recipe
    began: float  #: wall-clock time of the start
    limit_s: float  #: cells that begin later are left out
    alone_s: float  #: the first process has this long to compile kernels that all use


class Kept(ImageSetWrapper):
    """Images that are decoded once per process."""

    def __init__(self, images: ImageSet, kept: dict[str, Image.Image]) -> None:
        self.images, self.kept = images, kept

    def image(self, index: int) -> Image.Image:
        """See `ImageSet`."""
        key = self.images.key(index)
        if key not in self.kept:
            self.kept[key] = self.images.image(index)
        return self.kept[key]

    def pixels(self, indices: list[int], size: Size) -> Tensor:
        """See `ImageSet`."""
        return read_views([self.image(index) for index in indices], size)

    def subset(self, indices: list[int]) -> Kept:
        """See `ImageSet`."""
        return Kept(self.images.subset(indices), self.kept)

    def select_classes(self, classes: list[str]) -> Kept:
        """See `ImageSet`."""
        return Kept(self.images.select_classes(classes), self.kept)


@lru_cache(maxsize=64)
def opened(dataset: str, split: str, root: str) -> ImageSet:
    """A split of a task of the attribute world, or of photos with the benchmark's template."""
    if dataset not in PHOTOS:
        return open_data(dataset, split)
    images = open_data(
        str(Path(root) / PHOTOS[dataset] / "index.csv"), split, template=BENCHMARKS[dataset].template
    )
    if dataset == "Caltech101":
        images = images.select_classes(images.classes[:CALTECH_CLASSES])
    return images


@lru_cache(maxsize=32)
def memory(dataset: str) -> dict[str, Image.Image]:
    """The decoded training images of a dataset."""
    return {}


@lru_cache(maxsize=2)
def backbone(name: str, device: str) -> Clip:
    return load(name, device=device)


@lru_cache(maxsize=32)
def role_map(name: str, device: str, measured: str, changes: str) -> RoleMap:
    """The role map of a backbone: mixed heads where none is known."""
    clip = backbone(name, device)
    vision = clip.config.vision
    roles = known_roles(clip)
    if roles is None:
        roles = (
            RoleMap.load(measured) if measured else RoleMap.uniform("mixed", vision.last_third, vision.heads)
        )
        changes = changes or "uniform:mixed"
    return derive_roles(roles, "" if changes == "measured" else changes)


_pixels: dict[tuple[str, ...], Tensor] = {}
_stages: dict[tuple[Any, ...], Frozen] = {}


def test_stage(method: Method, images: ImageSet, key: tuple[str, ...], place: Place) -> Frozen:
    """The frozen stage of the test images, computed once per process and stage."""
    if key not in _pixels:
        view, parts = method.clip.config.view, torch.arange(len(images)).split(250)
        _pixels[key] = torch.cat([images.pixels(part.tolist(), view) for part in parts]).to(place.device)
    kind = (type(method).inference_stage, getattr(method, "stages", ()))  # stages: of `Thinned`
    stage = (*key, *kind, method.cut, method.class_token_at, method.clip.visual.dtype)
    if stage not in _stages:
        with torch.no_grad():
            frozen = [method.inference_stage(_normalized(part, method)) for part in _pixels[key].split(250)]
        _stages[stage] = Frozen._make(
            None if column[0] is None else torch.cat(column) for column in zip(*frozen, strict=True)
        )
    return _stages[stage]


def _normalized(pixels: Tensor, method: Method) -> Tensor:
    return normalize(pixels, method.clip.config.mean, method.clip.config.std)


def build(cell: Cell, place: Place, drawn: ImageSet) -> tuple[Method, Recipe]:
    """The untrained method of a cell and its recipe."""
    title, _, bracket = cell.method.partition("[")
    name, _, preset = title.partition("@")
    changes = dict(pair.split("=", 1) for pair in bracket.rstrip("]").split(";") if pair)
    small = cell.dataset in PHOTOS
    clip = backbone(place.small if small else "mini", place.device)
    changes.pop("factors", "")
    roles, variant = changes.pop("roles", ""), changes.pop("variant", "")
    kind, backbone_name = find_method(name), place.small if small else "mini"
    recipe = {key: changes.pop(key) for key in [*changes] if key in RECIPE}
    spec = Spec(
        method=name, preset=preset or None, options=changes, recipe=recipe, seed=cell.seed, balance=False
    )
    options = explicit_options(spec)
    if kind.uses_roles:
        options["roles"] = role_map(backbone_name, place.device, place.roles if small else "", roles)
        options["allow_other_roles"] = True
    if variant:
        kinds, more = zip(*(VARIANTS[part] for part in variant.split("+")), strict=True)
        kind = kinds[0] if len(kinds) == 1 else type("Variant", kinds, {})
        options |= {name: value for each in more for name, value in each.items()}
    method = kind(clip, drawn.classes, template=drawn.template, seed=cell.seed, **options)
    trained = recipe_for(spec, method, drawn.labels)
    return method, replace(trained, epochs=place.epochs) if place.epochs else trained


def images_of(cell: Cell, place: Place) -> tuple[ImageSet, list[tuple[str, ImageSet]]]:
    """Training images, and what is tested, by name."""
    if cell.protocol == "leave-one-domain-out":
        whole, test = (opened(cell.dataset, split, place.root) for split in ("train", "test"))
        sources = [name for name in sorted(set(whole.domains or ())) if name != cell.held_out]
        train_part, validation = _sources(cell.dataset, tuple(sources), cell.seed, place.root)
        return train_part, [
            ("target", _target(cell.dataset, cell.held_out, place.root)),
            ("validation", validation),
        ]
    whole, test = (opened(cell.dataset, split, place.root) for split in ("train", "test"))
    if cell.protocol == "base-to-novel":
        whole = whole.select_classes(halves(whole.classes)[0])
    return few_shot(whole, cell.shots, cell.seed), [("test", test)]


@lru_cache(maxsize=64)
def _sources(dataset: str, sources: tuple[str, ...], seed: int, root: str) -> tuple[ImageSet, ImageSet]:
    return split_sources(select_domains(opened(dataset, "train", root), sources), seed)


@lru_cache(maxsize=64)
def _target(dataset: str, domain: str, root: str) -> ImageSet:
    return select_domains(opened(dataset, "test", root), (domain,))


def compute(cell: Cell, place: Place) -> list[dict[str, Any]]:
    """Train and test a cell: a row per mode; none after the time limit."""
    _wait_for_kernels(place)
    began = time.perf_counter()
    if time.time() - place.began > place.limit_s:
        return []
    drawn, tests = images_of(cell, place)
    method, recipe = build(cell, place, drawn)
    images = drawn if reads_features(method, recipe) else Kept(drawn, memory(cell.dataset))
    prepared = time.perf_counter()
    clock: dict[int, float] = {}
    train(
        method, images, recipe, progress=lambda done, steps, line: clock.update({done: time.perf_counter()})
    )
    trained, steps = time.perf_counter(), len(clock)
    step_ms = 1000 * (clock[steps] - clock[FIRST]) / (steps - FIRST) if steps > FIRST else 0.0
    rows = _test(cell, place, method, tests)
    common = {
        **{name: getattr(cell, name) for name in KEYS},
        "backbone": "small" if cell.dataset in PHOTOS else "mini",
        "parameters": method.learned_parameters,
        "steps": steps,
        "prepare_s": round(prepared - began, 2),
        "train_s": round(trained - prepared, 2),
        "step_ms": round(step_ms, 3),
        "test_s": round(time.perf_counter() - trained, 2),
        "ended_s": round(time.time() - place.began, 1),
    }
    return [{**common, **row} for row in rows]


def _test(
    cell: Cell, place: Place, method: Method, tests: list[tuple[str, ImageSet]]
) -> list[dict[str, Any]]:
    """Accuracies in every mode."""
    columns: dict[str, dict[str, Any]] = {mode: {"mode": mode} for mode in method.modes}
    for name, every in tests:
        whole, test = method, every
        if every.classes != method.classes and method.open_classes:
            whole = method.with_classes(every.classes, every.template)
        elif every.classes != method.classes:
            test = every.select_classes(method.classes)
        work = whole.in_precision("auto")
        seed = str(cell.seed) if name == "validation" else ""
        stage = test_stage(work, test, (cell.dataset, name, cell.held_out, seed, str(len(test))), place)
        with torch.no_grad():
            parts = [
                work.logits_from_frozen(stage.rows(part)) for part in torch.arange(len(test)).split(AT_ONCE)
            ]
        for mode in method.modes:
            logits = torch.cat([part[mode] for part in parts]).float().cpu()
            columns[mode].update(_accuracies(cell, name, logits, test.labels, len(method.classes)))
        if "factors" in cell.method:
            for factor, logits in _with_factors(work, stage):
                row = columns.setdefault(f"lambda x {factor:g}", {"mode": f"lambda x {factor:g}"})
                row.update(_accuracies(cell, name, logits, test.labels, len(method.classes)))
    return list(columns.values())


@torch.no_grad()
def _with_factors(method: DeAR, stage: Frozen) -> Iterator[tuple[float, Tensor]]:
    """Logits of trained tokens with other values of lambda."""
    sides = method.image_sides(stage, method.learned, method.clip.visual.correction)
    trained = method.log_direction_weight.clone()
    for factor in FACTORS:
        method.log_direction_weight.copy_(trained + math.log(factor))
        yield factor, method.class_logits(sides.fused).float().cpu()
    method.log_direction_weight.copy_(trained)


def _accuracies(cell: Cell, name: str, logits: Tensor, labels: Tensor, trained: int) -> dict[str, Any]:
    if cell.protocol == "few-shot":
        return {"accuracy": _percent(logits, labels)}
    if cell.protocol != "base-to-novel":
        return {name: _percent(logits, labels)}
    old = labels < trained
    base = _percent(logits[old][:, :trained], labels[old])
    if logits.shape[1] == trained:  # a method that cannot name other classes
        return {"base": base}
    novel = _percent(logits[~old][:, trained:], labels[~old] - trained)
    return {
        "base": base,
        "novel": novel,
        "hm": round(harmonic_mean((base, novel)), 2),
        "joint": _percent(logits, labels),
        "joint_novel": _percent(logits[~old], labels[~old]),
    }


def _percent(logits: Tensor, labels: Tensor) -> float:
    return round(100 * float((logits.argmax(dim=1) == labels).double().mean()), 2)


_waited = False


def _wait_for_kernels(place: Place) -> None:
    """All processes but the first wait until it has compiled the kernels, which are then read from files."""
    global _waited  # noqa: PLW0603 (once per process)
    number = re.search(r"-(\d+)$", multiprocessing.current_process().name)
    if not _waited and place.alone_s and number and int(number[1]) > 1:
        time.sleep(max(0.0, place.began + place.alone_s - time.time()))
    _waited = True


def cells_of(line: str, root: str) -> list[Cell]:
    """The cells of a line of a plan."""
    protocol, methods, datasets, shots, seeds = line.split()
    wanted = [name for group in names(datasets) for name in GROUPS.get(group, [group])]
    cells = []
    for seed, count, method, dataset in product(numbers(seeds), numbers(shots), names(methods), wanted):
        held = [""]
        if protocol == "leave-one-domain-out":
            held = sorted(set(opened(dataset, "test", root).domains or ()))
        cells += [Cell(protocol, method, dataset, count, seed, domain) for domain in held]
    return cells


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("plans", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--skip", type=Path, nargs="*", default=[], help="CSV files whose cells are left out")
    parser.add_argument("--root", default=".", help="folder with a table per dataset of photos")
    parser.add_argument("--small", default="", help="the backbone of photos")
    parser.add_argument("--roles", default="", help="role map of that backbone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=0, help="for a trial; 0: those of the recipe")
    parser.add_argument("--limit-s", type=float, default=1e9, help="cells that begin later are left out")
    parser.add_argument("--alone-s", type=float, default=0.0, help="seconds that the first process has alone")
    options = parser.parse_args()
    began = float(os.environ.get("BEGAN", time.time()))
    settings = (options.root, options.small, options.roles, options.device, options.epochs)
    place = Place(*settings, began, options.limit_s, options.alone_s)
    done = {tuple(row[name] for name in KEYS) for path in (options.out, *options.skip) for row in read(path)}
    lines = [
        line for plan in options.plans for line in plan.read_text().splitlines() if line.split("#")[0].strip()
    ]
    cells = dict.fromkeys(cell for line in lines for cell in cells_of(line.split("#")[0], options.root))
    calls = [(cell, place) for cell in cells if cell.key not in done]
    here = machine(torch.device(options.device))
    blank = dict.fromkeys(
        ("accuracy", "base", "novel", "hm", "joint", "joint_novel", "target", "validation"), ""
    )
    print(f"{len(calls)} of {len(cells)} cells", flush=True)
    finished = 0
    with workers(options.jobs) as run:
        for _, rows in run(compute, calls):
            finished += bool(rows)
            if rows:
                order = [*KEYS, "mode", *blank]
                full = [{**blank, **row} for row in rows]
                add_rows(options.out, [{**{k: r[k] for k in order}, **r, **here} for r in full])
            if finished % 20 == 1 or not options.jobs > 1:
                print(f"{time.time() - began:.0f} s: {finished} of {len(calls)}", *rows[:1], flush=True)
    print(f"{time.time() - began:.0f} s: {finished} of {len(calls)} cells computed", flush=True)


if __name__ == "__main__":
    main()
