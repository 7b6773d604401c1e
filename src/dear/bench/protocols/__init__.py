"""The protocols by name, and the work of one cell as engines call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dear.bench.cells import Cell, Place
from dear.bench.protocols.base import Protocol
from dear.bench.protocols.base_to_novel import BaseToNovel
from dear.bench.protocols.few_shot import FewShot
from dear.bench.protocols.held_out import HeldOut
from dear.bench.protocols.transfer import CROSS_DATASET, DOMAIN_SHIFT
from dear.errors import UsageError

PROTOCOLS: Mapping[str, Protocol] = {
    protocol.name: protocol for protocol in (BaseToNovel(), FewShot(), CROSS_DATASET, DOMAIN_SHIFT, HeldOut())
}
"""Every protocol by name."""


def find_protocol(name: str) -> Protocol:
    """A protocol by name.

    Raises:
        UsageError: there is none of that name.
    """
    if name not in PROTOCOLS:
        raise UsageError(f"no protocol {name!r}; choose from {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]


def compute(cell: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    """The result of a cell: plain values in, plain values out, the same on every engine.

    Raises:
        DearError: what the user can correct (missing data, a role map that does not fit).
        KeyboardInterrupt: the user stopped training.
    """
    import torch

    from dear.bench.session import Session
    from dear.train import Paused

    task, where = Cell(**cell), Place(**place)
    protocol = find_protocol(task.protocol)
    before = torch.get_num_threads()
    torch.set_num_threads(where.threads)  # the order of sums depends on it
    try:
        return protocol.run(Session(task, where))
    except Paused:
        raise KeyboardInterrupt from None
    finally:
        torch.set_num_threads(before)
