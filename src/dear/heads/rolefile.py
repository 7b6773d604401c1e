"""`roles.json`: how a role map is written, and what is checked when one is read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dear._io.text import Line, Strict, Whole, Word, check
from dear.errors import RoleError

if TYPE_CHECKING:
    from dear.heads.roles import RoleMap

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


def render(roles: RoleMap) -> str:
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


def parse(document: Any, source: str) -> dict[str, Any]:
    """Check a parsed `roles.json` and return the fields of a `RoleMap`; `roles` as plain mappings.

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
    table = {
        (entry.layer, entry.head): {
            "kind": entry.kind,
            "concept": entry.concept,
            "entropy": entry.entropy,
            "shares": entry.shares,
            "phrases": entry.phrases,
        }
        for entry in read.roles
    }
    return {
        "roles": table,
        "heads": read.heads,
        "backbone": read.backbone,
        "fingerprint": read.fingerprint,
        "depth": read.depth,
        "rule": read.rule,
        "parameters": read.parameters,
        "core": read.core,
        "evidence": read.evidence,
    }


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
