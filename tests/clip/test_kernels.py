"""The kernel checks, through Triton's interpreter on any machine and compiled on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dear

CHECKS = Path(__file__).with_name("kernel_checks.py")
SOURCE = str(Path(dear.__file__).parents[1])


def run_checks(**environment: str) -> str:
    """In a process of its own: Triton decides at import whether it interprets."""
    path = os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CHECKS)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd=CHECKS.parents[2],
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_every_kernel_through_the_interpreter() -> None:
    run_checks(TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_every_kernel_on_the_gpu() -> None:
    run_checks(TRITON_INTERPRET="0")
