"""Adapt CLIP-like vision-language models head by head.

Names are imported when they are first used, so that `dear --help` need not wait for PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dear import heads
    from dear.classifier import Classifier
    from dear.clip.config import ClipConfig
    from dear.clip.factory import list_backbones, load
    from dear.clip.model import Clip
    from dear.data import list_datasets, open_data
    from dear.heads.discover import discover_roles
    from dear.heads.roles import Role, RoleMap
    from dear.methods import DeAR, list_methods

__version__ = "0.2.0"

_HOMES = {
    "Classifier": "dear.classifier",
    "Clip": "dear.clip.model",
    "ClipConfig": "dear.clip.config",
    "DeAR": "dear.methods",
    "Role": "dear.heads.roles",
    "RoleMap": "dear.heads.roles",
    "discover_roles": "dear.heads.discover",
    "list_backbones": "dear.clip.factory",
    "list_datasets": "dear.data",
    "list_methods": "dear.methods",
    "load": "dear.clip.factory",
    "open_data": "dear.data",
}

__all__ = [
    "Classifier",
    "Clip",
    "ClipConfig",
    "DeAR",
    "Role",
    "RoleMap",
    "discover_roles",
    "heads",
    "list_backbones",
    "list_datasets",
    "list_methods",
    "load",
    "open_data",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "heads":
        return importlib.import_module("dear.heads")
    raise AttributeError(f"module 'dear' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
