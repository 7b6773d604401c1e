"""A cell: one experiment of a grid, its configuration and the key that follows from it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any

from dear.methods.options import earlier_values
from dear.train.folder import canonical, digest

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
        """The cell of a stored configuration; names that were spelled otherwise once get today's spelling."""
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
    """What became of a cell: a result, or why there is none.

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
