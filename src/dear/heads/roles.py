"""Role maps: what each head of the last layers does, bound to the weights it was found in.

The file `roles.json` is written and checked here, too.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dear._io.files import read_json, write_atomic
from dear._io.text import Line, Strict, Whole, Word, check, parse_json
from dear.clip.factory import EMBEDDED
from dear.clip.model import Clip
from dear.errors import RoleError
from dear.heads.names import CORE, KINDS


@dataclass(frozen=True)
class Role:
    """What one head does.

    Attributes:
        kind: "core", "other", "generalization" or "mixed".
        concept: the concept a specialized head belongs to; None where none leads.
        entropy: Concept Entropy in bits; None where it was never measured (Table 2).
        shares: share of the head's phrases in each concept, largest first.
        phrases: the phrases TEXTSPAN picked, in order.
    """

    kind: str
    concept: str | None = None
    entropy: float | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    phrases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RoleError(f"{self.kind!r} is not a kind of role; choose from {', '.join(KINDS)}")
        if self.kind in ("core", "other") and self.concept is None:
            raise RoleError(f"a head of kind {self.kind!r} needs a concept")


@dataclass(frozen=True)
class RoleMap:
    """Roles of all heads of some layers; `roles[12, 7]` is the role of head 7 in layer 12.

    Layers count from 1, heads from 0, as in the supplement's Table 2.

    Attributes:
        table: role of each (layer, head).
        heads: heads per layer.
        backbone: name of the backbone, for people.
        fingerprint: hash of the visual weights the map was computed on; None: bound to no weights.
        depth: layers of the tower it was computed on; None: any.
        rule: name of the rule that made it, and its `parameters`.
        core: concepts that have an attribute token, in the order of the tokens.
        evidence: what the discovery measured beside the roles (plain JSON values).

    >>> roles = RoleMap.table2()
    >>> roles[12, 7].concept, roles.counts()["core"]
    ('Object', 28)
    """

    table: Mapping[tuple[int, int], Role]
    heads: int
    backbone: str = ""
    fingerprint: str | None = None
    depth: int | None = None
    rule: str = "given"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    core: tuple[str, ...] = CORE
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
        """The role of head `key = (layer, head)`.

        Raises:
            RoleError: the map has no such head.
        """
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
        text = resources.files("dear.heads").joinpath("table2.json").read_text(encoding="utf-8")
        return _parse(parse_json(text, "table2.json", "role map"), "table2.json")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the map as readable JSON in a stable order, whole or not at all."""
        write_atomic(path, _render(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RoleMap:
        """Read a map written by `save`.

        Raises:
            DearError: the file is missing or not JSON.
            RoleError: it is JSON but not a whole role map.
        """
        return _parse(read_json(path, "role map", max_bytes=64 * 1024 * 1024), str(Path(path)))

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


SCHEMA = 2
FORMAT = "dear roles"
# Words of schema 1, and what they are called since.
_RENAMED = {"pictures": "image_count", "images": "image_source", "phrases_a_head": "phrases_per_head"}

Count = Annotated[int, Meta(ge=1, le=512)]  # no tower has more layers or heads: more is a damaged file
Share = Annotated[float, Meta(ge=0, le=1)]


class HeadEntry(Strict, frozen=True):
    """One head in the file."""

    layer: Count
    head: Annotated[int, Meta(ge=0, lt=512)]
    kind: Literal["core", "other", "generalization", "mixed"]
    concept: Word | None
    entropy: Annotated[float, Meta(ge=0)] | None
    shares: dict[Word, Share]
    phrases: tuple[Line, ...]

    def __post_init__(self) -> None:
        if self.shares and abs(sum(self.shares.values()) - 1) > 1e-3:
            raise ValueError(f"shares add up to {sum(self.shares.values()):.4f}, not to 1")
        if self.kind in ("core", "other") and self.concept is None:
            raise ValueError(f"a head of kind {self.kind!r} needs a concept")


class RoleDocument(Strict, frozen=True):
    """The whole file."""

    format: Literal["dear roles"]
    schema: Literal[2]
    backbone: Line
    fingerprint: Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{16,64}\Z")] | None
    depth: Count | None
    layers: Annotated[list[Count], Meta(min_length=1)]
    heads: Count
    rule: Line
    parameters: dict[str, Any]
    core: Annotated[tuple[Word, ...], Meta(min_length=1)]
    roles: list[HeadEntry]
    evidence: dict[str, Any]

    def __post_init__(self) -> None:
        if self.layers != sorted(set(self.layers)):
            raise ValueError("layers must ascend, each once")
        if len(set(self.core)) != len(self.core):
            raise ValueError("core must be a list of different concepts")
        expected = {(layer, head) for layer in self.layers for head in range(self.heads)}
        named = [(entry.layer, entry.head) for entry in self.roles]
        (key, count), *_ = Counter(named).most_common(1) or [((0, 0), 1)]
        if count > 1:
            raise ValueError(f"head {key} stands twice")
        if set(named) != expected:
            raise ValueError(
                f"roles must name each of the {self.heads} heads of layers {self.layers} once; see head "
                f"{min(set(named) ^ expected)}"
            )


class ConceptSize(msgspec.Struct, frozen=True):
    """How large a concept is."""

    phrases: Whole
    clusters: Whole


class ConceptSummary(msgspec.Struct, frozen=True):
    """What pages show of the concepts."""

    way: Line = ""
    phrases: Whole = 0
    clusters: Whole = 0
    noise: float = 0.0
    agreement: dict[Line, float] = msgspec.field(default_factory=dict)
    concepts: dict[Line, ConceptSize] = msgspec.field(default_factory=dict)


class CorpusSummary(msgspec.Struct, frozen=True):
    """What pages show of the corpus."""

    name: Line = ""
    phrases: Whole = 0


class Evidence(msgspec.Struct, frozen=True):
    """What pages show of the evidence; other entries are allowed and not read."""

    image_count: Whole = 0
    image_source: Line = ""
    corpus: CorpusSummary | None = None
    concepts: ConceptSummary | None = None
    concept_of: dict[Line, Line] = msgspec.field(default_factory=dict)
    explained: dict[Line, list[float]] | None = None


def _render(roles: RoleMap) -> str:
    """The text of `roles.json`: one line per head, the same map always the same text."""
    top = {
        "format": FORMAT,
        "schema": SCHEMA,
        "backbone": roles.backbone,
        "fingerprint": roles.fingerprint,
        "depth": roles.depth,
        "layers": list(roles.layers),
        "heads": roles.heads,
        "rule": roles.rule,
        "parameters": dict(sorted(roles.parameters.items())),
        "core": list(roles.core),
    }
    lines = [f" {_dump(key)}: {_dump(value)}," for key, value in top.items()]
    rows = [
        _dump(
            {
                "layer": layer,
                "head": head,
                "kind": role.kind,
                "concept": role.concept,
                "entropy": role.entropy,
                "shares": dict(role.shares),
                "phrases": list(role.phrases),
            }
        )
        for (layer, head), role in roles
    ]
    body = ",\n".join(f"  {row}" for row in rows)
    evidence = json.dumps(dict(roles.evidence), ensure_ascii=False, allow_nan=False, indent=1).replace(
        "\n", "\n "
    )
    return "{\n" + "\n".join(lines) + f'\n "roles": [\n{body}\n ],\n "evidence": {evidence}\n' + "}\n"


def _parse(document: Any, source: str) -> RoleMap:
    """Check a parsed `roles.json` and build its map.

    Raises:
        RoleError: naming `source`, the place in it and what is wrong there.
    """
    read = check(
        document,
        RoleDocument,
        source,
        "role map",
        error=RoleError,
        upgrade=lambda found: _upgraded(found, source),
    )
    evidence = check(read.evidence, Evidence, f"{source}: evidence", "record of a discovery", error=RoleError)
    for layer, row in (evidence.explained or {}).items():
        if len(row) != read.heads:
            raise RoleError(
                f"{source}: evidence: explained[{layer}] must have {read.heads} values, not {len(row)}"
            )
    try:
        table = {
            (entry.layer, entry.head): Role(
                entry.kind, entry.concept, entry.entropy, entry.shares, entry.phrases
            )
            for entry in read.roles
        }
        return RoleMap(
            table,
            heads=read.heads,
            backbone=read.backbone,
            fingerprint=read.fingerprint,
            depth=read.depth,
            rule=read.rule,
            parameters=read.parameters,
            core=read.core,
            evidence=read.evidence,
        )
    except RoleError as error:
        raise RoleError(f"{source}: {error}") from None


def _upgraded(document: Any, source: str) -> Any:
    """A document of this or an older schema in the words of this one."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RoleError(f"{source}: is not a role map (no 'format')")
    schema = document.get("schema")
    if type(schema) is not int or schema not in (1, SCHEMA):
        raise RoleError(
            f"{source}: has schema {str(schema)[:20]}, this version reads 1 to {SCHEMA}; upgrade dear-vlm, "
            "or discover the roles again"
        )
    evidence = document.get("evidence")
    if schema == 1 and isinstance(evidence, dict):
        evidence = {_RENAMED.get(key, key): value for key, value in evidence.items()}
        return {**document, "schema": SCHEMA, "evidence": evidence}
    return document


def _dump(value: Mapping[str, Any] | Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


TABLE2 = "table2"  #: the name of the supplement's map
# How OpenAI's ViT-B/16 is called: on the hub, as a folder downloaded from there, and as OpenAI's own file.
_OPENAI_B16 = re.compile(r"(openai/)?clip-vit-base-patch16|vit-b-16(\.pt)?", re.IGNORECASE)


def known_roles(clip: Clip) -> RoleMap | None:
    """The role map to use on a backbone when none is given; None: it has to be discovered.

    An embedded backbone has its own. Table 2 is used for OpenAI's ViT-B/16 alone (see `is_openai_b16`); on
    any other tower of 12 layers of 12 heads it has to be asked for by name: `read_roles("table2")`.

    >>> from dear.clip.config import ClipConfig
    >>> known_roles(Clip(ClipConfig.named("ViT-B-16"), "openai/clip-vit-base-patch16")).rule
    'table2'
    >>> known_roles(Clip(ClipConfig.named("ViT-B-32"), "openai/clip-vit-base-patch32")) is None
    True
    """
    own = EMBEDDED / clip.name / "roles.json"
    if own.is_file():
        roles = RoleMap.load(own)
        if roles.fingerprint == clip.fingerprint:
            return roles
    return RoleMap.table2() if is_openai_b16(clip) else None


def is_openai_b16(clip: Clip) -> bool:
    """Whether a backbone is OpenAI's ViT-B/16, told by its name, its shape and its activation.

    Its name must be the hub's ("openai/clip-vit-base-patch16"), that of a folder downloaded from there, or
    that of OpenAI's file ("ViT-B-16.pt"); LAION's weights of the same shape have another activation.
    """
    vision = clip.config.vision
    shape = (vision.layers, vision.heads, vision.width, vision.patch_size, vision.image_size)
    return (
        _OPENAI_B16.fullmatch(clip.name) is not None
        and shape == (12, 12, 768, 16, 224)
        and vision.activation == "quick_gelu"
    )


def read_roles(source: str | os.PathLike[str]) -> RoleMap:
    """A role map by file, or Table 2 by its name.

    >>> read_roles("table2").counts()["core"]
    28
    """
    return RoleMap.table2() if os.fspath(source) == TABLE2 else RoleMap.load(source)
