"""Keys and results written by an earlier version: neither may change, or finished grids are lost.

`pinned.json` was made by the version before the words were renamed (options and recipes are spelled as they
were then). A new option of a method changes no key as long as its dataclass field names, as
`metadata={"before": value}`, what earlier versions did, and the option has that value.
"""

import dataclasses
import json
from pathlib import Path

import pytest

import dear
from dear.bench.cells import Cell, Place, as_configured, as_written, starting_roles
from dear.bench.engines import compute
from dear.bench.grid import Request, plan, read_cell
from dear.methods import find_method

PINNED = json.loads(Path(__file__).with_name("pinned.json").read_text())
METHODS = [entry["cell"]["method"] for entry in PINNED["keys"]]


def planned(clip, cell):
    """The cell planned today from the options and the recipe of an older one."""
    old = Cell.from_file(cell)
    request = Request(
        backbone=old.backbone,
        fingerprint=clip.fingerprint,
        roles=starting_roles(clip, None),
        methods=[old.method],
        datasets=[old.dataset],
        seeds=[old.seed],
        shots=[old.shots],
        options={old.method: old.options},
        recipe=old.recipe,
    )
    return plan(old.protocol, request)[0]


@pytest.fixture(scope="module")
def mini():
    return dear.load("mini")


@pytest.mark.parametrize("entry", PINNED["keys"], ids=METHODS)
def test_keys_of_every_method_are_those_of_the_earlier_version(entry, mini):
    assert Cell(**entry["cell"]).key == entry["key"]
    cell = planned(mini, entry["cell"])
    assert (cell.key, cell.training_key) == (entry["key"], entry["training_key"])


@pytest.mark.parametrize("entry", PINNED["results"], ids=lambda entry: entry["cell"]["protocol"])
def test_results_are_those_of_the_earlier_version(entry, mini, table, monkeypatch):
    monkeypatch.chdir(Path(table).parent)
    cell = planned(mini, entry["cell"])
    assert cell.key == entry["key"]
    result = compute(cell.plain(), Place("mini").plain())
    for mode, row in entry["result"]["modes"].items():
        assert {column: result["modes"][mode][column] for column in row} == row
    assert result["steps"] == entry["result"]["steps"]
    assert result["facts"].keys() >= entry["result"]["facts"].keys()
    for name, values in entry["result"]["facts"].items():
        assert result["facts"][name] == pytest.approx(values, abs=1e-6)
    assert result["trainable_parameters"] == entry["result"]["trainable_numbers"]


@pytest.mark.parametrize("entry", PINNED["results"], ids=lambda entry: entry["cell"]["protocol"])
def test_cell_files_of_the_earlier_version_are_read_under_todays_words(entry, tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({name: entry[name] for name in ("schema", "key", "cell", "result")}))
    cell, result = read_cell(path)
    assert cell.key == entry["key"]
    assert "optimizer" in cell.recipe
    assert "optimiser" not in cell.recipe
    assert result["modes"] == entry["result"]["modes"]
    assert result["trainable_parameters"] == entry["result"]["trainable_numbers"]


def test_an_option_added_later_leaves_keys_alone_unless_it_is_used():
    @dataclasses.dataclass(frozen=True)
    class Config:
        beta: float = 0.9
        start: str = dataclasses.field(default="class", metadata={"before": "noise"})

    assert as_written(Config(start="noise")) == {"beta": 0.9}
    assert as_configured(Config, {"beta": 0.9}) == {"beta": 0.9, "start": "noise"}
    assert as_written(Config()) == {"beta": 0.9, "start": "class"}


def test_older_spelling_of_an_option_is_read_as_todays():
    (entry,) = [e for e in PINNED["keys"] if e["cell"]["method"] == "promptsrc"]
    assert "centre" in entry["cell"]["options"]
    options = Cell.from_file(entry["cell"]).options
    find_method("promptsrc").configure(options)
    assert "centre" not in options
