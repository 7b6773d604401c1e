"""An uploaded run: a zip archive of a run folder, checked before anything of it is used."""

from __future__ import annotations

import io
import re
import shutil
import uuid
import zipfile
from pathlib import Path, PurePosixPath

from dear.runs.folder import FILES
from dear.serve.errors import Refused

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_run_name(name: str) -> str:
    """A name that is safe as a folder's name.

    Raises:
        Refused: it is not.
    """
    if not _NAME.fullmatch(name):
        raise Refused(400, "a name has 1 to 100 letters, digits, '.', '_' or '-', and begins with no '.'")
    return name


def unpack_run(content: bytes, folder: Path, name: str, most_bytes: int) -> Path:
    """Unpack an archive beside the served runs; returns the hidden folder, to be renamed when it is good.

    Raises:
        Refused: it is no archive of a run, or larger than allowed.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
    except zipfile.BadZipFile:
        raise Refused(400, "the upload is not a zip archive of a run folder") from None
    place = folder / f".{name}.{uuid.uuid4().hex}"
    with archive:
        members = [info for info in archive.infolist() if not info.is_dir()]
        names = [PurePosixPath(info.filename) for info in members]
        unknown = [path for path in names if path.name not in FILES or len(path.parts) > 2]
        if unknown or len({path.name for path in names}) != len(names):
            raise Refused(400, f"the archive must hold a run's own files alone ({', '.join(sorted(FILES))})")
        if sum(info.file_size for info in members) > most_bytes:
            raise Refused(413, f"the run is larger than {most_bytes:,} bytes")
        place.mkdir()
        try:
            left = most_bytes
            for info, path in zip(members, names, strict=True):
                with archive.open(info) as packed:
                    data = packed.read(left + 1)
                left -= len(data)
                if left < 0:  # sizes in the archive's directory may lie
                    raise Refused(413, f"the run is larger than {most_bytes:,} bytes")
                (place / path.name).write_bytes(data)
        except (Refused, OSError, zipfile.BadZipFile, RuntimeError) as error:
            shutil.rmtree(place, ignore_errors=True)
            if isinstance(error, Refused):
                raise
            raise Refused(400, f"the archive cannot be unpacked ({error})") from None
    return place
