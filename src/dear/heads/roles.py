"""Role maps: what each head of the last layers does, bound to the weights it was found in."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dear.clip.model import Clip
from dear.errors import RoleError
from dear.heads.names import CORE, KINDS


@dataclass(frozen=True)
class Role:
    """What one head does."""

    kind: str  #: "core", "other", "generalization" or "mixed"
    concept: str | None = None  #: the concept a specialized head belongs to; None where none leads
    entropy: float | None = None  #: Concept Entropy in bits; None where it was never measured (Table 2)
    #: share of the head's phrases in each concept, largest first
    shares: Mapping[str, float] = field(default_factory=dict)
    phrases: tuple[str, ...] = ()  #: the phrases TEXTSPAN picked, in order

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RoleError(f"{self.kind!r} is not a kind of role; choose from {', '.join(KINDS)}")
        if self.kind in ("core", "other") and self.concept is None:
            raise RoleError(f"a head of kind {self.kind!r} needs a concept")


@dataclass(frozen=True)
class RoleMap:
    """Roles of all heads of some layers; `roles[12, 7]` is the role of head 7 in layer 12.

    Layers count from 1, heads from 0, as in the supplement's Table 2.

    >>> roles = RoleMap.table2()
    >>> roles[12, 7].concept, roles.counts()["core"]
    ('Object', 28)
    """

    table: Mapping[tuple[int, int], Role]  #: role of each (layer, head)
    heads: int  #: heads per layer
    backbone: str = ""  #: name of the backbone, for people
    #: hash of the visual weights the map was computed on; None: bound to no weights
    fingerprint: str | None = None
    depth: int | None = None  #: layers of the tower it was computed on; None: any
    rule: str = "given"  #: name of the rule that made it, and its `parameters`
    parameters: Mapping[str, Any] = field(default_factory=dict)
    core: tuple[str, ...] = CORE  #: concepts that have an attribute token, in the order of the tokens
    #: what the discovery measured beside the roles (plain JSON values)
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers = sorted({layer for layer, _ in self.table})
        expected = {(layer, head) for layer in layers for head in range(self.heads)}
        if not layers or set(self.table) != expected:
            missing = sorted(expected - set(self.table)) or sorted(set(self.table) - expected)
            raise RoleError(
                f"a role map needs each of {self.heads} heads of its layers once; see {missing[:3]}"
            )
        if layers[0] < 1 or (self.depth is not None and layers[-1] > self.depth):
            raise RoleError(f"layers {layers} do not lie in a tower of {self.depth} layers counted from 1")
        for (layer, head), role in self.table.items():
            if role.kind == "core" and role.concept not in self.core:
                raise RoleError(
                    f"head ({layer}, {head}) is core for {role.concept!r}, not one of {', '.join(self.core)}"
                )

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have roles, ascending."""
        return tuple(sorted({layer for layer, _ in self.table}))

    def __getitem__(self, key: tuple[int, int]) -> Role:
        """The role of head `key = (layer, head)`."""
        try:
            return self.table[key]
        except KeyError:
            raise RoleError(
                f"no role for {key}; this map has layers {_span(self.layers)}, heads 0-{self.heads - 1}"
            ) from None

    def __iter__(self) -> Iterator[tuple[tuple[int, int], Role]]:
        """((layer, head), role) in reading order."""
        return iter(sorted(self.table.items()))

    def __len__(self) -> int:
        """Number of heads in the map."""
        return len(self.table)

    def select(self, kind: str | None = None, concept: str | None = None) -> tuple[tuple[int, int], ...]:
        """(layer, head) of all heads of a kind and / or of a concept, in reading order.

        >>> RoleMap.table2().select("core", "Shape")
        ((10, 10), (12, 5))
        """
        return tuple(
            key
            for key, role in self
            if (kind is None or role.kind == kind) and (concept is None or role.concept == concept)
        )

    def counts(self) -> dict[str, int]:
        """Number of heads of each kind, all four kinds always present."""
        found = Counter(role.kind for role in self.table.values())
        return {kind: found[kind] for kind in KINDS}

    def concept_counts(self, kind: str = "core") -> dict[str, int]:
        """Number of heads of each concept among the heads of `kind`, largest first."""
        found = Counter(str(role.concept) for role in self.table.values() if role.kind == kind)
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def shuffled(self, seed: int) -> RoleMap:
        """Kinds and concepts dealt out again at random over all heads: the ablation of supplement E.

        Counts stay as they are; entropy, shares and phrases stay with their head.
        """
        keys = sorted(self.table)
        order = list(keys)
        random.Random(seed).shuffle(order)
        table = {
            key: replace(self.table[key], kind=self.table[source].kind, concept=self.table[source].concept)
            for key, source in zip(keys, order, strict=True)
        }
        parameters = {"of": self.rule, "seed": seed, **self.parameters}
        return replace(self, table=table, rule="shuffled", parameters=parameters)

    @classmethod
    def uniform(cls, kind: str, layers: Sequence[int], heads: int, core: tuple[str, ...] = CORE) -> RoleMap:
        """Every head of the same kind: "generalization" and "mixed" are the main text's two variants.

        >>> RoleMap.uniform("mixed", range(9, 13), 12).counts()["mixed"]
        48
        """
        if kind not in ("generalization", "mixed"):
            raise RoleError(f"a uniform role map is 'generalization' or 'mixed', not {kind!r}")
        table = {(layer, head): Role(kind) for layer in layers for head in range(heads)}
        return cls(table, heads, rule="uniform", parameters={"kind": kind}, core=core)

    @classmethod
    def table2(cls) -> RoleMap:
        """The supplement's Table 2: ViT-B/16, layers 9-12, with its phrases."""
        from dear.heads.roles_file import table2

        return table2()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the map as readable JSON in a stable order, whole or not at all."""
        from dear.heads.roles_file import write_roles

        write_roles(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RoleMap:
        """Read a map written by `save`.

        Raises:
            DearError: the file is missing or not JSON.
            RoleError: it is JSON but not a whole role map.
        """
        from dear.heads.roles_file import read_roles_file

        return read_roles_file(path)

    def check(self, clip: Clip, allow_other: bool = False) -> str | None:
        """Refuse to be used on weights the map was not computed on.

        Args:
            clip: the backbone the map is about to be used on.
            allow_other: use it on other weights of a fitting shape all the same.

        Returns:
            A sentence the user should see (Table 2, or other weights allowed), or None.

        Raises:
            RoleError: the shape does not fit, or the weights are others and `allow_other` is False.
        """
        vision = clip.config.vision
        if vision.heads != self.heads or vision.layers < self.layers[-1]:
            raise RoleError(
                f"the role map covers layers {_span(self.layers)} of {self.heads} heads, but this tower has "
                f"{vision.layers} layers of {vision.heads} heads; compute its own map with discover_roles",
                hint="discover",
            )
        if self.depth is not None and vision.layers != self.depth:
            raise RoleError(
                f"the role map was made for a tower of {self.depth} layers, this one has {vision.layers}; "
                "compute its own map with discover_roles",
                hint="discover",
            )
        if self.fingerprint is None:
            if "table2" in (self.rule, self.parameters.get("of")):
                return "Table 2 names no weights: its roles are taken over for this 12 x 12 tower unchecked."
            return None
        if clip.fingerprint == self.fingerprint:
            return None
        facts = f"the role map was computed on {self.backbone or 'weights'} {_short(self.fingerprint)}"
        if allow_other:
            return f"Notice: {facts}, and is used on other weights {_short(clip.fingerprint)} as you asked."
        raise RoleError(
            f"{facts}, not on these {_short(clip.fingerprint)}; compute a map with discover_roles, "
            "or pass allow_other=True to use it all the same",
            hint="allow-other-roles",
        )


def _span(layers: Sequence[int]) -> str:
    """Consecutive layers as 9-12, others one by one."""
    if len(layers) > 1 and layers[-1] - layers[0] == len(layers) - 1:
        return f"{layers[0]}-{layers[-1]}"
    return ", ".join(map(str, layers))


def _short(fingerprint: str) -> str:
    """Enough of a fingerprint to tell two apart."""
    return f"({fingerprint[:19]}…)"
