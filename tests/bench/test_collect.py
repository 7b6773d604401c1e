"""research/accuracy/collect.py: what stands in the cells is what the CSV and its table say."""

import runpy
from pathlib import Path

import pytest
from made_cells import make_cell

from dear.bench.cells import Outcome
from dear.bench.store import Grid

COLLECT = runpy.run_path(str(Path(__file__).parents[2] / "research" / "accuracy" / "collect.py"))


def fill(folder, method, seed, base, novel, **options):
    cell = make_cell("base-to-novel", method, "/far/away/eurosat/index.csv", seed, options=options)
    hm = 2 * base * novel / (base + novel)
    result = {
        "modes": {"default": {"base": base, "novel": novel, "hm": hm}},
        "trainable_parameters": 7,
        "adapter_bytes": 28,
        "steps": 10,
        "seconds": {"train": 1.5, "evaluate": 0.5},
        "made_with": {"dear": "0", "hardware": "a card", "torch": "2.0"},
    }
    Grid(folder).store(Outcome(cell, result))


def test_rows_name_what_differs_and_no_path(tmp_path):
    for seed, base in enumerate((0.50, 0.60, 0.70), 1):
        fill(tmp_path, "coop", seed, base, 0.40)
    fill(tmp_path, "coop", 1, 0.90, 0.10, context=16)
    COLLECT["write"](COLLECT["collect"]([str(tmp_path)], None), str(tmp_path / "out.csv"))
    rows = COLLECT["read"](str(tmp_path / "out.csv"))
    assert {row["dataset"] for row in rows} == {"eurosat"}
    assert [row["changed"] for row in rows].count("context=16") == 1
    table = COLLECT["show"](str(tmp_path / "out.csv"))
    assert "| coop | 60.0 / 40.0 / 47.8 |" in table  # HM a seed (44.4, 48.0, 50.9), then averaged
    assert "| coop, context=16 | 90.0 / 10.0 / 18.0 (1 seeds) |" in table


def test_a_folder_without_cells_leaves_the_csv_alone(tmp_path, monkeypatch, capsys):
    kept = tmp_path / "kept.csv"
    kept.write_text("method\ncoop\n")
    monkeypatch.setattr("sys.argv", ["collect.py", str(tmp_path / "nowhere"), "--csv", str(kept)])
    with pytest.raises(SystemExit):
        COLLECT["main"]()
    assert str(tmp_path / "nowhere") in capsys.readouterr().err
    assert kept.read_text() == "method\ncoop\n"
