"""Shortcuts that lie in the images themselves: light, color, frames, marks, sharpness, compression, files.

Nothing here knows a model. `measure` gives every image its properties, `find_shortcuts` compares each class
with the rest, `edits` change a property on purpose, `causal` counts what such a change does to any answers.
"""

from dear.photos.duplicates import Duplicate, near_duplicates
from dear.photos.properties import PROPERTIES, Measured, Property, measure
from dear.photos.shortcuts import LIMIT, Shortcut, find_shortcuts

__all__ = [
    "LIMIT",
    "PROPERTIES",
    "Duplicate",
    "Measured",
    "Property",
    "Shortcut",
    "find_shortcuts",
    "measure",
    "near_duplicates",
]
