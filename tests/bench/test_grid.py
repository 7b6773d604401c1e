"""The grid on disk: what is kept, what is computed again, what a failure does."""

import json
import re

import msgspec
import pytest
from made_cells import make_cell

from dear.bench.cells import Cell, Environment
from dear.bench.engines import Local
from dear.bench.store import Grid
from dear.errors import RunError

PLACE = Environment(backbone="none")


def make(seed=1, **changes):
    fields = {
        "protocol": "base-to-novel",
        "method": "dear",
        "dataset": "world:textures",
        "options": {"beta": 0.9},
    }
    return make_cell(**(fields | {"seed": seed} | changes))


class Counting:
    """A stand-in for the real work that remembers what it was asked for."""

    def __init__(self, bad=()):
        self.seen, self.bad = [], set(bad)

    def __call__(self, cell, place):
        self.seen.append(cell["spec"]["seed"])
        if cell["spec"]["seed"] in self.bad:
            raise ValueError(f"seed {cell['spec']['seed']} is bad")
        return {"modes": {"default": {"base": cell["spec"]["seed"] / 10}}}


def test_key_depends_on_every_field_but_the_name_of_the_backbone():
    one = make()
    others = [
        make(seed=2),
        make(method="coop"),
        make(shots=8),
        make(options={"beta": 0.8}),
        make(options={"beta": 0.9, "rank": 1}),
        make(recipe={"epochs": 1}),
        make(roles_digest="1"),
        make(setting={"targets": ["a"]}),
        make(identity="sha256:01"),
        make(data_digest="1"),
        make(template="a {}"),
        make(tested="1"),
        make(protocol="few-shot"),
        make(dataset="world:emblems"),
    ]
    assert len({cell.key for cell in [one, *others]}) == len(others) + 1
    assert make(backbone="copy of mini").key == one.key
    assert msgspec.convert(one.document(), Cell) == one


def test_key_is_stable_over_order_and_sequence_type():
    assert (
        make(options={"a": (1, 2), "b": 1.0}, recipe={"x": 1, "y": 2}).key
        == make(options={"b": 1.0, "a": [1, 2]}, recipe={"y": 2, "x": 1}).key
    )


def test_second_run_computes_only_what_is_missing(tmp_path):
    grid, work = Grid(tmp_path), Counting()
    first = grid.run([make(1), make(2), make(1)], PLACE, Local(work))
    assert work.seen == [1, 2]
    assert len(first.computed) == 2
    second = grid.run([make(1), make(2), make(3)], PLACE, Local(work))
    assert work.seen == [1, 2, 3]
    assert [cell.seed for cell in second.cached] == [1, 2]
    assert grid.read(make(3)) == {"modes": {"default": {"base": 0.3}}}


def test_a_failed_cell_is_reported_and_tried_again_and_does_not_stop_the_rest(tmp_path):
    grid = Grid(tmp_path)
    summary = grid.run([make(1), make(2), make(3)], PLACE, Local(Counting(bad=[2])))
    assert [cell.seed for cell in summary.computed] == [1, 3]
    assert summary.failed == {make(2): "ValueError: seed 2 is bad"}
    error = json.loads(grid.error_path(make(2)).read_text())
    assert error["cell"]["spec"]["seed"] == 2
    assert "ValueError" in error["error"]["trace"]
    assert len(list(grid.documents())) == 2

    again = Counting()
    grid.run([make(1), make(2), make(3)], PLACE, Local(again))
    assert again.seen == [2]
    assert not grid.error_path(make(2)).exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"seed": 1', '"seed": 7'),
        lambda text: text.replace('"schema": 1', '"schema": 99'),
        lambda text: text.replace('"cell": {', '"cell": {"surplus": 1, '),
    ],
)
def test_a_damaged_cell_is_computed_again_with_a_notice(tmp_path, damage):
    grid = Grid(tmp_path)
    grid.run([make(1)], PLACE, Local(Counting()))
    path = grid.path(make(1))
    good = path.read_text()
    path.write_text(damage(good))
    assert list(grid.documents()) == []
    with pytest.raises(Exception, match=path.name):
        grid.read(make(1))
    work = Counting()
    summary = grid.run([make(1)], PLACE, Local(work))
    assert work.seen == [1]
    assert path.name in summary.notices[0]
    assert path.read_text() == good


def test_a_result_stands_under_its_own_key_only(tmp_path):
    grid = Grid(tmp_path)
    grid.run([make(1), make(2)], PLACE, Local(Counting()))
    grid.path(make(1)).write_text(grid.path(make(2)).read_text())
    with pytest.raises(RunError, match=re.escape(grid.path(make(1)).name)):
        grid.read(make(1))


def test_draws_are_written_once_and_recorded(tmp_path):
    grid = Grid(tmp_path)

    def work(cell, place):
        draw = {"images": 1, "jsonl": '{"label": 0, "key": "a.jpg"}\n'}
        return {"modes": {"default": {"base": 0.5}}, "draw": draw}

    grid.run([make(1), make(1, method="coop")], PLACE, Local(work))
    records = {json.dumps(result["draw"]) for _, result in grid.documents()}
    assert len(records) == 1
    record = json.loads(records.pop())
    assert (tmp_path / record["file"]).read_text() == '{"label": 0, "key": "a.jpg"}\n'
    assert len(list((tmp_path / "draws").iterdir())) == 1


def test_progress_counts_kept_and_new_cells(tmp_path):
    grid = Grid(tmp_path)
    grid.run([make(1)], PLACE, Local(Counting()))
    seen = []
    grid.run([make(1), make(2)], PLACE, Local(Counting()), lambda o, done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


def test_file_names_are_readable_and_safe():
    cell = make(dataset="/data/my photos/../x", setting={"held_out": "art painting"})
    assert "/" not in cell.stem
    assert cell.stem.startswith("base-to-novel-dear-data-my-photos")
    assert "art-painting" in cell.stem
    assert cell.stem.endswith(cell.key)
