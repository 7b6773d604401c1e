"""Runs the checks of the kernels in a process with Triton's interpreter or a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dear

CHECKS = Path(__file__).with_name("kernel_checks.py")
SOURCE = str(Path(dear.__file__).parents[1])


def run_checks(*chosen: str, **environment: str) -> str:
    """In a process of its own: Triton decides at import whether it interprets."""
    path = os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CHECKS), *chosen],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd=CHECKS.parents[2],
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout
