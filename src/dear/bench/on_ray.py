"""The engine that computes the cells of a grid on a Ray cluster."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from dear.bench.cells import Cell, Place
from dear.bench.engines import Work, attempt, died, outcome
from dear.bench.store import Report
from dear.errors import UsageError


class OnRay:
    """A Ray cluster, or a Ray started on this machine: cells as tasks with CPU and GPU resources.

    A killed worker loses the cell it was computing, which Ray starts again elsewhere.

    Args:
        work: computes one cell; importable on every node.
        address: of a running cluster ("auto", "ray://host:10001"); None starts one here.
        cpus: CPUs a cell takes.
        gpus: GPUs a cell takes; parts of one are allowed.
        retries: how often a cell is started again whose worker died.

    Raises:
        UsageError: Ray is not installed.
    """

    def __init__(
        self, work: Work, address: str | None = None, cpus: float = 1, gpus: float = 0, retries: int = 3
    ) -> None:
        self.ray = _import_ray()
        self.work, self.address = work, address
        self.cpus, self.gpus, self.retries = cpus, gpus, retries

    def run(self, cells: Sequence[Cell], place: Place, report: Report) -> None:
        """Compute every cell and report each once."""
        ray = self.ray
        mine = not ray.is_initialized()
        if mine:
            try:
                ray.init(
                    address=self.address,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    **({} if self.address else {"include_dashboard": False}),
                )
            except ConnectionError as error:
                raise UsageError(f"{self.address}: no Ray cluster answers ({error})") from None
        try:
            task = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=self.retries, max_calls=0)(
                attempt
            )
            pending = {task.remote(self.work, cell.document(), place.plain()): cell for cell in cells}
            while pending:
                ready, _ = ray.wait(list(pending), num_returns=1)
                for reference in ready:
                    cell = pending.pop(reference)
                    try:
                        answer = ray.get(reference)
                    except ray.exceptions.RayError as error:
                        report(died(cell, f"its Ray worker was lost: {str(error).splitlines()[0]}"))
                    else:
                        report(outcome(cell, answer))
        finally:
            if mine:
                ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise UsageError(
            "the engine ray needs Ray, which is not installed: pip install '.[cluster]' in your clone"
        ) from None
    return ray
