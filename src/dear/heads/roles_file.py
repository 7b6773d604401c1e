"""The file `roles.json`: a role map as readable JSON in a stable order, checked when it is read."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dear._io.files import read_json, write_atomic
from dear._io.text import Line, Strict, Whole, Word, check, parse_json
from dear.errors import RoleError
from dear.heads.roles import Role, RoleMap

SCHEMA = 2
FORMAT = "dear roles"

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
        named = [(entry.layer, entry.head) for entry in self.roles]
        (key, count), *_ = Counter(named).most_common(1) or [((0, 0), 1)]
        if count > 1:
            raise ValueError(f"head {key} stands twice")
        if {layer for layer, _ in named} != set(self.layers):
            raise ValueError(f"roles must be those of the layers {self.layers}")


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


def write_roles(roles: RoleMap, path: str | os.PathLike[str]) -> None:
    """Write a map, whole or not at all."""
    write_atomic(path, _render(roles))


def read_roles_file(path: str | os.PathLike[str]) -> RoleMap:
    """The map of a file."""
    return _parse(read_json(path, "role map", max_bytes=64 * 1024 * 1024), str(Path(path)))


def table2() -> RoleMap:
    """The supplement's Table 2."""
    text = resources.files("dear.heads").joinpath("table2.json").read_text(encoding="utf-8")
    return _parse(parse_json(text, "table2.json", "role map"), "table2.json")


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
    """Check a parsed `roles.json` and build its map."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RoleError(f"{source}: is not a role map (no 'format')")
    if document.get("schema") != SCHEMA:
        raise RoleError(
            f"{source}: has schema {str(document.get('schema'))[:20]}, this version reads {SCHEMA}; discover "
            "the roles again"
        )
    read = check(document, RoleDocument, source, "role map", error=RoleError)
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


def _dump(value: Mapping[str, Any] | Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
