"""The kernel checks, through Triton's interpreter on any machine and compiled on a GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
from kernel_runs import run_checks

TRITON = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "0.0"
TRITON_VERSION = tuple(int(part) for part in TRITON.split(".")[:2])


@pytest.mark.skipif(TRITON_VERSION < (3, 7), reason="older interpreters do not work with NumPy 2.4")
def test_every_kernel_through_the_interpreter() -> None:
    run_checks(TRITON_INTERPRET="1")


@pytest.mark.skipif(TRITON_VERSION < (3, 4), reason="the fast path needs Triton 3.4")
def test_every_kernel_compiles_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    few = "quick_gelu or None-False-True-True or 16-131-True-True or rows and True-True-True"
    few += " or joined_tokens and 131"
    run_checks("-k", few, COMPILE_ONLY="1", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
