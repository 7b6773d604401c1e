"""A cell's file: what is checked of it before its numbers reach a table or a page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dear._io.printable import unprintable
from dear.bench.cells import SCHEMA, Cell
from dear.errors import RunError

_WORDS = ("protocol", "method", "dataset", "backbone", "fingerprint")
_LONGEST = 4096  # characters of a name; datasets may be paths
_TRANSFER = ("cross-dataset", "domain-shift")


def checked(document: Any, path: Path) -> tuple[Cell, Mapping[str, Any]]:
    """The cell and the result of a parsed file.

    Raises:
        RunError: parts are missing or of another kind, or the key does not fit the configuration.
    """
    if not isinstance(document, dict) or not {"schema", "key", "cell", "result"} <= set(document):
        raise RunError(f"{path}: is not a whole cell of a grid")
    if document["schema"] != SCHEMA:
        raise RunError(f"{path}: written by another version (schema {document['schema']!r}, here {SCHEMA})")
    try:
        cell = Cell(**document["cell"])
        key = cell.key
    except (TypeError, ValueError) as error:
        raise RunError(f"{path}: its configuration cannot be read ({error})") from None
    if key != document["key"]:
        raise RunError(f"{path}: was changed by hand: its key does not fit its configuration")
    if not all(_word(getattr(cell, name)) for name in _WORDS):
        raise RunError(f"{path}: its configuration cannot be read ({', '.join(_WORDS)} must be plain text)")
    if not all(_count(number) for number in (cell.seed, cell.shots)):
        raise RunError(f"{path}: its configuration cannot be read (seed and shots must be whole numbers)")
    result = document["result"]
    if not isinstance(result, dict) or not _modes(result.get("modes"), cell):
        raise RunError(f"{path}: its result holds no accuracies from 0 to 1 by mode and column")
    weights = result.get("facts", {})
    weights = weights.get("fusion_weights", {}) if isinstance(weights, dict) else None
    if not _numbers(weights) or not _numbers(result.get("seconds", {})):
        raise RunError(f"{path}: its result is damaged (fusion weights and seconds must be numbers)")
    made = result.get("made_with")
    if made is not None and not (isinstance(made, dict) and {"dear", "torch", "hardware"} <= set(made)):
        raise RunError(f"{path}: its result does not say what it was made with")
    return cell, result


def _word(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST and unprintable(value) is None


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(values: Any) -> bool:
    """Whether a part of a result is an object of numbers by plain names."""
    return isinstance(values, dict) and all(_word(k) and _number(v) for k, v in values.items())


def _modes(modes: Any, cell: Cell) -> bool:
    """Whether accuracies are there: mode -> column -> a share of 1, or null where nothing was measured."""
    if not isinstance(modes, dict) or not modes:
        return False
    known = None
    if cell.protocol in _TRANSFER:
        targets = cell.setting.get("targets")
        if not isinstance(targets, list) or not all(map(_word, targets)):
            return False
        known = {cell.dataset, *targets}
    if cell.protocol == "leave-one-domain-out" and not _word(cell.setting.get("held_out")):
        return False
    return all(
        _word(mode)
        and isinstance(row, dict)
        and all(_word(column) and (known is None or column in known) for column in row)
        and all(value is None or (_number(value) and 0 <= value <= 1) for value in row.values())
        for mode, row in modes.items()
    )
