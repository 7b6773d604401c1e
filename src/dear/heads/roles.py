"""Role maps: what each head of the last layers does, bound to the weights it was discovered on."""

from __future__ import annotations

import html
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import field, structs

from dear.clip.model import Clip
from dear.errors import RoleError
from dear.heads.names import CORE, KINDS, Head
from dear.heads.role import Information, Role
from dear.heads.roles_file import ABOUT, format_roles, parse_roles
from dear.utils.files import PathLike, read_json, write_atomic
from dear.utils.schema import Strict, parse_json

if TYPE_CHECKING:
    import pandas as pd


class RoleMap(Strict, frozen=True):
    """Roles of all heads of some layers; `roles[12, 7]` is the role of head 7 in layer 12.

    Layers count from 1, heads from 0, as in the supplement's Table 2.

    >>> roles = RoleMap.table2()
    >>> roles[12, 7].concept, roles.counts()["core"]
    ('Object', 28)
    """

    table: Mapping[Head, Role]  #: role of each (layer, head)
    heads: int  #: heads per layer
    backbone: str = ""  #: name of the backbone, for people
    #: hash of the visual weights the map was computed on; None: bound to no weights
    fingerprint: str | None = None
    depth: int | None = None  #: layers of the tower it was computed on; None: any
    rule: str = "given"  #: name of the rule that made it, and its `parameters`
    parameters: Mapping[str, Any] = field(default_factory=dict)
    core: tuple[str, ...] = CORE  #: concepts that have an attribute token, in the order of the tokens
    #: what the discovery measured in addition to the roles (plain JSON values)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    location: str | None = None  #: absolute path of the backbone, where it is a file or folder of the user

    def __post_init__(self) -> None:
        layers = sorted({layer for layer, _ in self.table})
        expected = {(layer, head) for layer in layers for head in range(self.heads)}
        if not layers or set(self.table) != expected:
            missing = sorted(expected - set(self.table)) or sorted(set(self.table) - expected)
            raise RoleError(
                f"a role map needs each of {self.heads} heads of its layers once; see {missing[:3]}"
            )
        if layers[0] < 1 or (self.depth is not None and layers[-1] > self.depth):
            raise RoleError(f"layers of this role map must be 1 to {self.depth}, got {layers}")
        for (layer, head), role in self.table.items():
            if role.kind == "core" and role.concept not in self.core:
                raise RoleError(
                    f"head ({layer}, {head}) is core for {role.concept!r}, not one of {', '.join(self.core)}"
                )

    def __repr__(self) -> str:
        counts = ", ".join(f"{number} {kind}" for kind, number in self.counts().items() if number)
        where = f"layers {_span(self.layers)} of {self.heads} heads"
        return f"RoleMap({self.backbone or 'any backbone'}, {where}: {counts})"

    def _repr_html_(self) -> str:
        """A table of layers and heads, for notebooks; the phrases of a head are its tooltip."""
        caveat = f"<p>{html.escape(self.caveat())}</p>" if self.caveat() else ""
        shown = self.for_display()
        columns = "".join(f"<th>{head}</th>" for head in range(self.heads))
        rows = []
        for layer in self.layers:
            cells = []
            for head in range(self.heads):
                role = shown[layer, head]
                name = str(role.concept if role.kind in ("core", "other") else role.kind)
                phrases = "; ".join(role.phrases[:5])
                cells.append(f'<td title="{html.escape(phrases)}">{html.escape(name)}</td>')
            rows.append(f"<tr><th>layer {layer}</th>{''.join(cells)}</tr>")
        body = f"<tr><th>head</th>{columns}</tr>{''.join(rows)}"
        return f"{caveat}<table><caption>{html.escape(repr(shown))}</caption>{body}</table>"

    def to_frame(self) -> pd.DataFrame:
        """One row per head as a pandas table: layer, head, kind, concept, entropy, phrases.

        >>> RoleMap.table2().to_frame().query("layer == 12 and head == 7").concept.item()
        'Object'
        """
        import pandas as pd

        rows = [
            (layer, head, role.kind, role.concept, role.entropy, "; ".join(role.phrases))
            for (layer, head), role in self.for_display()
        ]
        return pd.DataFrame(rows, columns=["layer", "head", "kind", "concept", "entropy", "phrases"])

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have roles, ascending."""
        return tuple(sorted({layer for layer, _ in self.table}))

    def __getitem__(self, key: Head) -> Role:
        try:
            return self.table[key]
        except KeyError:
            raise RoleError(
                f"no role for {key}; this map has layers {_span(self.layers)}, heads 0-{self.heads - 1}"
            ) from None

    def __iter__(self) -> Iterator[tuple[Head, Role]]:
        """((layer, head), role) in reading order."""
        return iter(sorted(self.table.items()))

    def __len__(self) -> int:
        return len(self.table)

    def backbone_source(self) -> str:
        """What to load as the backbone: its location, while it exists; else its name."""
        path = self.location
        return path if path and os.path.isabs(path) and os.path.exists(path) else self.backbone

    @property
    def information(self) -> Information | None:
        """Information of the heads about concepts; None: not measured."""
        value = self.evidence.get("information")
        return None if value is None else msgspec.convert(value, Information)

    def is_informative(self) -> bool | None:
        """Whether the information of the heads exceeds chance; None: not measured.

        >>> RoleMap.table2().is_informative() is None
        True
        """
        information = self.information
        return None if information is None else information.exceeds_chance

    def caveat(self) -> str:
        """A sentence for users where the map is close to chance; else empty.

        Whoever shows the concepts of heads shows this sentence in their place.
        """
        information = self.information
        if information is None or information.exceeds_chance:
            return ""
        return (
            f"The role map of {self.backbone or 'this backbone'} is close to chance: its heads carry "
            f"{information.bits:.2f} bits about concepts, the same heads rotated at random "
            f"{information.rotated:.2f} ± {information.deviation:.2f}."
        )

    def for_display(self) -> RoleMap:
        """The map for people: itself, or one without concepts and phrases where it is close to chance.

        >>> chance = {"information": {"bits": 0.4, "rotated": 0.39, "deviation": 0.02, "rotations": 8}}
        >>> shown = structs.replace(RoleMap.table2(), evidence=chance).for_display()
        >>> shown.counts()["mixed"] == len(shown), RoleMap.table2().for_display() == RoleMap.table2()
        (True, True)
        """
        if not self.caveat():
            return self
        table = {key: Role("mixed", entropy=role.entropy) for key, role in self.table.items()}
        named = ("concepts", "concept_of")
        evidence = {name: value for name, value in self.evidence.items() if name not in named}
        return structs.replace(self, table=table, evidence=evidence)

    def select(self, kind: str | None = None, concept: str | None = None) -> tuple[Head, ...]:
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
        counts = Counter(role.kind for role in self.table.values())
        return {kind: counts[kind] for kind in KINDS}

    def concept_counts(self, kind: str = "core") -> dict[str, int]:
        """Number of heads of each concept among the heads of `kind`, largest first."""
        counts = Counter(str(role.concept) for role in self.table.values() if role.kind == kind)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def shuffled(self, seed: int) -> RoleMap:
        """Kinds and concepts dealt out again at random over all heads: the ablation of supplement E.

        Counts stay as they are; entropy, shares and phrases stay with their head.
        """
        keys = sorted(self.table)
        order = list(keys)
        random.Random(seed).shuffle(order)
        table = {
            key: structs.replace(self.table[key], kind=other.kind, concept=other.concept)
            for key, other in zip(keys, map(self.table.__getitem__, order), strict=True)
        }
        parameters = {"of": self.rule, "seed": seed, **self.parameters}
        measured = ("information", "stability")  # of the map as it was
        evidence = {name: value for name, value in self.evidence.items() if name not in measured}
        return structs.replace(self, table=table, rule="shuffled", parameters=parameters, evidence=evidence)

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
        text = resources.files("dear.heads").joinpath("table2.json").read_text(encoding="utf-8")
        return cls._read(parse_json(text, "table2.json", "role map"), "table2.json")

    @classmethod
    def load(cls, path: PathLike) -> RoleMap:
        """Read a map written by `save`.

        Raises:
            DearError: the file is missing or not JSON.
            RoleError: it is JSON but not a complete role map.
        """
        return cls._read(read_json(path, "role map", max_bytes=64 * 1024 * 1024), str(Path(path)))

    @classmethod
    def _read(cls, document: Any, source: str) -> RoleMap:
        fields = parse_roles(document, source)
        try:
            return cls(**fields)
        except RoleError as error:
            raise RoleError(f"{source}: {error}") from None

    def save(self, path: PathLike) -> None:
        """Write the map atomically, as readable JSON in a stable order."""
        about = {name: getattr(self, name) for name in ABOUT}
        write_atomic(path, format_roles(about, self, self.evidence))

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
                f"{vision.layers} layers of {vision.heads} heads; compute a map for it with discover_roles",
                hint="discover",
            )
        if self.depth is not None and vision.layers != self.depth:
            raise RoleError(
                f"the role map was made for a tower of {self.depth} layers, this one has {vision.layers}; "
                "compute a map for it with discover_roles",
                hint="discover",
            )
        if self.fingerprint is None:
            if "table2" in (self.rule, self.parameters.get("of")):
                return "Table 2 names no weights: its roles are used for this 12 x 12 tower unchecked."
            return None
        if clip.fingerprint == self.fingerprint:
            return None
        facts = f"the role map was computed on {self.backbone or 'weights'} {_short(self.fingerprint)}"
        if allow_other:
            return f"Notice: {facts}, and is used on other weights {_short(clip.fingerprint)} as requested."
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
    """The first digits of a fingerprint."""
    return f"({fingerprint[:19]}…)"
