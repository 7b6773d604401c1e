"""Dataclasses whose values are checked against the types and limits of their fields."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from dear.errors import DearError, UsageError

KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
_LIMITS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}


@dataclass(frozen=True)
class Checked:
    """A frozen dataclass whose values are checked against the annotations of its fields.

    >>> @dataclass(frozen=True)
    ... class Mine(Checked):
    ...     weight: float = 1.0  # or Annotated[float, Meta(ge=0)]
    >>> Mine(weight="much")
    Traceback (most recent call last):
    dear.errors.UsageError: weight must be a number, got 'much'
    """

    error: ClassVar[type[DearError]] = UsageError  #: what is raised

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, hint in hints_of(kind, extras=True).items():
            value = getattr(self, name)
            try:
                converted = msgspec.convert(value, hint)
            except msgspec.ValidationError:
                raise self.error(_message(name, value, hint)) from None
            if isinstance(value, float) and not math.isfinite(value):
                raise self.error(_message(name, value, hint))
            if isinstance(value, list | tuple):  # files hold lists
                object.__setattr__(self, name, converted)


@cache
def hints_of(kind: type, extras: bool = False) -> dict[str, Any]:
    """Types of the fields by name; none where only a type checker can read them."""
    try:
        hints = typing.get_type_hints(kind, include_extras=extras)
    except NameError:
        return {}
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _message(name: str, value: Any, hint: Any) -> str:
    parts = list(_parts(hint))
    literals = [part for part in parts if typing.get_origin(part) is Literal]
    choices = [str(choice) for part in literals for choice in typing.get_args(part)]
    if choices:
        return f"{name} must be one of {', '.join(choices)}, got {value!r}"
    kind = next((KINDS[part] for part in parts if part in KINDS), "another kind of value")
    requirement = " ".join([kind, *(_limits(part) for part in parts if isinstance(part, Meta))])
    if any(typing.get_origin(part) is tuple for part in parts):
        requirement = f"a list, each value {requirement}"
    return f"{name} must be {requirement}, got {value!r}"


def _limits(meta: Meta) -> str:
    if meta.ge is not None and meta.le is not None:
        return f"from {meta.ge:,} to {meta.le:,}"
    limits = {words: getattr(meta, limit) for limit, words in _LIMITS.items()}
    return " and ".join(f"{words} {value:,}" for words, value in limits.items() if value is not None)


def _parts(hint: Any) -> Iterator[Any]:
    """A type and everything it is made of, limits included."""
    yield hint
    if typing.get_origin(hint) is not Literal:
        for part in typing.get_args(hint):
            yield from _parts(part)
