"""The demo, very small: what it writes, what an interruption leaves, and whether its figures agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dear.errors import UsageError
from dear.tasks import repair
from dear.tasks.demo import drawn
from dear.tasks.demo.facts import DemoFacts
from dear.tasks.demo.page import TERMS
from dear.tasks.demo.parts import Size
from dear.tasks.demo.task import demo

TINY = Size(
    ("textures",), 1, 1, 3, role_images=100, known_images=60, per_group=2, focus_draws=1, focus_images=4
)
RUNS = {"run-textures-quick", "run-shortcut-quick"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DemoFacts, list[str], dict[str, int]]:
    """A demo that is stopped after its training, then run again: folder, facts, sentences, times of files."""
    folder = tmp_path_factory.mktemp("demo") / "out"

    def stop(sentence: str) -> None:
        if sentence.startswith("2."):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawn, "QUICK", TINY)
        patch.setattr(repair, "DRAWS", 2)  # random removals, each a training
        with pytest.raises(KeyboardInterrupt):
            drawn.drawn_demo(folder, quick=True, progress=stop)
        names = {path.name for path in folder.iterdir()}
        assert names == {"roles.json", "run-textures-quick"}  # no page, no figures, nothing half written
        times = {path.name: path.stat().st_mtime_ns for path in (folder / "run-textures-quick").iterdir()}
        sentences: list[str] = []
        facts = drawn.drawn_demo(folder, quick=True, progress=sentences.append)
    return folder, facts, sentences, times


def test_a_second_demo_uses_the_training_of_the_first(made) -> None:
    folder, _, _, times = made
    run = folder / "run-textures-quick"
    assert (run / "adapter.safetensors").stat().st_mtime_ns == times["adapter.safetensors"]
    assert {path.name for path in folder.iterdir()} == {
        *("roles.json", "results.json", "index.html"),
        *RUNS,
    }


def test_every_figure_of_the_page_is_in_the_results(made) -> None:
    folder, facts, sentences, _ = made
    page, results = (folder / "index.html").read_text(), json.loads((folder / "results.json").read_text())
    rows = results["tasks"]["textures"]["rows"]
    assert [row["title"] for row in rows] == ["zero-shot", "DeAR, fused", "DeAR, decoupled"]
    assert [row["recommended"] for row in rows] == [False, True, False]
    for row in rows:
        mean = 2 * row["trained"] * row["new"] / (row["trained"] + row["new"])
        assert row["harmonic_mean"] == pytest.approx(mean)
        for value in (row["trained"], row["new"], row["harmonic_mean"]):
            assert f"{100 * value:.1f}%" in page
    for name in ("untouched", "repaired"):
        assert f"{100 * results['shortcut'][name]['worst_group']:.1f}%" in page
    for draws in results["focus"].values():
        assert f"{100 * draws[0]:.1f}%" in page
    for row in results["retrieval"]:
        assert f"{100 * row['by_heads']:.1f}%" in page
    assert all(term in page for term in TERMS)
    assert "DeAR, fused (recommended)" in page
    assert [line[0] for line in sentences if line[0].isdigit()] == ["1", "2", "3", "4", "5", "6"]
    assert facts.quick


def test_what_got_worse_adds_up(made) -> None:
    task = made[1].tasks[0]
    frozen = task.rows[0]
    for part, before, after in (
        (task.trained, frozen.trained, task.used.trained),
        (task.new, frozen.new, task.used.new),
    ):
        groups = part.changes()
        assert len(part.labels) == 18
        assert len(groups["fixed"]) - len(groups["broken"]) == round(18 * (after - before))


def test_the_shortcut_is_found_and_the_heads_remove_it(made) -> None:
    shortcut = made[1].shortcut
    found = [one.association.concept for one in shortcut.findings if one.verdict == "shortcut"]
    assert found == ["Location"]
    assert (shortcut.images, len(shortcut.compared.labels), shortcut.groups) == (96, 72, 36)
    assert shortcut.repaired["accuracy"] > shortcut.untouched["accuracy"] + 0.08
    assert shortcut.untouched["accuracy"] + 0.08 > shortcut.random_mean["accuracy"]
    assert shortcut.repaired["worst_group"] > shortcut.untouched["worst_group"]
    assert shortcut.at_home[0] == 1.0
    # the run that is examined is the one that the repair compares with
    assert shortcut.compared.frozen.accuracy["default"] == shortcut.untouched["accuracy"]
    assert shortcut.compared.adapted.accuracy["default"] == shortcut.repaired["accuracy"]


def test_a_right_and_a_wrong_answer_are_explained(made) -> None:
    folder, facts, _, _ = made
    right, wrong = facts.explained
    assert right.startswith("Right: ")
    assert wrong.startswith("Wrong: ")
    assert wrong.removeprefix("Wrong: ").partition(",")[0] != facts.explained[wrong].answer
    assert "Location" in facts.explained[wrong].sentence
    assert all(one.sentence in (folder / "index.html").read_text() for one in facts.explained.values())


def test_one_example_per_place_is_enough_with_the_right_heads(made) -> None:
    whole, focused, random = made[1].focus.means.values()
    assert focused > 1.5 * max(whole, random)


def test_heads_find_images_alike_in_their_concept(made) -> None:
    rows = {row.concept: row for row in made[1].retrieval.rows}
    assert rows["Location"].by_heads > 2 * rows["Location"].random > rows["Location"].chance
    assert all(row.matching > 2 * row.others for row in made[1].truth)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        demo(tmp_path, quick=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
