"""A cell: one experiment of a grid, its configuration and key, and the session that computes it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy
import safetensors.torch
import torch

from dear._io.files import read_safetensors, write_safetensors
from dear.clip.factory import load
from dear.clip.model import Clip
from dear.data.images import FileImages, ImageSet
from dear.data.open import open_data
from dear.data.shots import few_shot, read_draw
from dear.errors import DearError, RoleError, RunError
from dear.heads.known_roles import known_roles, read_roles
from dear.heads.roles import RoleMap
from dear.heads.rules import derive_roles
from dear.methods import build_method, find_method
from dear.methods.base import Method
from dear.methods.options import earlier_values
from dear.runs.evaluate import Evaluation, evaluate
from dear.runs.recipe import Recipe
from dear.runs.spec import Spec, canonical, digest, roles_digest
from dear.train.run import train

SCHEMA = 2  #: of a cell's file
_KEY_SCHEMA = 1  # part of every key: stays
_KEY_NAMES = {"optimizer": "optimiser", "center": "centre"}  # keys are computed with the first spelling
_READ_NAMES = {old: new for new, old in _KEY_NAMES.items()}


def _frozen(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A read-only copy through JSON, so that what is hashed is what a file will hold."""
    return MappingProxyType(json.loads(canonical(dict(values))))


def as_written(config: Any) -> dict[str, Any]:
    """The fields of a dataclass as a cell holds them.

    A field that was added later may say, as `metadata={"before": value}`, what earlier versions did; with
    that value it is left out, so that cells computed before it existed keep their keys. `as_configured` is
    the way back.
    """
    nothing = object()
    values = asdict(config)
    for each in fields(config):
        if values[each.name] == each.metadata.get("before", nothing):
            del values[each.name]
    return values


def as_configured(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a cell with what `as_written` left out of them."""
    return {**earlier_values(kind), **values}


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}


@dataclass(frozen=True, eq=False)
class Cell:
    """One experiment: everything that its results depend on, and nothing else.

    Where the data lie, on which device and by which engine it is computed is not part of it. Two cells are
    equal when their keys are.

    Attributes:
        protocol: name of a protocol, see `dear.bench.protocols.PROTOCOLS`.
        method: name of the method.
        dataset: the dataset trained on.
        seed: of the few-shot draw, the start of learned tensors and the order of batches.
        shots: images per class; 0 where the protocol takes all.
        backbone: name of the backbone.
        fingerprint: hash of its weights.
        options: all options of the method, defaults included.
        recipe: the whole training recipe, defaults included.
        roles: description of the role map and the hash of its content; empty where none is used.
        setting: what else the protocol needs (targets, held-out domain, imported draw).

    >>> one = Cell("base-to-novel", "zeroshot", "world:textures", 1, 16, "mini", "sha256:0")
    >>> one.key == Cell(**one.plain()).key, one.stem
    (True, 'base-to-novel-zeroshot-world-textures-16shot-seed1-...')
    """

    protocol: str
    method: str
    dataset: str
    seed: int
    shots: int
    backbone: str
    fingerprint: str
    options: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[str, Any] = field(default_factory=dict)
    setting: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("options", "recipe", "roles", "setting"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))

    @classmethod
    def from_file(cls, values: Mapping[str, Any]) -> Cell:
        """The cell of a stored configuration; names in an earlier spelling get the present one."""
        renamed = {name: _renamed(values.get(name, {}), _READ_NAMES) for name in ("options", "recipe")}
        return cls(**{**values, **renamed})

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, Cell) else NotImplemented

    def plain(self) -> dict[str, Any]:
        """The configuration as JSON values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: dict(v) if isinstance(v, Mapping) else v for name, v in values.items()}

    @cached_property
    def key(self) -> str:
        """Sixteen hexadecimal digits that change with any part of the configuration.

        The backbone's name is left out (its fingerprint says which weights they are), and so is the way
        in which a role map was made: its hash says which roles they are.
        """
        plain = self.plain()
        del plain["backbone"]
        plain["roles"].pop("spec", None)
        plain |= {name: _renamed(plain[name], _KEY_NAMES) for name in ("options", "recipe")}
        return digest({"schema": _KEY_SCHEMA, **plain})[:16]

    @property
    def training_key(self) -> str:
        """A key of what is trained alone: protocols that train on all classes share their adapters."""
        parts = self.plain()
        trained = {name: parts[name] for name in ("method", "dataset", "seed", "shots", "fingerprint")}
        trained |= {name: _renamed(parts[name], _KEY_NAMES) for name in ("options", "recipe")}
        trained |= {"roles": parts["roles"].get("digest"), "draw": parts["setting"].get("draw")}
        return digest({"schema": _KEY_SCHEMA, **trained})[:16]

    @property
    def stem(self) -> str:
        """File name without ending: readable words, then the key."""
        shots = f"{self.shots}shot" if self.shots else "all"
        words = [self.protocol, self.method, self.dataset, *self._extra(), shots, f"seed{self.seed}"]
        readable = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-.") for word in words)
        return f"{readable[:120]}-{self.key}"

    def _extra(self) -> list[str]:
        """The held-out domain, so that its cells can be told apart by name."""
        return [str(self.setting["held_out"])] if "held_out" in self.setting else []

    @property
    def title(self) -> str:
        """A short name for progress displays."""
        extra = "".join(f" without {word}" for word in self._extra())
        return f"{self.method} on {self.dataset}{extra}, {self.shots or 'all'} shots, seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """The result of a cell, or the error that stopped it.

    Attributes:
        cell: the cell.
        result: what was measured; None if it failed.
        error: {"type", "message", "trace"}; None if it succeeded.
    """

    cell: Cell
    result: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Place:
    """Where and how a cell is computed; none of it may change a result.

    Attributes:
        backbone: name, folder or file to load.
        data_root: where the benchmark datasets are kept.
        roles_file: role map to start from, or None.
        device: "cpu", "cuda", ...
        threads: threads of PyTorch on the CPU; one number for every engine, since sums depend on it.
        draws: folder with imported few-shot draws, or None.
        adapters: folder in which trained adapters are kept for other protocols to use, or None.
    """

    backbone: str
    data_root: str | None = None
    roles_file: str | None = None
    device: str = "cpu"
    threads: int = 1
    draws: str | None = None
    adapters: str | None = None

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@lru_cache(maxsize=1)
def backbone(name: str, device: str) -> Clip:
    """The backbone, loaded once per process."""
    return load(name, device=device)


def starting_roles(clip: Clip, file: str | None) -> RoleMap | None:
    """The role map that a grid starts from: a file, "table2", or (None) the one known for the backbone."""
    return known_roles(clip) if file is None else read_roles(file)


def of_labels(images: ImageSet, labels: Sequence[int]) -> ImageSet:
    """The images of some classes, renumbered; by label, since two of ImageNet's classes share a name."""
    if isinstance(images, FileImages):
        return images.select_labels(labels)
    return images.select_classes([images.classes[label] for label in labels])


