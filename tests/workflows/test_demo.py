"""The demo, very small: what it writes, what an interruption leaves, and whether its figures agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dear.report.demo_facts import DemoFacts
from dear.report.demo_page import TERMS
from dear.workflows import demo as module
from dear.workflows.demo_parts import Size

TINY = Size(("textures",), 1, 1, 3, role_images=150, known_images=60, per_group=2)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DemoFacts, list[str], dict[str, int]]:
    """A demo that is stopped after its training, then run again: folder, facts, sentences, times of files."""
    folder = tmp_path_factory.mktemp("demo") / "out"

    def stop(sentence: str) -> None:
        if sentence.startswith("3."):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "QUICK", TINY)
        with pytest.raises(KeyboardInterrupt):
            module.demo(folder, quick=True, tell=stop)
        names = {path.name for path in folder.iterdir()}
        assert names == {"roles.json", "run-textures-quick"}  # no page, no figures, nothing half written
        times = {path.name: path.stat().st_mtime_ns for path in (folder / "run-textures-quick").iterdir()}
        sentences: list[str] = []
        facts = module.demo(folder, quick=True, tell=sentences.append)
    return folder, facts, sentences, times


def test_a_second_demo_uses_the_training_of_the_first(told) -> None:
    folder, _, _, times = told
    run = folder / "run-textures-quick"
    assert (run / "adapter.safetensors").stat().st_mtime_ns == times["adapter.safetensors"]
    assert {path.name for path in folder.iterdir()} == {
        *("roles.json", "run-textures-quick", "results.json", "index.html")
    }


def test_every_figure_of_the_page_is_in_the_results(told) -> None:
    folder, facts, sentences, _ = told
    page, results = (folder / "index.html").read_text(), json.loads((folder / "results.json").read_text())
    rows = results["tasks"]["textures"]["rows"]
    assert [row["title"] for row in rows] == ["zero-shot", "DeAR, fused", "DeAR, decoupled"]
    assert [row["recommended"] for row in rows] == [False, True, False]
    for row in rows:
        mean = 2 * row["trained"] * row["new"] / (row["trained"] + row["new"])
        assert row["harmonic_mean"] == pytest.approx(mean)
        for value in (row["trained"], row["new"], row["harmonic_mean"]):
            assert f"{100 * value:.1f}%" in page
    for row in results["shortcut"]["rows"]:
        assert f"{100 * row['worst']:.1f}%" in page
        assert row["title"] in page
    for row in results["retrieval"]:
        assert f"{100 * row['by_heads']:.1f}%" in page
    assert all(term in page for term in TERMS)
    assert "DeAR, fused (recommended)" in page
    assert "This was the quick demo" in page
    assert [line[0] for line in sentences if line[0] != " "] == ["1", "2", "3", "4"]
    assert facts.quick


def test_what_got_worse_adds_up(told) -> None:
    task = told[1].tasks[0]
    frozen, used = task.rows[0], next(row for row in task.rows if row.recommended)
    for part, images, before, after in (
        (task.trained, task.images[0], frozen.trained, used.trained),
        (task.new, task.images[1], frozen.new, used.new),
    ):
        fixed, broken = part.counts
        assert images == 18
        assert fixed - broken == round(images * (after - before))
        assert all(now < old for _, old, now in part.worse)


def test_the_shortcut_is_found_and_the_heads_remove_it(told) -> None:
    shortcut = told[1].shortcut
    assert [row.concept for row in shortcut.concepts if row.verdict == "shortcut"] == ["Location"]
    untouched, heads, random, _ = shortcut.rows
    assert heads is shortcut.repaired
    assert shortcut.images == (96, 72)
    assert shortcut.groups == 36
    assert heads.everywhere > untouched.everywhere + 0.08 > random.everywhere
    assert heads.worst > untouched.worst
    assert untouched.at_home == 1.0


def test_heads_find_images_alike_in_their_concept(told) -> None:
    rows = {row.concept: row for row in told[1].retrieval.rows}
    assert rows["Location"].by_heads > 2 * rows["Location"].random > rows["Location"].chance
    assert all(row.own > 2 * row.others for row in told[1].truth)
