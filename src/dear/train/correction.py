"""A run's correction of the image feature: named in `config.json`, kept in `correction.safetensors`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from dear._io.files import read_safetensors, require_finite, write_safetensors
from dear.clip.correction import Correction
from dear.clip.model import Clip
from dear.errors import DearError, RunError

FILE = "correction.safetensors"
_applied: WeakKeyDictionary[Clip, WeakValueDictionary[str, Clip]] = WeakKeyDictionary()


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


def applied(clip: Clip, correction: Correction | None) -> Clip:
    """A backbone with a run's correction in the place of its own.

    Runs with the same correction get the same object, so that adapters share its work.
    """
    if correction is None:
        return clip if clip.correction is None else clip.corrected(None)
    kept = _applied.setdefault(clip.plain, WeakValueDictionary())
    found = kept.get(correction.digest)
    if found is None:
        found = kept[correction.digest] = clip.corrected(correction)
    return found
