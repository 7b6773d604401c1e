"""Reading and writing files so that a crash, a full disk or a hostile file does no harm.

Writes go to a temporary neighbour, are flushed to disk and then renamed: a reader sees the old file or
the new one, never a part. Reads are bounded and never run code.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from dear.errors import DearError, DiskError, UsageError

MAX_JSON_BYTES = 256 * 1024 * 1024


def write_atomic(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write `content` to `path`, whole or not at all; an older file survives any failure.

    Raises:
        DiskError: the folder cannot be written or the disk is full.
    """
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DiskError(
            f"{path}: could not be written ({reason}); what was there before is unchanged"
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _umask() -> int:
    """The process's file mode mask (only readable by setting it)."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: str | os.PathLike[str], value: Any, indent: int | None = 1) -> None:
    """Write `value` as UTF-8 JSON with a final newline; NaN and infinity are refused."""
    write_atomic(path, json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike[str], what: str = "JSON file", max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file; duplicate keys, too deep nesting and too large files are refused.

    Args:
        path: the file.
        what: what the file should be, for messages ("role map", "run configuration").
        max_bytes: larger files are refused unread.

    Raises:
        DearError: the file is missing, too large, or not valid JSON.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise DearError(f"{path}: {size:,} bytes is too large for a {what} (limit {max_bytes:,})")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such {what}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DearError(f"{path}: cannot be read as a {what} ({error})") from error
    return parse_json(text, str(path), what)


def parse_json(text: str, source: str, what: str = "JSON text") -> Any:
    """Parse JSON text from `source` (named in messages) under the rules of `read_json`."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise DearError(f"{source}: nested too deeply for a {what}") from None
    except ValueError as error:
        raise DearError(f"{source}: is not a valid {what} ({error})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys must differ: a repeated key hides one of its values."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {repeated!r} stands twice in one object")
    return result


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors with string metadata as safetensors, whole or not at all."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomic(path, safetensors.torch.save(plain, dict(metadata) if metadata else None))


def read_safetensors(
    path: str | os.PathLike[str], what: str = "safetensors file"
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors and the metadata of a safetensors file.

    Raises:
        DearError: the file is missing, cut, or its header does not fit its content.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"{path}: no such {what}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (safetensors.SafetensorError, OSError, ValueError, RuntimeError, KeyError) as error:
        raise DearError(f"{path}: is not a whole {what} ({error})") from error
    return tensors, dict(metadata)


def require_finite(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise if any floating tensor holds NaN or infinity, naming it and its source.

    Raises:
        DearError: naming the first tensor that is not finite.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise DearError(f"{source}: tensor {name!r} holds NaN or infinity; the file is damaged")
