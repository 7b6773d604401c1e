"""A service over a few small runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient
from serving import QUICK, RUNS, make_run
from tiny import tiny_clip

from dear.serve.app import make_app
from dear.serve.service import Service


@pytest.fixture(scope="session")
def made_runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for number, (name, method) in enumerate(RUNS.items()):
        make_run(folder / name, method, seed=number + 1)
    return folder


@pytest.fixture
def runs(made_runs, tmp_path) -> Path:
    shutil.copytree(made_runs, tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture(scope="session")
def shared(made_runs) -> Iterator[TestClient]:
    """A client of one service, for all tests that change neither its runs nor its settings."""
    settings = replace(QUICK, poll_seconds=60)
    with TestClient(make_app(Service(made_runs, tiny_clip(dtype=torch.float32), settings))) as client:
        yield client
