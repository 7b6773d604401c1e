"""The file of a role map, `roles.json`: its schema, checked when it is read, and its text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field, structs

from dear.errors import RoleError
from dear.heads.names import Head
from dear.heads.role import Information, Role
from dear.utils.schema import Line, Strict, Whole, Word, check

_FORMAT, _SCHEMA = "dear roles", 2
#: fields of the file other than roles and evidence
ABOUT = ("backbone", "location", "fingerprint", "depth", "layers", "heads", "rule", "parameters", "core")
_Count = Annotated[int, Meta(ge=1, le=512)]  # no tower has more layers or heads: more is a damaged file


class _Row(Role, frozen=True, kw_only=True):
    """One head in the file."""

    kind: Literal["core", "other", "generalization", "mixed"]
    layer: _Count
    head: Annotated[int, Meta(ge=0, lt=512)]
    concept: Word | None  # in a file nothing may be missing
    entropy: Annotated[float, Meta(ge=0)] | None
    shares: dict[Word, Annotated[float, Meta(ge=0, le=1)]]
    phrases: tuple[Line, ...]

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except RoleError as error:
            raise ValueError(str(error)) from None
        if self.shares and abs(sum(self.shares.values()) - 1) > 1e-3:
            raise ValueError(f"shares add up to {sum(self.shares.values()):.4f}, not to 1")


class _File(Strict, frozen=True):
    """The file."""

    format: Literal["dear roles"]
    schema: Literal[2]
    backbone: Line
    fingerprint: Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{16,64}\Z")] | None
    depth: _Count | None
    layers: Annotated[list[_Count], Meta(min_length=1)]
    heads: _Count
    rule: Line
    parameters: dict[str, Any]
    core: Annotated[tuple[Word, ...], Meta(min_length=1)]
    roles: list[_Row]
    evidence: dict[str, Any]
    location: Line | None = None

    def __post_init__(self) -> None:
        if self.layers != sorted(set(self.layers)):
            raise ValueError("layers must ascend, each once")
        if len(set(self.core)) != len(self.core):
            raise ValueError("core must be a list of different concepts")
        named = Counter((row.layer, row.head) for row in self.roles)
        twice = next((key for key, count in named.items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"head {twice} occurs twice")
        if {layer for layer, _ in named} != set(self.layers):
            raise ValueError(f"roles must be those of the layers {self.layers}")


class _ConceptSize(msgspec.Struct, frozen=True):
    phrases: Whole
    clusters: Whole


class _Concepts(msgspec.Struct, frozen=True):
    way: Line = ""
    phrases: Whole = 0
    clusters: Whole = 0
    noise: float = 0.0
    agreement: dict[Line, float] = field(default_factory=dict)
    concepts: dict[Line, _ConceptSize] = field(default_factory=dict)


class _Corpus(msgspec.Struct, frozen=True):
    name: Line = ""
    phrases: Whole = 0


class _Evidence(msgspec.Struct, frozen=True):
    """What pages show of the evidence; other entries are allowed and not read."""

    image_count: Whole = 0
    image_source: Line = ""
    corpus: _Corpus | None = None
    concepts: _Concepts | None = None
    concept_of: dict[Line, Line] = field(default_factory=dict)
    explained: dict[Line, list[float]] | None = None
    information: Information | None = None


def parse_roles(document: Any, source: str) -> dict[str, Any]:
    """The fields of a `RoleMap` from a parsed `roles.json`, checked."""
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise RoleError(f"{source}: is not a role map (no 'format')")
    if document.get("schema") != _SCHEMA:
        raise RoleError(
            f"{source}: has schema {str(document.get('schema'))[:20]}, this version reads {_SCHEMA}; "
            "discover the roles again"
        )
    read = check(document, _File, source, "role map", error=RoleError)
    evidence = check(
        read.evidence, _Evidence, f"{source}: evidence", "record of a discovery", error=RoleError
    )
    for layer, row in (evidence.explained or {}).items():
        if len(row) != read.heads:
            raise RoleError(
                f"{source}: evidence: explained[{layer}] must have {read.heads} values, not {len(row)}"
            )
    table = {
        (row.layer, row.head): Role(row.kind, row.concept, row.entropy, row.shares, row.phrases)
        for row in read.roles
    }
    about = {name: getattr(read, name) for name in ABOUT if name != "layers"}
    return {"table": table, **about, "evidence": read.evidence}


def format_roles(
    about: Mapping[str, Any], roles: Iterable[tuple[Head, Role]], evidence: Mapping[str, Any]
) -> str:
    """The text of `roles.json`, one head per line in the order of `roles`; `about` has the fields `ABOUT`."""
    top: dict[str, Any] = {"format": _FORMAT, "schema": _SCHEMA} | {name: about[name] for name in ABOUT}
    top["parameters"] = dict(sorted(top["parameters"].items()))
    lines = "".join(f" {_dump(name)}: {_dump(value)},\n" for name, value in top.items())
    rows = ({"layer": at[0], "head": at[1]} | structs.asdict(role) for at, role in roles)
    body = ",\n".join(f"  {_dump(row)}" for row in rows)
    text = _dump(dict(evidence), indent=1).replace("\n", "\n ")
    return f'{{\n{lines} "roles": [\n{body}\n ],\n "evidence": {text}\n}}\n'


def _dump(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
