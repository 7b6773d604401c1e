"""Which device to compute on."""

from __future__ import annotations

import torch

from dear.errors import UsageError


def pick_device(name: str) -> str:
    """The device to use: "auto" is the first GPU where there is one, else the CPU.

    Raises:
        UsageError: the device does not exist here.

    >>> pick_device("cpu")
    'cpu'
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].partition(",")[0]
        raise UsageError(f"device {name}: not usable here ({reason[:80]}); use cpu, cuda or auto") from None
    return name
