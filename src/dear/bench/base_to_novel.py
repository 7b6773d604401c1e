"""Base-to-novel: train on the first half of the classes, test on both halves (main text, section 4.1)."""

from __future__ import annotations

from typing import Any

from dear.bench.published import harmonic_mean
from dear.bench.session import Session, of_labels
from dear.data.split import halves
from dear.errors import DataError


def run(session: Session) -> dict[str, Any]:
    """Base, novel and their harmonic mean in every mode.

    Every test image passes the image tower once for all modes; a class's text is encoded once a half.
    """
    whole = session.open("train")
    base, novel = halves(range(len(whole.classes)))
    if not novel:
        raise DataError(f"{whole.name}: has only {len(base)} class; base-to-novel needs two or more")
    method = session.fit(session.draw(whole, base))
    test = session.open("test")
    seen = session.test(method, of_labels(test, base))
    unseen = session.test(method, of_labels(test, novel))
    assert seen is not None  # the method was trained on these classes
    session.record["classes"] = {"base": len(base), "novel": len(novel)}
    modes: dict[str, dict[str, float | None]] = {}
    for mode, accuracy in seen.items():
        other = None if unseen is None else unseen[mode]
        hm = None if other is None else harmonic_mean(accuracy, other)
        modes[mode] = {"base": accuracy, "novel": other, "hm": hm}
    return session.finish(modes)
