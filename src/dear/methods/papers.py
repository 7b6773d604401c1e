"""The paper behind each method, our settings, and our departures, as its module documents them."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, fields
from typing import Any

from dear.methods import find_method

_FIRST = re.compile(r"(?P<summary>.*?)(?: \((?P<citation>[^()]*\d{4}[^()]*|[^()]*\"[^()]*)\))?\.?$")


@dataclass(frozen=True)
class Paper:
    """The entry of a method."""

    method: str  #: its name
    title: str  #: name in tables
    summary: str  #: one-line summary
    citation: str  #: authors and venue; empty if the module has none
    description: str  #: the method in a paragraph, with its equations
    departures: str  #: differences from the authors' paper or code
    options: dict[str, Any]  #: options of the method and their defaults
    recipe: dict[str, Any]  #: values that differ from the default training recipe
    presets: dict[str, str]  #: descriptions of the presets, the recommended one first

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def paper(name: str) -> Paper:
    """The entry of a method by name.

    Raises:
        UsageError: no method has this name.

    >>> paper("coop").citation
    'Zhou, Yang, Loy, Liu, IJCV 2022'
    """
    kind = find_method(name)
    module = inspect.getmodule(kind)
    first, _, rest = (inspect.getdoc(module) or "").partition("\n")
    description, _, departures = rest.strip().partition("Departures")
    departures = re.sub(r"^[^:]*:\s*", "", departures.partition("\n\n")[0])  # what follows is about the code
    match = _FIRST.match(first)
    defaults = kind.Config()
    return Paper(
        method=kind.name,
        title=kind.title,
        summary=(match["summary"] if match else first).rstrip("."),
        citation=(match["citation"] or "") if match else "",
        description=description.strip(),
        departures=departures.strip(),
        options={field.name: getattr(defaults, field.name) for field in fields(kind.Config)},
        recipe=dict(kind.recipe),
        presets={name: preset.about for name, preset in kind.presets.items()},
    )