class Session:
    """Computes one cell: opens the data, trains, tests, and records how.

    Args:
        cell: what to compute.
        place: where data and backbone are.

    Attributes:
        record: what is to be known of the cell beside its accuracies.
    """

    def __init__(self, cell: Cell, place: Place) -> None:
        self.cell, self.place = cell, place
        self.clip = backbone(place.backbone, place.device)
        if self.clip.fingerprint != cell.fingerprint:
            raise RunError(
                f"{place.backbone}: these weights are {self.clip.fingerprint[:19]}…, but the cell was "
                f"planned for {cell.fingerprint[:19]}…; start the grid again with one backbone"
            )
        self.record: dict[str, Any] = {}
        self.seconds = {"train": 0.0, "evaluate": 0.0}

    def open(self, split: str, dataset: str | None = None) -> ImageSet:
        """A split of the cell's dataset, or of another one, which has its own template."""
        own = dataset is None or dataset == self.cell.dataset
        template = self.cell.setting.get("template") if own else None
        return open_data(dataset or self.cell.dataset, split, root=self.place.data_root, template=template)

    def draw(self, images: ImageSet, labels: Sequence[int] | None = None) -> ImageSet:
        """The images to train on: the cell's shots of each class, or all for 0 shots.

        Args:
            images: the whole training split.
            labels: the classes to keep, if not all.
        """
        imported = self._imported()
        if imported is not None:
            drawn = images.subset(read_draw(imported, images))
            drawn = drawn if labels is None else of_labels(drawn, labels)
        else:
            drawn = images if labels is None else of_labels(images, labels)
            drawn = few_shot(drawn, self.cell.shots, self.cell.seed) if self.cell.shots else drawn
        lines = [
            json.dumps({"path": drawn.key(i), "label": y, "class": drawn.classes[y]}, ensure_ascii=False)
            for i, y in enumerate(drawn.labels.tolist())
        ]
        self.record["draw"] = {
            "images": len(drawn),
            "imported": imported is not None,
            "jsonl": "".join(line + "\n" for line in lines),
        }
        return drawn

    def _imported(self) -> str | None:
        """The file of an imported draw, checked to be the one that the cell was planned with."""
        wanted = self.cell.setting.get("draw")
        if wanted is None:
            return None
        path = draw_path(self.place.draws or ".", self.cell.dataset, self.cell.shots, self.cell.seed)
        if file_digest(path) != wanted:
            raise RunError(f"{path}: the draw was changed after the cell was planned")
        return path

    def roles(self) -> RoleMap | None:
        """The role map that the cell names, derived again and checked by its hash."""
        if not self.cell.roles:
            return None
        start = starting_roles(self.clip, self.place.roles_file)
        if start is None:
            raise RoleError(
                f"{self.clip.name} needs a role map: compute one with discover_roles", hint="roles"
            )
        spec = str(self.cell.roles["spec"])
        found = derive_roles(start, spec) if spec else start
        if roles_digest(found) != self.cell.roles["digest"]:
            raise RoleError("the role map was changed after the cell was planned; start the grid again")
        return found

    def fit(self, images: ImageSet, keep: bool = False) -> Method:
        """Build the cell's method on the set's classes and train it; its size and time are recorded.

        Args:
            images: the training set.
            keep: keep the adapter for other protocols, and take theirs; for training on all classes.
        """
        cell = self.cell
        method = build_method(
            cell.method,
            self.clip,
            images.classes,
            roles=self.roles(),
            template=images.template,
            seed=cell.seed,
            **as_configured(find_method(cell.method).Config, cell.options),
        )
        if keep and self._take(method):
            return self._sized(method)
        recipe = Recipe.of(type(method), **as_configured(Recipe, {**cell.recipe, "seed": cell.seed}))
        began = time.perf_counter()
        trained = train(method, images, recipe, spec=Spec())
        self.seconds["train"] += time.perf_counter() - began
        self.record["steps"] = trained.steps
        path = self._adapter()
        if keep and path is not None:
            facts = {"steps": str(trained.steps), "seconds": f"{self.seconds['train']:.3f}"}
            write_safetensors(path, method.adapter_state(), facts)
        return self._sized(method)

    def _adapter(self) -> Path | None:
        """Where the cell's adapter is kept for other protocols."""
        if self.place.adapters is None:
            return None
        return Path(self.place.adapters) / f"{self.cell.method}-{self.cell.training_key}.safetensors"

    def _take(self, method: Method) -> bool:
        """Load the adapter that another protocol trained, bit for bit; False where there is none."""
        path = self._adapter()
        if path is None or not path.exists():
            return False
        try:
            state, facts = read_safetensors(path, "adapter")
            method.load_adapter_state(state, str(path))
            self.record |= {"steps": int(facts["steps"]), "trained_before": True}
            self.seconds["train"] = float(facts["seconds"])
        except (DearError, KeyError, ValueError):  # damaged: train again and write it anew
            return False
        return True

    def _sized(self, method: Method) -> Method:
        """Record the size of the method and the facts that it reports."""
        state = {name: tensor.cpu().contiguous() for name, tensor in method.adapter_state().items()}
        self.record |= {
            "trainable_parameters": method.trainable_parameters,
            "adapter_bytes": len(safetensors.torch.save(state)) if state else 0,
            "facts": method.facts(),
        }
        return method

    def test(self, method: Method, images: ImageSet) -> Evaluation | None:
        """Evaluate a method in every mode on a dataset, among exactly the dataset's own classes.

        None where the method cannot name classes that it was not trained on.
        """
        began = time.perf_counter()
        if images.classes != method.classes or images.template != method.template:
            if not method.open_classes:
                return None
            method = method.with_classes(images.classes, images.template)
        found = evaluate(method, images, precision=str(self.cell.recipe.get("precision", "auto")))
        self.seconds["evaluate"] += time.perf_counter() - began
        tested = self.record.setdefault("tested", {})
        tested[images.name] = tested.get(images.name, 0) + len(images)
        return found

    def finish(self, modes: Mapping[str, Mapping[str, float | None]]) -> dict[str, Any]:
        """The whole result: accuracies by mode, then what was recorded, times and versions."""
        return {
            "modes": {mode: dict(values) for mode, values in modes.items()},
            **self.record,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "made_with": made_with(self.place),
        }


def made_with(place: Place) -> dict[str, Any]:
    """Versions and machine: what a reader needs to judge a difference in the last digits."""
    from dear import __version__

    device = torch.device(place.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "dear": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "device": device.type,
        "hardware": name,
        "threads": place.threads,
    }


def draw_path(folder: str, dataset: str, shots: int, seed: int) -> str:
    """Where an imported draw is looked for: `FOLDER/DATASET-16shot-seed1.jsonl`."""
    safe = dataset.replace(":", "-").replace("/", "-").replace(os.sep, "-")
    return os.path.join(folder, f"{safe}-{shots}shot-seed{seed}.jsonl")


def file_digest(path: str) -> str:
    """Hash of a file's content.

    Raises:
        RunError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:16]
    except OSError as error:
        raise RunError(f"{path}: the imported draw cannot be read ({error.strerror})") from None
