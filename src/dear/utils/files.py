"""Reading and writing files that is safe against crashes, full disks and hostile files.

Writes go to a temporary file in the same folder, which is flushed to disk and then renamed: a reader sees
the old file or the new one, never a part. Reads are bounded and never run code.
"""

from __future__ import annotations

import contextlib
import glob
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

from dear.errors import DataError, DearError, DiskError, UsageError
from dear.utils.schema import parse_json

PathLike = str | os.PathLike[str]

try:
    import fcntl
except ImportError:  # Windows: temporary files of killed processes stay there
    fcntl = None  # type: ignore[assignment]

MAX_TEXT_BYTES = 256 * 1024 * 1024
_MAX_HEADER_BYTES = 100_000_000  # safetensors' limit
_REMEDY = "copy or download it again"
# Types of weights; all others are packed or scaled, and PyTorch cannot test them for NaN.
_DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}


def write_atomic(path: PathLike, content: bytes | str) -> None:
    """Write `content` to `path`, completely or not at all; after a failure the older file is unchanged.

    Temporary files of a killed process that wrote the same file are removed. If two processes write one file
    at once, the last one wins.
    """
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = _create_temporary(path)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_UMASK)
            if fcntl is not None:
                os.replace(temporary, path)  # while it is locked
        if fcntl is None:
            os.replace(temporary, path)  # Windows renames no open file
        _remove_abandoned(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DiskError(f"{path}: cannot be written ({reason}); an older file is unchanged") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _read_umask() -> int:
    """The process's file mode mask (only readable by setting it, so read once, before there are threads)."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


_UMASK = _read_umask()


def _create_temporary(path: Path) -> tuple[int, str]:
    """A new temporary file next to `path`, locked as long as its handle is open."""
    while True:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        if fcntl is None:
            return handle, name
        with contextlib.suppress(OSError):  # where there are no locks, temporary files are never removed
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, name
        os.close(handle)  # another process removed it as abandoned before it was locked


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files of `path` whose writers have ended, which nobody has locked."""
    if fcntl is None:
        return
    for name in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with contextlib.suppress(OSError), name.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name.unlink()


def require_writable(folder: PathLike) -> None:
    """Create a folder if it is missing, and check before long work that it is writable."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DiskError(f"{folder}: cannot be written to ({error.strerror or error})") from error


def check_output(path: PathLike | None, *, folder: bool = False) -> None:
    """Check before long work that a file, or with `folder` a folder, can be written; nothing is created.

    Raises:
        UsageError: there is a folder in place of the file, or a file in place of the folder or a parent.
        DiskError: the folder that exists is not writable.
    """
    if path is None:
        return
    target = Path(path)
    if not folder and target.is_dir():
        raise UsageError(f"{path}: is a folder; name a file to write")
    parent = target if folder else target.parent
    while not os.path.lexists(parent):
        parent = parent.parent
    if not parent.is_dir():
        raise UsageError(f"{path}: cannot be written, because {parent} is not a folder; choose another place")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise DiskError(f"{path}: cannot be written, because the folder {parent} is not writable")


def write_json(path: PathLike, value: Any) -> None:
    """Write `value` as UTF-8 JSON with a final newline; NaN and infinity are refused."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_text(
    path: PathLike,
    what: str = "text file",
    max_bytes: int = MAX_TEXT_BYTES,
    encoding: str = "utf-8",
) -> str:
    """Read a text file of bounded length; a device or a pipe, which might never end, is refused.

    `what` names the kind of file in messages ("role map"); the encoding is "utf-8-sig" where a byte-order
    mark is allowed at the beginning.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise DearError(f"{path}: is not a file, so it cannot be read as a {what}")
        with path.open("rb") as file:
            large = os.fstat(file.fileno()).st_size > max_bytes
            data = b"" if large else file.read(max_bytes + 1)
        if large or len(data) > max_bytes:
            raise DearError(f"{path}: a {what} must have at most {max_bytes:,} bytes")
        return data.decode(encoding)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such {what}") from None
    except UnicodeDecodeError as error:
        raise DearError(
            f"{path}: cannot be read as a {what}: it is not UTF-8 text (byte {error.start})"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: the path contains a null character
        raise DearError(f"{path}: cannot be read as a {what} ({error})") from error


def read_json(path: PathLike, what: str = "JSON file", max_bytes: int = MAX_TEXT_BYTES) -> Any:
    """Read a JSON file under the rules of `parse_json`; `what` names the kind of file in messages."""
    return parse_json(read_text(path, what, max_bytes), str(Path(path)), what)


def read_mapping(source: PathLike | Mapping[str, Any], name: str, example: str) -> tuple[str, dict[str, Any]]:
    """A mapping, passed directly or as a JSON file, and its name in messages.

    `name` is the parameter; `example` shows a mapping.

    Raises:
        DataError: it is empty or not a mapping.

    >>> read_mapping({"cat": ["kitty"]}, "texts", example="{}")
    ('texts', {'cat': ['kitty']})
    """
    if isinstance(source, Mapping):
        origin, content = name, dict(source)
    else:
        origin, content = os.fspath(source), read_json(source, f"JSON file of {name}")
    if not isinstance(content, dict) or not content:
        raise DataError(f"{origin}: must be an object with at least one entry, such as {example}")
    return origin, content


def write_safetensors(
    path: PathLike, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors with string metadata as safetensors, completely or not at all."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomic(path, safetensors.torch.save(plain, dict(metadata) if metadata else None))


def read_safetensors(
    path: PathLike, what: str = "safetensors file"
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors and the metadata of a safetensors file."""
    path = Path(path)
    if not os.path.isfile(path):
        raise UsageError(f"{path}: no such {what}")
    _check_header(path, what)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except Exception as error:  # untrusted bytes: shapes and types may fail in any way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DearError(f"{path}: is not a complete {what} ({reason}); {_REMEDY}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise DearError(f"{path}: tensor {name[:80]!r} has the type {kind}, which a {what} must not have")
    return tensors, dict(metadata)


def _check_header(path: Path, what: str) -> None:
    """Refuse a header in which a tensor occurs twice: safetensors would use one of the two silently.

    Everything else about the header is checked by safetensors itself.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    except OSError as error:
        raise DearError(f"{path}: cannot be read as a {what} ({error})") from error
    if len(header) != length or not header.startswith(b"{"):
        raise DearError(f"{path}: is not a complete {what} (its header is truncated or too long); {_REMEDY}")
    parse_json(header.decode("utf-8", "replace"), f"{path}: its header", what)


def require_finite(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise if a floating-point tensor contains NaN or infinity, naming it and its source."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise DearError(f"{source}: tensor {name!r} contains NaN or infinity; the file is damaged")
