"""An uploaded run: a zip archive of a run folder, checked before anything of it is used.

A run gets a name only after it was unpacked, loaded and has answered an image; until then the run that has
the name stays. A service that was killed while it exchanged the two restores the folder when it starts
(`recover`). Only files of a run are ever replaced.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import uuid
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from filelock import FileLock, Timeout

from dear.errors import DearError
from dear.runs.folder import FILES
from dear.serve.errors import Refused
from dear.serve.store import Adapter, AdapterStore, Card, is_run, run_version

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LEFTOVER = re.compile(r"\.([A-Za-z0-9][A-Za-z0-9._-]{0,99})\.[0-9a-f]{32}(\.old)?")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_END_RECORD = b"PK\x05\x06"  # of a zip archive; the size of its directory is at byte 12
_MOST_DIRECTORY_BYTES = 64 * 2**10  # of a zip archive; a run has ten files
_RUN_FILES = frozenset((*FILES, ".lock"))
_ONLY_RUN_FILES = f"the archive must contain only files of a run, each once: {', '.join(sorted(FILES))}"


def check_run_name(name: str) -> str:
    """A name that is safe as a folder's name."""
    if not _NAME.fullmatch(name):
        raise Refused(400, "a name must have 1 to 100 letters, digits, '.', '_' or '-', and no '.' in front")
    return name


def install_run(
    content: bytes, name: str, store: AdapterStore, most_bytes: int, trial: Callable[[Adapter], None]
) -> Card:
    """Serve the run of a zip archive under a name; nothing changes unless it can be served.

    `most_bytes` of the unpacked run; `trial` answers an image with the adapter and raises where it cannot.
    """
    target = store.folder / name
    try:
        with _upload_lock(store.folder):
            _check_replaceable(target)
            unpacked = unpack_run(content, store.folder, name, most_bytes)
            try:
                card = store.read_card(name, unpacked, run_version(unpacked))
                adapter = store.load_adapter(card, unpacked)
                trial(adapter)
                _check_replaceable(target)
                _move_into_place(unpacked, target)
                store.publish(card, adapter)
            except DearError as error:
                if isinstance(error, Refused):
                    raise
                reason = str(error).replace(f"{unpacked}{os.sep}", "").replace(str(unpacked), name)
                raise Refused(400, f"the run cannot be served: {reason}") from error
            finally:
                shutil.rmtree(unpacked, ignore_errors=True)  # the run before it, or what was refused
            return card
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise Refused(507, "the disk of the service is full; the run was not stored") from error
        raise Refused(500, f"the run cannot be stored ({error.strerror})") from error


def _check_replaceable(target: Path) -> None:
    """Refuse to replace anything but a run folder that holds only files of a run."""
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not is_run(target):
        raise Refused(
            409, f"{target.name!r} in the runs folder is not a run; move it, or choose another name"
        )
    others = sorted(path.name for path in target.iterdir() if path.name not in _RUN_FILES)
    if others:
        reason = f"the folder of {target.name!r} also holds {others[0][:100]!r}, which an upload would delete"
        raise Refused(409, f"{reason}; move it, or choose another name")


def unpack_run(content: bytes, folder: Path, name: str, most_bytes: int) -> Path:
    """Unpack an archive next to the served runs; returns the hidden folder, to be renamed when it is good."""
    target = folder / f".{name}.{uuid.uuid4().hex}"
    end = content.rfind(_END_RECORD)
    if end >= 0 and int.from_bytes(content[end + 12 : end + 16], "little") > _MOST_DIRECTORY_BYTES:
        raise Refused(400, _ONLY_RUN_FILES)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = [info for info in archive.infolist() if not info.is_dir()]
            names = [PurePosixPath(info.filename) for info in members]
            unknown = [path for path in names if path.name not in FILES or len(path.parts) > 2]
            if unknown or len({path.name for path in names}) != len(names):
                raise Refused(400, _ONLY_RUN_FILES)
            if sum(info.file_size for info in members) > most_bytes:
                raise Refused(413, f"the files of a run must have at most {most_bytes:,} bytes")
            target.mkdir()
            remaining = most_bytes
            for info, path in zip(members, names, strict=True):
                with archive.open(info) as packed:
                    data = packed.read(remaining + 1)
                remaining -= len(data)
                if remaining < 0:  # sizes in the archive's directory may be wrong
                    raise Refused(413, f"the files of a run must have at most {most_bytes:,} bytes")
                (target / path.name).write_bytes(data)
    except Exception as error:  # a damaged archive may fail in any way
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, Refused) or (isinstance(error, OSError) and error.errno in _DISK_FULL):
            raise
        if not zipfile.is_zipfile(io.BytesIO(content)):
            raise Refused(400, "the upload is not a zip archive of a run folder") from None
        raise Refused(400, "the archive cannot be unpacked; it is damaged or encrypted") from None
    return target


@contextmanager
def _upload_lock(folder: Path, seconds: float = 60.0) -> Iterator[None]:
    """Hold the lock of uploads, which all services of a folder on this machine share."""
    lock = FileLock(folder / ".uploads.lock", timeout=seconds)
    try:
        lock.acquire()
    except Timeout:
        raise Refused(503, "other runs are being uploaded; try again", retry_after=5) from None
    try:
        yield
    finally:
        with suppress(OSError):  # before it is released: afterwards it may belong to another service
            os.unlink(lock.lock_file)
        lock.release()


def _move_into_place(unpacked: Path, target: Path) -> None:
    """Rename a folder; one that has the name already is deleted."""
    if not target.exists():
        os.rename(unpacked, target)
        return
    old = unpacked.with_name(unpacked.name + ".old")
    os.rename(target, old)
    try:
        os.rename(unpacked, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Restore runs and remove leftovers of uploads whose service was killed."""
    with suppress(Refused, OSError):  # another service uploads, or the folder cannot be written
        if not any(_LEFTOVER.fullmatch(path.name) for path in folder.iterdir()):
            return
        with _upload_lock(folder, seconds=0.0):
            for path in sorted(folder.iterdir()):
                match = _LEFTOVER.fullmatch(path.name)
                if match is None or path.is_symlink() or not path.is_dir():
                    continue
                target = folder / match[1]
                if match[2] and not target.exists():
                    os.rename(path, target)
                else:
                    shutil.rmtree(path, ignore_errors=True)
