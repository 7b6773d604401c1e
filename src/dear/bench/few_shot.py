"""Few-shot classification: train on k images of every class, test on every class."""

from __future__ import annotations

from typing import Any

from dear.bench.session import Session

SHOTS = (1, 2, 4, 8, 16)


def run(session: Session) -> dict[str, Any]:
    """Accuracy over all classes in every mode."""
    method = session.fit(session.draw(session.open("train")), keep=True)
    found = session.test(method, session.open("test")) or {}
    return session.finish({mode: {"accuracy": accuracy} for mode, accuracy in found.items()})
