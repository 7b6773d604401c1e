"""Options of a method: types and bounds, presets, and conversion from text."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from dear.errors import UsageError
from dear.utils.text import unknown_name
from dear.utils.validation import KINDS, Checked, hints_of

_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_LARGEST = 100_000  # far more tokens, ranks or layers than any method needs: more would exhaust memory

Count = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
Ridge = Annotated[float, Meta(ge=1e-6)]  #: large enough to invert a singular matrix
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]

Options = Checked  #: base class of the `Config` of a method


def fit_options(config: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with every value converted to the type of its field in the dataclass `config`.

    Lists may be written with commas, `none` is None where a field may be None, and an integer is accepted
    for a float. Only numbers, booleans, strings and tuples of them are converted; other types are kept.

    >>> from dear.methods.purify import PurifyConfig
    >>> fit_options(PurifyConfig, {"bandwidths": "1,2.5", "gates": "False", "weight": 2})
    {'bandwidths': (1.0, 2.5), 'gates': False, 'weight': 2}
    """
    hints = hints_of(config)
    return {name: _fit(name, value, hints.get(name, Any)) for name, value in options.items()}


def build_config(owner: str, kind: type, options: Mapping[str, Any], start: Any = None) -> Any:
    """The dataclass `kind` with `options`; other fields are those of `start`, or the defaults."""
    known = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(set(options) - known)
    if unknown:
        if not known:
            raise UsageError(f"the method {owner!r} has no options, got {unknown[0]!r}; remove it")
        raise UsageError(unknown_name(f"option of {owner}", unknown[0], sorted(known)))
    if start is not None and not isinstance(start, kind):
        raise UsageError(f"config must be a {kind.__name__}, got {type(start).__name__}")
    base: Any = kind() if start is None else start
    return dataclasses.replace(base, **fit_options(kind, options))


def _fit(name: str, value: Any, hint: Any) -> Any:
    """`value` converted to the type `hint`."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
        is_none = value is None or (isinstance(value, str) and value.casefold() in ("none", "null"))
        if is_none and len(kinds) < len(typing.get_args(hint)) and (value is None or str not in kinds):
            return None
        return _fit(name, value, kinds[0]) if len(kinds) == 1 else value
    if typing.get_origin(hint) is tuple:
        parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        items = list(parts) if isinstance(parts, (list, tuple)) else [parts]
        inner = typing.get_args(hint)
        kinds = [inner[0]] * len(items) if inner[-1] is ... else list(inner)
        if len(kinds) != len(items):
            raise UsageError(f"{name} must have {len(kinds)} values, separated by commas, got {value!r}")
        return tuple(_fit(name, item, kind) for item, kind in zip(items, kinds, strict=True))
    kind = str if typing.get_origin(hint) is Literal else hint
    return _plain(name, value, kind) if kind in KINDS else value


def _plain(name: str, value: Any, kind: type) -> Any:
    """`value` converted to a number, boolean or string."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is bool and isinstance(value, str) and value.casefold() in _BOOLEANS:
        return _BOOLEANS[value.casefold()]
    if kind is float and (number or isinstance(value, str)):
        try:
            parsed = float(value)
        except (ValueError, OverflowError):
            parsed = math.nan
        if math.isfinite(parsed):
            return value if number else parsed  # 2 stays 2, so that files and hashes of options do not change
    if kind is int and isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) < 20:
        value, number = int(value), True
    if kind is int and number and abs(value) > _LARGEST and name != "seed":
        raise UsageError(f"{name} must be at most {_LARGEST:,}, got {str(value)[:40]}")
    if isinstance(value, kind) and (kind is str or kind is bool or (kind is int and number)):
        return value
    raise UsageError(f"{name} must be {KINDS[kind]}, got {value!r}")


@dataclass(frozen=True)
class Preset:
    """A named setting of a method."""

    about: str  #: one-line description
    #: options of the method that differ from its `Config`
    options: Mapping[str, Any] = field(default_factory=dict)
    #: values of the training recipe that differ from `Method.recipe`
    recipe: Mapping[str, Any] = field(default_factory=dict)
