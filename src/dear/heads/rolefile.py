"""`roles.json`: how a role map is written, and what is checked when one is read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dear._io.printable import unprintable
from dear.errors import RoleError
from dear.heads.names import KINDS

if TYPE_CHECKING:
    from dear.heads.roles import RoleMap

SCHEMA = 1
FORMAT = "dear roles"
_KEYS = {
    "format", "schema", "backbone", "fingerprint", "depth", "layers", "heads", "rule", "parameters", "core",
    "roles", "evidence",
}  # fmt: skip
_ROLE_KEYS = {"layer", "head", "kind", "concept", "entropy", "shares", "phrases"}
_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{16,64}")
_LONGEST = 1000  # characters of a phrase or a name
_MOST = 512  # no tower has more layers or heads; a larger number is a damaged file


def render(roles: RoleMap) -> str:
    """The text of `roles.json`: one line a head, the same map always the same text."""
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

    def demand(condition: bool, complaint: str) -> None:
        if not condition:
            raise RoleError(f"{source}: {complaint}")

    demand(isinstance(document, dict) and document.get("format") == FORMAT, "is not a role map (no 'format')")
    schema = document.get("schema")
    demand(
        type(schema) is int and schema == SCHEMA,
        f"has schema {schema!r}, this dear reads {SCHEMA}; upgrade dear or compute the map again",
    )
    demand(set(document) == _KEYS, f"keys missing or unknown: {', '.join(sorted(set(document) ^ _KEYS))}")
    heads, depth, layers = document["heads"], document["depth"], document["layers"]
    demand(_count(heads), f"'heads' must be a number from 1 to {_MOST}")
    demand(depth is None or _count(depth), f"'depth' must be null or a number from 1 to {_MOST}")
    demand(
        isinstance(layers, list)
        and all(map(_count, layers))
        and layers == sorted(set(layers))
        and bool(layers),
        "'layers' must be an ascending list of layer numbers from 1",
    )
    fingerprint = document["fingerprint"]
    demand(
        fingerprint is None or (isinstance(fingerprint, str) and bool(_FINGERPRINT.fullmatch(fingerprint))),
        "'fingerprint' must be null or 'sha256:…'",
    )
    demand(_text(document["backbone"]), "'backbone' must be plain text")
    demand(_text(document["rule"]), "'rule' must be plain text")
    demand(isinstance(document["parameters"], dict), "'parameters' must be an object")
    evidence = document["evidence"]
    demand(isinstance(evidence, dict), "'evidence' must be an object")
    for name, fits in _EVIDENCE.items():
        demand(name not in evidence or fits(evidence[name]), f"'evidence': {name} is not as it should be")
    explained = evidence.get("explained") or {}
    demand(all(len(row) == heads for row in explained.values()), "'evidence': explained must name all heads")
    core = document["core"]
    demand(
        isinstance(core, list) and all(map(_word, core)) and len(set(core)) == len(core) and bool(core),
        "'core' must be a list of different concept names",
    )
    demand(isinstance(document["roles"], list), "'roles' must be a list")
    demand(len(document["roles"]) == len(layers) * heads, f"'roles' must hold {len(layers) * heads} heads")
    table: dict[tuple[int, int], dict[str, Any]] = {}
    for place, entry in enumerate(document["roles"]):
        key, role = _role(entry, f"{source}: roles[{place}]")
        demand(key not in table, f"head {key} stands twice")
        demand(key[0] in layers and 0 <= key[1] < heads, f"head {key} lies outside 'layers' and 'heads'")
        table[key] = role
    return {
        "roles": table,
        "heads": heads,
        "backbone": document["backbone"],
        "fingerprint": fingerprint,
        "depth": depth,
        "rule": document["rule"],
        "parameters": document["parameters"],
        "core": tuple(core),
        "evidence": evidence,
    }


def _role(entry: Any, place: str) -> tuple[tuple[int, int], dict[str, Any]]:
    """One checked head of the file."""
    if not isinstance(entry, dict) or set(entry) != _ROLE_KEYS:
        raise RoleError(f"{place}: needs exactly the keys {', '.join(sorted(_ROLE_KEYS))}")
    layer, head, kind, concept = entry["layer"], entry["head"], entry["kind"], entry["concept"]
    if not _count(layer) or not (_count(head) or head == 0) or isinstance(head, bool):
        raise RoleError(f"{place}: 'layer' and 'head' must be whole numbers")
    if kind not in KINDS:
        raise RoleError(f"{place}: kind {kind!r} is not one of {', '.join(KINDS)}")
    if concept is not None and not _word(concept):
        raise RoleError(f"{place}: 'concept' must be null or a name")
    entropy, shares, phrases = entry["entropy"], entry["shares"], entry["phrases"]
    if entropy is not None and not (_number(entropy) and entropy >= 0):
        raise RoleError(f"{place}: 'entropy' must be null or a number of bits, 0 or more")
    if not isinstance(shares, dict) or not all(
        _word(concept) and _number(share) and 0 <= share <= 1 for concept, share in shares.items()
    ):
        raise RoleError(f"{place}: 'shares' must give concepts numbers from 0 to 1")
    if shares and abs(sum(shares.values()) - 1) > 1e-3:
        raise RoleError(f"{place}: 'shares' add up to {sum(shares.values()):.4f}, not to 1")
    if not isinstance(phrases, list) or not all(map(_text, phrases)):
        raise RoleError(f"{place}: 'phrases' must be a list of plain texts of at most {_LONGEST} characters")
    role = {"kind": kind, "concept": concept, "entropy": entropy, "shares": shares, "phrases": tuple(phrases)}
    return (layer, head), role


def _dump(value: Mapping[str, Any] | Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _word(value: Any) -> bool:
    return _text(value) and bool(value.strip()) and len(value) <= 80


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST and unprintable(value) is None


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _object(value: Any, fits: Callable[[Any], bool]) -> bool:
    """Whether a value is an object of plain keys and fitting values."""
    return isinstance(value, dict) and all(_text(key) and fits(entry) for key, entry in value.items())


def _concepts(value: Any) -> bool:
    """Whether a value is the summary of the concepts that pages show."""
    parts: dict[str, Callable[[Any], bool]] = {
        "way": _text,
        "phrases": _whole,
        "clusters": _whole,
        "noise": _number,
        "agreement": lambda found: _object(found, _number),
        "concepts": lambda found: _object(
            found, lambda entry: _object(entry, _whole) and {"phrases", "clusters"} <= set(entry)
        ),
    }
    return isinstance(value, dict) and all(
        key not in value or fits(value[key]) for key, fits in parts.items()
    )


# What pages show of the evidence; anything else in it is passed over.
_EVIDENCE: dict[str, Callable[[Any], bool]] = {
    "image_count": _whole,
    "image_source": _text,
    "corpus": lambda value: (
        isinstance(value, dict) and _text(value.get("name", "")) and _whole(value.get("phrases", 0))
    ),
    "concepts": _concepts,
    "concept_of": lambda value: _object(value, _text),
    "explained": lambda value: _object(value, lambda row: isinstance(row, list) and all(map(_number, row))),
}
