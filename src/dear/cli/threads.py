"""`--threads`, on every command that computes: how many CPU threads PyTorch uses.

Without it PyTorch takes every core, or as many as the container's quota allows. The number does not follow
the load of the machine: it is part of how sums are rounded, so that the same command gives the same bits.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

#: Commands that compute; `bench`, `ablate` and `serve` have an option of their own.
COMPUTING = {
    "demo", "zeroshot", "choose", "adapt", "audit", "repair", "evaluate", "predict", "retrieve", "embed",
    "export", "report", "studio", "pretrain", "mini", "speed", "explain", "drift", "discover", "check",
}  # fmt: skip
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def add_threads(command: Any) -> None:
    """Give a command, or every computing command of a group, the option; one that has it keeps its own."""
    for each in getattr(command, "commands", {}).values():
        add_threads(each)
    own = {word for parameter in command.params for word in parameter.opts}
    if command.name in COMPUTING and "--threads" not in own:
        command.params.append(_option())


@cache
def _option() -> Any:
    """The option as typer makes it of a command that has nothing else."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def nothing(
        threads: Annotated[
            int | None,
            Option(
                min=1,
                callback=_apply,
                expose_value=False,
                show_default=False,
                help="CPU threads; all cores, or the container's quota, if left out.",
            ),
        ] = None,
    ) -> None:
        pass

    return typer.main.get_command(app).params[0]


def _apply(value: int | None) -> None:
    limit = quota() if value is None else value
    if limit is None:
        return
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # for a PyTorch that is not imported yet
        if value is not None or name not in os.environ:
            os.environ[name] = str(limit)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(limit)


def quota(path: Path = _QUOTA) -> int | None:
    """Cores that the container may use; None: there is no limit below the machine's cores.

    >>> quota(Path("no such file")) is None
    True
    """
    try:
        share, period = path.read_text().split()[:2]
        cores = max(1, int(share) // int(period))
    except (OSError, ValueError):
        return None
    return cores if cores < (os.cpu_count() or 1) else None
