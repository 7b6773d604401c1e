"""A run's correction of the image feature: named in `config.json`, kept in `correction.safetensors`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dear._io.files import read_safetensors, require_finite, write_safetensors
from dear.clip.correction import Correction
from dear.errors import DearError, RunError

FILE = "correction.safetensors"


def described(correction: Correction | None) -> dict[str, Any] | None:
    """The correction's part of `config.json`; None: the run has none."""
    if correction is None:
        return None
    return {
        "note": correction.note,
        "heads": [list(head) for head in correction.heads],
        "digest": correction.digest,
    }


def write(folder: Path, correction: Correction | None) -> None:
    """Write the tensors, where there are any."""
    if correction is not None:
        tensors = {"matrix": correction.matrix.cpu(), "bias": correction.bias.cpu()}
        write_safetensors(folder / FILE, tensors, {"dear": correction.digest})


def read(folder: Path, entry: Any) -> Correction | None:
    """The correction that `config.json` of a run speaks of.

    Raises:
        RunError: it is not as it should be, or the tensors are others than the run was trained with.
    """
    if entry is None:
        return None
    path = folder / FILE
    try:
        heads = tuple((int(layer), int(head)) for layer, head in entry["heads"])
        note, digest = str(entry["note"]), entry["digest"]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{folder / 'config.json'}: 'correction' is not as it should be") from error
    tensors, _ = read_safetensors(path, "correction of the image feature")
    if set(tensors) != {"matrix", "bias"}:
        raise RunError(f"{path}: must hold the tensors matrix and bias")
    require_finite(tensors, str(path))
    try:
        found = Correction(tensors["matrix"].float(), tensors["bias"].float(), heads, note)
    except DearError as error:
        raise RunError(f"{path}: {error}") from error
    if found.digest != digest:
        raise RunError(f"{path}: is not the correction that this run was trained with")
    return found
