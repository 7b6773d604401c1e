"""Shared by all tests: quiet threads, and helper modules that stand beside the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)  # pytest runs one process a core
for folder in Path(__file__).parent.rglob("*/"):
    if folder.is_dir() and folder.name != "__pycache__":
        sys.path.append(str(folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need a CUDA device; `make test-gpu` runs them all."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
