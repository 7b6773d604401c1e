"""Hashes that identify backbones, independent of file, layout, precision and device."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor, nn

from dear.clip.config import ClipConfig
from dear.errors import DearError
from dear.utils import digest
from dear.utils.files import read_json, write_json
from dear.utils.user_cache import cache_folder


def fingerprint(visual: nn.Module | Mapping[str, Tensor]) -> str:
    """`sha256:…` of names, shapes and values of a `VisionTower` or its state dict (names without `visual.`).

    Values are hashed as float32, so the same values in half precision, in another layout or on another device
    have the same hash.

    >>> import torch
    >>> state = {"proj": torch.tensor([[1.0, 0.5]])}
    >>> fingerprint(state) == fingerprint({"proj": state["proj"].half()})
    True
    """
    state = visual.state_dict() if isinstance(visual, nn.Module) else visual
    return f"sha256:{digest.of_tensors(state, as_float32=True).hex()}"


@dataclass(frozen=True)
class WeightDigests:
    """`sha256:…` of a backbone's weights."""

    visual: str  #: of the image tower
    rest: str  #: of all other weights

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> WeightDigests:
        """Digests of a model's state dict."""
        visual = {name.removeprefix("visual."): t for name, t in state.items() if name.startswith("visual.")}
        return cls(fingerprint(visual), fingerprint({n: t for n, t in state.items() if n[:7] != "visual."}))


def identity(config: ClipConfig, digests: WeightDigests) -> str:
    """`Clip.identity` of a configuration and the digests of the weights."""
    parts = json.dumps([digests.visual, digests.rest, asdict(config)], sort_keys=True)
    return f"sha256:{digest.of_parts(parts).hex()}"


# --- fingerprints of unchanged checkpoint files, cached ---------------------------------------------------

_LAYOUT = 1  # increase when the tensors of a file are converted to other names or values
_MAX_ENTRIES = 100


def stamp(path: Path) -> str:
    """Cheap cache key of a checkpoint: name, size, mtime, ctime and inode of each of its files."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    parts = [(name, f.st_size, f.st_mtime_ns, f.st_ctime_ns, f.st_ino) for name, f in stats]
    return digest.of_json([_LAYOUT, os.path.abspath(path), parts]).hex()


def recall(stamp: str) -> WeightDigests | None:
    """The cached digests of files with this stamp; None if there are none."""
    entry = _read_cache().get(stamp)
    if isinstance(entry, list) and len(entry) == 2 and all(isinstance(word, str) for word in entry):
        return WeightDigests(*entry)
    return None


def remember(stamp: str, digests: WeightDigests) -> None:
    """Store the digests of files in the user's cache."""
    known = {**_read_cache(), stamp: [digests.visual, digests.rest]}
    with suppress(DearError):
        write_json(_cache_file(), dict(list(known.items())[-_MAX_ENTRIES:]))


def _read_cache() -> dict[str, object]:
    try:
        document = read_json(_cache_file(), "list of fingerprints", 1 << 20)
    except DearError:
        return {}
    return document if isinstance(document, dict) else {}


def _cache_file() -> Path:
    return cache_folder() / "fingerprints.json"
