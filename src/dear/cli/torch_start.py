"""PyTorch without what only tracing needs, for commands that answer images on a CPU: it starts sooner.

`import torch` also loads `torch.export` and, with the Python kernels for tensors without data, all
decompositions of operations. Here they are left out, and loaded in PyTorch's own order when one of them is
imported after all.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import FrameType, ModuleType
from typing import Any

_TRIED = ("2.13.",)  # versions of PyTorch that the tests of this module ran with
_LEFT_OUT = ("torch._meta_registrations", "torch.export")
_TRACING = {*_LEFT_OUT, "torch._decomp", "torch._dynamo", "torch._export", "torch._prims", "torch._refs"}


def import_torch() -> None:
    """Import PyTorch, unless it is imported already; on a machine with a GPU all of it.

    It relies on how PyTorch imports its own parts, so other versions than those it was tried with are left
    to import themselves.
    """
    if "torch" in sys.modules or not version("torch").startswith(_TRIED):
        return
    for name in _LEFT_OUT:
        sys.modules[name] = ModuleType(name)
    gc.disable()  # nothing of what an import makes is garbage, neither now nor when the process ends
    module_of = inspect.getmodule
    inspect.getmodule = partial(_module_of, module_of)
    try:
        import torch
    finally:
        inspect.getmodule = module_of
        gc.freeze()
        gc.enable()
        for name in _LEFT_OUT:
            del sys.modules[name]
    for name in _LEFT_OUT:
        delattr(torch, name.removeprefix("torch."))
    if torch.cuda.is_available() or not _whole():
        _import_rest()
    else:
        vars(torch)["_lazy_modules"].add("export")  # `torch.export` is imported when it is named
        sys.meta_path.insert(0, _Late())


def exit_early(status: object) -> None:
    """End a process that succeeded and whose PyTorch was started here; any other returns to end as usual.

    What an exit owes is done before: exit functions are called and output is written. Taking all objects of
    PyTorch apart one by one, for memory that goes back to the system anyway, takes a tenth of a second.
    """
    out, err = sys.stdout, sys.stderr
    ours = any(isinstance(finder, _Late) for finder in sys.meta_path) and out is sys.__stdout__
    if status not in (None, 0) or not ours or out is None or err is None or threading.active_count() > 1:
        return
    atexit._run_exitfuncs()
    try:
        out.flush()
        err.flush()
    except OSError:  # a full disk, a reader that went away: the interpreter says so
        return
    os._exit(0)


def _module_of(search: Callable[..., ModuleType | None], item: Any, *file: str) -> ModuleType | None:
    """`inspect.getmodule`; a frame's module is looked up by name, not by the files of all modules (40 ms)."""
    if isinstance(item, FrameType):
        return sys.modules.get(item.f_globals["__name__"])
    return search(item, *file)


def _whole() -> bool:
    """Whether PyTorch works without the rest; its random generators are tied to it since 2.12."""
    import torch

    try:
        if hasattr(torch._C, "_set_generator_metaclass"):
            torch._C._set_generator_metaclass(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)
        torch.randn(2, generator=torch.Generator())
    except Exception:
        return False
    return hasattr(torch, "_lazy_modules")


def _import_rest() -> None:
    for name in _LEFT_OUT:
        importlib.import_module(name)


class _Late(MetaPathFinder, Loader):
    """Loads what was left out before the first module that needs it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _TRACING:
            return None
        sys.meta_path.remove(self)
        _import_rest()
        spec = sys.modules[name].__spec__ if name in sys.modules else None
        if spec is not None:  # it came with the rest: not a second time
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._spec = spec
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = self._loader
