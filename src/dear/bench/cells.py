"""A cell: one experiment of a grid, what it trains and tests, and its key."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import msgspec

from dear.data.images import FileImages, ImageSet, require_one_label
from dear.data.open import open_data
from dear.data.shots import few_shot, read_draw
from dear.errors import RunError
from dear.methods import find_method
from dear.runs.recipe import Recipe
from dear.runs.spec import Name, Spec, digest, plain
from dear.train.setup.prepare import explicit_options, explicit_recipe
from dear.utils.schema import Strict


class Cell(Strict, frozen=True, eq=False, dict=True):
    """One experiment: everything that its results depend on, and nothing else.

    The place of the data, the device and the engine are not part of it. Two cells are equal when their keys
    are.

    >>> one = Cell(protocol="base-to-novel", spec=Spec(method="zeroshot", data="world:textures", shots=16))
    >>> one.key == msgspec.convert(one.document(), Cell).key, one.stem
    (True, 'base-to-novel-zeroshot-world-textures-16shot-seed1-...')
    """

    protocol: Name  #: see `dear.bench.protocols`
    spec: Spec  #: what is trained; without digests where the data could not be opened when it was planned
    setting: dict[Name, Any] = msgspec.field(default_factory=dict)  #: what else the protocol needs
    roles: Name = ""  #: how the role map is derived from the grid's own; see `dear.heads.rules.derive_roles`
    tested: Name = ""  #: hash of the images that are tested on

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, Cell) else NotImplemented

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values

    @cached_property
    def key(self) -> str:
        """Sixteen hexadecimal digits that change with anything that the results depend on."""
        parts = {"protocol": self.protocol, "training": self.spec.key, "setting": self.setting}
        words = {"data": self.dataset, "shots": self.shots, "tested": self.tested}
        return digest({**parts, **words})[:16]

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.spec.method

    @property
    def dataset(self) -> str:
        """The dataset trained on, as the caller named it."""
        return self.spec.data or self.spec.dataset

    @property
    def seed(self) -> int:
        """Seed of the draw, of the initial learned tensors and of the order of batches."""
        return self.spec.seed

    @property
    def shots(self) -> int:
        """Images per class; 0 where all are taken."""
        return self.spec.shots

    @property
    def stem(self) -> str:
        """File name without ending: readable words, then the key."""
        shots = f"{self.shots}shot" if self.shots else "all"
        words = [self.protocol, self.method, self.dataset, *self._extra(), shots, f"seed{self.seed}"]
        readable = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-.") for word in words)
        return f"{readable[:120]}-{self.key}"

    def _extra(self) -> list[str]:
        """The held-out domain, which distinguishes its cells by name."""
        return [str(self.setting["held_out"])] if "held_out" in self.setting else []

    @property
    def title(self) -> str:
        """A short name for progress displays."""
        extra = "".join(f" without {word}" for word in self._extra())
        return f"{self.method} on {self.dataset}{extra}, {self.shots or 'all'} shots, seed {self.seed}"


def resolve_defaults(spec: Spec) -> Spec:
    """A Spec with all options and the whole recipe, as `dear adapt` would train.

    What follows from the built method, the number of images or the processor stays open unless it is set.
    """
    kind = find_method(spec.method)
    explicit = explicit_recipe(spec)
    values = plain(asdict(Recipe.of(kind, **{"seed": spec.seed, **explicit})))
    for name in {"augment", "epochs", "views", "precision"} - set(explicit):
        del values[name]
    options = plain(asdict(kind.configure(explicit_options(spec))))
    return msgspec.structs.replace(spec, options=options, recipe=values)


@dataclass(frozen=True)
class Outcome:
    """The result of a cell, or the error that stopped it."""

    cell: Cell
    result: Mapping[str, Any] | None = None  #: what was measured
    error: Mapping[str, Any] | None = None  #: {"type", "message", "trace"}


@dataclass(frozen=True)
class Environment:
    """Where and how a cell is computed; none of it may change a result."""

    backbone: str  #: name, folder or file to load
    data_root: str | None = None  #: where the benchmark datasets are kept
    roles_file: str | None = None  #: role map to start from
    device: str = "cpu"
    threads: int = 1  #: of PyTorch on the CPU; one number for every engine, since sums depend on it
    draws: str | None = None  #: folder with imported few-shot draws
    adapters: str | None = None  #: folder in which trained adapters are cached for other protocols

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Data:
    """The data of a cell: opened when planning, to hash it, and when computing."""

    dataset: str
    setting: Mapping[str, Any]
    seed: int
    template: str | None = None  #: of the dataset, where it is not its own
    root: str | None = None

    def open(self, split: str, dataset: str | None = None) -> ImageSet:
        """A split of the cell's dataset, or of another one, which has its own template."""
        template = self.template if dataset in (None, self.dataset) else None
        images = open_data(dataset or self.dataset, split, root=self.root, template=template)
        require_one_label(images, "a benchmark protocol")
        return images


@dataclass(frozen=True)
class Pool:
    """What a cell's training images are drawn from."""

    images: ImageSet
    labels: tuple[int, ...] | None = None  #: classes to train; None: all

    def draw(self, shots: int, seed: int, imported: str | None = None) -> ImageSet:
        """`shots` images per class (0: all), or those of an imported draw."""
        if imported is not None:
            return self._of_labels(self.images.subset(read_draw(imported, self.images)))
        drawn = self._of_labels(self.images)
        return few_shot(drawn, shots, seed) if shots else drawn

    def _of_labels(self, images: ImageSet) -> ImageSet:
        return images if self.labels is None else select_labels(images, self.labels)


def select_labels(images: ImageSet, labels: tuple[int, ...]) -> ImageSet:
    """The images of some classes, renumbered; by label, since two of ImageNet's classes share a name."""
    if isinstance(images, FileImages):
        return images.select_labels(labels)
    return images.select_classes([images.classes[label] for label in labels])


def draw_path(folder: str, dataset: str, shots: int, seed: int) -> str:
    """Where an imported draw is looked for: `FOLDER/DATASET-16shot-seed1.jsonl`."""
    safe = dataset.replace(":", "-").replace("/", "-").replace(os.sep, "-")
    path = os.path.join(folder, f"{safe}-{shots}shot-seed{seed}.jsonl")
    if not os.path.isfile(path):
        raise RunError(f"{path}: no such few-shot draw; draws needs a file per dataset, shots and seed")
    return path
