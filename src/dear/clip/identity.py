"""Hashes that tell backbones apart, whichever file, layout, precision or device they come from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dear.clip.config import ClipConfig
from dear.errors import DearError
from dear.utils.files import read_json, write_json
from dear.utils.user_cache import cache_folder


def fingerprint(visual: nn.Module | Mapping[str, Tensor]) -> str:
    """`sha256:…` of names, shapes and values of a `VisionTower` or its state dict (names without `visual.`).

    Values count as float32, so the same numbers stored in half precision, in another layout or on another
    device give the same answer.

    >>> whole = {"proj": torch.tensor([[1.0, 0.5]])}
    >>> fingerprint(whole) == fingerprint({"proj": whole["proj"].half()})
    True
    """
    state = visual.state_dict() if isinstance(visual, nn.Module) else visual
    digest = hashlib.sha256()
    for name in sorted(state):
        values = state[name].detach().to("cpu", torch.float32).contiguous().numpy()
        digest.update(f"{name} {list(values.shape)}\n".encode())
        digest.update(np.ascontiguousarray(values, dtype="<f4").reshape(-1).data)
    return f"sha256:{digest.hexdigest()}"


def identity(config: ClipConfig, visual: str, rest: str) -> str:
    """`Clip.identity` of a configuration and the fingerprints of the vision tower and of all the rest."""
    parts = json.dumps([visual, rest, asdict(config)], sort_keys=True)
    return f"sha256:{hashlib.sha256(parts.encode()).hexdigest()}"


def visual_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of a model's state dict that is the vision tower's."""
    return {name.removeprefix("visual."): t for name, t in state.items() if name.startswith("visual.")}


def other_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of a model's state dict that is not the vision tower's."""
    return {name: t for name, t in state.items() if not name.startswith("visual.")}


# --- fingerprints of files that did not change since they were hashed ------------------------------------

_LAYOUT = 1  # raise it when the same file's tensors get other names or values
_MOST = 100


def stamp(path: Path) -> str:
    """What tells whether a checkpoint's files are the same: names, sizes, times of change, places on disk."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    facts = [(file.name, file.stat()) for file in files if file.is_file()]
    parts = [(name, f.st_size, f.st_mtime_ns, f.st_ctime_ns, f.st_ino) for name, f in facts]
    return hashlib.sha256(repr((_LAYOUT, os.path.abspath(path), parts)).encode()).hexdigest()


def recall(stamp: str) -> list[str]:
    """The fingerprints of vision tower and other weights that were remembered for files; empty: none."""
    found = _remembered().get(stamp)
    return (
        found
        if isinstance(found, list) and len(found) == 2 and all(isinstance(x, str) for x in found)
        else []
    )


def remember(stamp: str, visual: str, rest: str) -> None:
    """Keep the fingerprints of files in the user's cache."""
    known = {**_remembered(), stamp: [visual, rest]}
    with suppress(DearError):
        write_json(_file(), dict(list(known.items())[-_MOST:]))


def _remembered() -> dict[str, object]:
    try:
        found = read_json(_file(), "list of fingerprints", 1 << 20)
    except DearError:
        return {}
    return found if isinstance(found, dict) else {}


def _file() -> Path:
    return cache_folder() / "fingerprints.json"
