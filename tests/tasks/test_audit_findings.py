"""Verdicts on image properties: what a model uses is suspected, and too few images are called too few."""

from __future__ import annotations

import pytest

from dear.shortcuts.causal import EditTest
from dear.shortcuts.find import Shortcut
from dear.tasks.audit.findings import (
    ASSOCIATED,
    FILES_ONLY,
    SHORTCUT,
    UNCERTAIN,
    UNUSED,
    PropertyFinding,
    sort_findings,
)

SHARP = Shortcut(0, "ramen", "sharpness", "sharpness", 0.98, "sharp", (5.0, 3.0))


def result(images: int, before: int, moved_in: int, moved_out: int = 0) -> EditTest:
    after = before + moved_in - moved_out
    return EditTest("ramen", images, before / images, after / images, moved_in, moved_out)


@pytest.mark.parametrize(
    ("test", "verdict"),
    [
        (None, ASSOCIATED),
        (result(60, 0, 11), SHORTCUT),
        (result(60, 1, 3), UNCERTAIN),  # 1.7 -> 6.7 %
        (result(60, 1, 0), UNUSED),
        (result(240, 5, 3, 2), UNUSED),
        (result(8, 0, 0), UNCERTAIN),
    ],
)
def test_verdicts(test: EditTest | None, verdict: str) -> None:
    finding = PropertyFinding(SHARP, test)
    assert finding.verdict == verdict
    assert finding.suspected == (verdict in (SHORTCUT, ASSOCIATED))
    assert finding.to_dict()["suspected"] == finding.suspected
    assert "ramen" in finding.sentence


def test_the_interval_contains_the_difference_and_shrinks() -> None:
    few, many = result(20, 2, 3, 1), result(200, 20, 30, 10)
    for test in (few, many):
        low, high = test.interval
        assert low < test.extra < high
    assert few.interval[1] - few.interval[0] > 2 * (many.interval[1] - many.interval[0])


def test_a_fact_of_the_files_is_listed_last_and_not_suspected() -> None:
    camera = PropertyFinding(Shortcut(1, "pho", "camera", "", 1.0, "with camera X"))
    assert camera.verdict == FILES_ONLY
    assert not camera.suspected
    assert sort_findings([camera, PropertyFinding(SHARP)])[-1] is camera
