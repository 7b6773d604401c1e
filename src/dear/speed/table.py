"""Rows of figures with the machine, versions and date they were measured on, added to a CSV file."""

from __future__ import annotations

import csv
import datetime
import io
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dear._io.files import write_atomic
from dear.errors import DataError


def machine(device: torch.device) -> dict[str, Any]:
    """Where and with what a figure was measured."""
    import dear

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "date": datetime.date.today().isoformat(),
        "machine": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dear": dear.__version__,
    }


def _processor() -> str:
    """The processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def add_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows to a CSV file, which is made when it is not there.

    Raises:
        DataError: the file has other columns.
    """
    if not rows:
        return
    old: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if list(reader.fieldnames or []) != list(rows[0]):
                raise DataError(f"{path} has other columns than these figures; name another file")
            old = list(reader)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows([*old, *rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.getvalue())
