"""A cell's file: its schema, and how it is read before its results reach a table or a page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dear._io.files import read_json
from dear._io.printable import PRINTABLE
from dear._io.strict_json import Strict, Whole, check
from dear.bench.cells import SCHEMA, Cell
from dear.bench.protocols import PROTOCOLS
from dear.bench.protocols.base import Protocol
from dear.errors import RunError

WHAT = "cell of a grid"
Text = Annotated[str, Meta(max_length=4096, pattern=PRINTABLE)]  # datasets may be paths
Share = Annotated[float, Meta(ge=0, le=1)]
_RENAMED = {"trainable_numbers": "trainable_parameters"}  # names in results of schema 1


class Configuration(Strict, frozen=True):
    """The part `cell` of a file; the fields of `Cell`."""

    protocol: Text
    method: Text
    dataset: Text
    seed: Whole
    shots: Whole
    backbone: Text
    fingerprint: Text
    options: dict[Text, Any] = msgspec.field(default_factory=dict)
    recipe: dict[Text, Any] = msgspec.field(default_factory=dict)
    roles: dict[Text, Any] = msgspec.field(default_factory=dict)
    setting: dict[Text, Any] = msgspec.field(default_factory=dict)


class MadeWith(msgspec.Struct, frozen=True):
    """Versions and machine; more names are allowed."""

    dear: Text
    torch: Text
    hardware: Text


class Facts(msgspec.Struct, frozen=True):
    """What a method tells of itself; more names are allowed, and shown nowhere."""

    fusion_weights: dict[Text, float] = {}


class Result(msgspec.Struct, frozen=True):
    """What every result holds; protocols and later versions add columns and names of their own.

    Attributes:
        modes: mode -> column -> a fraction of 1, or null where nothing could be measured.
    """

    modes: Annotated[dict[Text, dict[Text, Share | None]], Meta(min_length=1)]
    facts: Facts = Facts()
    seconds: dict[Text, float] = {}
    trainable_parameters: Whole = 0
    adapter_bytes: Whole = 0
    steps: Whole = 0
    made_with: MadeWith | None = None


class Document(Strict, frozen=True):
    """A whole file."""

    schema: int
    key: Text
    cell: Configuration
    result: Result


def upgraded(document: Any) -> Any:
    """A file of schema 1 in the words of schema 2.

    Raises:
        ValueError: it is no whole cell, or was written by a later version.
    """
    if not isinstance(document, dict) or not {"schema", "key", "cell", "result"} <= set(document):
        raise ValueError("not a whole cell")
    if document["schema"] not in range(1, SCHEMA + 1) or isinstance(document["schema"], bool):
        raise ValueError(f"written by another version: schema {document['schema']!r}, here {SCHEMA}")
    result = document["result"]
    if isinstance(result, dict):
        result = {_RENAMED.get(name, name): value for name, value in result.items()}
    return {**document, "schema": SCHEMA, "result": result}


def read_cell(path: str | os.PathLike[str]) -> tuple[Cell, Mapping[str, Any]]:
    """The cell and the result in one file of a grid.

    Raises:
        DearError: the file is missing, damaged, or something else.
    """
    raw: dict[str, Any] = {}

    def upgrade(document: Any) -> Any:
        raw.update(upgraded(document))
        return raw

    source = os.fspath(path)
    document = check(read_json(path, WHAT), Document, source, WHAT, error=RunError, upgrade=upgrade)
    try:
        cell = Cell.from_file(msgspec.to_builtins(document.cell))
        key = cell.key
    except (TypeError, ValueError) as error:
        raise RunError(f"{source}: its configuration cannot be read ({error})") from None
    if key != document.key:
        raise RunError(f"{source}: was changed by hand: its key does not fit its configuration")
    if cell.protocol in PROTOCOLS:
        _fits(PROTOCOLS[cell.protocol], cell, document.result, source)
    return cell, raw["result"]


def _fits(protocol: Protocol, cell: Cell, result: Result, source: str) -> None:
    """Refuse a setting or columns that the cell's protocol does not have."""
    check(dict(cell.setting), protocol.setting, source, f"setting of {protocol.name}", error=RunError)
    allowed = protocol.columns(cell)
    found = {column for row in result.modes.values() for column in row}
    if allowed is not None and not found <= allowed:
        raise RunError(f"{source}: {sorted(found - allowed)[0]!r} is no column of {protocol.name}")
