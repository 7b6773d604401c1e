"""Named settings of a method: its options and its training recipe, chosen together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dear.errors import UsageError


@dataclass(frozen=True)
class Preset:
    """A named setting of a method.

    Attributes:
        about: what it is, in one sentence.
        options: options of the method that differ from its `Config`.
        recipe: values of the training recipe that differ from the method's own recipe.
    """

    about: str
    options: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)


def find_preset(owner: str, presets: Mapping[str, Preset], name: str) -> Preset:
    """A preset by name.

    Raises:
        UsageError: `owner` (a method's name) has no such preset.

    >>> find_preset("dear", {"paper": Preset("as published")}, "paper").about
    'as published'
    """
    if name in presets:
        return presets[name]
    offer = f"it has {', '.join(presets)}" if presets else "it has none"
    raise UsageError(f"the method {owner!r} has no preset {name!r}; {offer}")
