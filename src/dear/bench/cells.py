"""A cell: one experiment of a grid, its configuration and the key that follows from it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

SCHEMA = 1
_KEY_NAMES = {"optimizer": "optimiser"}  # keys of earlier results were made with this spelling


def canonical(value: Any) -> str:
    """JSON text that is the same for equal values: sorted keys, no spaces, tuples as lists.

    >>> canonical({"b": (1, 2), "a": 0.5})
    '{"a":0.5,"b":[1,2]}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`, in hexadecimal."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def _frozen(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A read-only copy through JSON, so that what is hashed is what a file will hold."""
    return MappingProxyType(json.loads(canonical(dict(values))))


def _key_spelling(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with the names that cell keys have always been computed from."""
    return {_KEY_NAMES.get(name, name): value for name, value in recipe.items()}


@dataclass(frozen=True)
class Cell:
    """One experiment: everything that its numbers depend on, and nothing else.

    Where the data lie, on which device and by which engine it is computed is not part of it.

    Attributes:
        protocol: "base-to-novel", "few-shot", "cross-dataset", "domain-shift", "leave-one-domain-out".
        method: name of the method.
        dataset: the dataset trained on.
        seed: of the few-shot draw, the start of learned tensors and the order of batches.
        shots: images a class; 0 where the protocol takes all.
        backbone: name of the backbone.
        fingerprint: hash of its weights.
        options: all options of the method, defaults included.
        recipe: all numbers of the training recipe, defaults included.
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

    def __hash__(self) -> int:
        return hash(self.key)

    def plain(self) -> dict[str, Any]:
        """The configuration as JSON values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: dict(v) if isinstance(v, Mapping) else v for name, v in values.items()}

    @property
    def key(self) -> str:
        """Sixteen hexadecimal digits that change with any part of the configuration.

        The backbone's name is left out (its fingerprint says which weights they are), and so is the way
        in which a role map was made: its hash says which roles they are.
        """
        plain = self.plain()
        del plain["backbone"]
        plain["roles"].pop("spec", None)
        plain["recipe"] = _key_spelling(plain["recipe"])
        return digest({"schema": SCHEMA, **plain})[:16]

    @property
    def training_key(self) -> str:
        """A key of what is trained alone: protocols that train on all classes share their adapters."""
        parts = self.plain()
        trained = {name: parts[name] for name in ("method", "dataset", "seed", "shots", "fingerprint")}
        trained |= {"options": parts["options"], "recipe": _key_spelling(parts["recipe"])}
        trained |= {"roles": parts["roles"].get("digest"), "draw": parts["setting"].get("draw")}
        return digest({"schema": SCHEMA, **trained})[:16]

    @property
    def stem(self) -> str:
        """File name without ending: words for people, the key for certainty."""
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
    """Where and how a cell is computed; none of it may change a number.

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
