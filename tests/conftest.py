"""Shared by all tests: quiet threads, and helper modules that stand beside the tests."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["DEAR_CACHE"] = tempfile.mkdtemp(prefix="dear-tests-")  # never the user's own cache
atexit.register(shutil.rmtree, os.environ["DEAR_CACHE"], ignore_errors=True)
torch.set_num_threads(1)  # pytest runs one process per core
for folder in Path(__file__).parent.rglob("*/"):
    if folder.is_dir() and folder.name != "__pycache__":
        sys.path.append(str(folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need a CUDA device; `make test-gpu` runs them all. `slow` ones need DEAR_SLOW=1."""
    if not os.environ.get("DEAR_SLOW"):
        for item in items:
            if item.get_closest_marker("slow") is not None:
                item.add_marker(pytest.mark.skip(reason="slow: set DEAR_SLOW=1"))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
