"""Protocols, grids of results and tables: `dear.bench.run`, `dear.bench.ablate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dear.bench.task import Results, ablate, run

__all__ = ["Results", "ablate", "run"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from dear.bench import task

        return getattr(task, name)
    raise AttributeError(f"module 'dear.bench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
