"""`calibration.json` of a run folder."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from dear._io.files import read_text, write_json
from dear._io.strict_json import decode
from dear.errors import RunError
from dear.methods.calibration import Calibration

FILE = "calibration.json"


def write_calibration(folder: Path, calibration: Calibration | None) -> None:
    """Leave the calibration in a run folder; None removes an older one."""
    if calibration is None:
        (folder / FILE).unlink(missing_ok=True)
    else:
        write_json(folder / FILE, msgspec.to_builtins(calibration))


def read_calibration(folder: str | os.PathLike[str]) -> Calibration | None:
    """The calibration of a run folder; None where it has none.

    Raises:
        RunError: the file is damaged.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        return None
    return decode(read_text(path, "calibration"), Calibration, str(path), "calibration", error=RunError)
