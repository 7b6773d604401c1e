"""research/accuracy/fair_table.py: every dataset gets its own template; the tables repeat the cells."""

import importlib
import json
import re
import shutil
from pathlib import Path

import pytest
from made_cells import make_cell

from dear.bench.cells import Outcome
from dear.bench.store import Grid

TEMPLATES = {
    "caltech101": "a photo of a {}.",
    "oxford_pets": "a photo of a {}, a type of pet.",
    "eurosat": "a centered satellite photo of {}.",
    "dtd_partial10": "{} texture.",
}  # the supplement's Table 4


@pytest.fixture
def fair():
    return importlib.import_module("fair_table")


def test_every_dataset_has_its_own_template(fair, backbone, table, tmp_path, capsys):
    data = tmp_path / "data"
    for name in TEMPLATES:
        shutil.copytree(Path(table).parent, data / name)
        (data / name / Path(table).name).rename(data / name / "index.csv")
    words = ["run", "--out", str(tmp_path / "out"), "--only", "real", "--data-root", str(data)]
    words += ["--small", backbone, "--methods", "zeroshot", "--seeds", "1"]
    assert fair.main(words) == 0
    cells = [json.loads(path.read_text())["cell"] for path in (tmp_path / "out/small/cells").iterdir()]
    templates = {Path(cell["spec"]["data"]).parent.name: cell["spec"]["template"] for cell in cells}
    assert templates == TEMPLATES
    assert "4 computed" in capsys.readouterr().err
    assert fair.main(words) == 0
    assert "4 kept" in capsys.readouterr().err
    shutil.rmtree(data / "eurosat")
    with pytest.raises(SystemExit):
        fair.main(words)
    assert "eurosat/index.csv" in capsys.readouterr().err


def test_all_methods_are_planned_with_all_their_presets(fair, monkeypatch):
    names = fair.every_method()
    assert {name.partition("@")[0] for name in names} == set(fair.METHODS) - {"purify"}
    monkeypatch.setattr(fair.METHODS["coop"], "presets", {"a": {}, "b": {}}, raising=False)
    assert {"coop@a", "coop@b"} < set(fair.every_method())
    assert "coop" not in fair.every_method()


def test_tables_are_made_from_the_csv_alone(fair, tmp_path):
    made = {"dear": "0", "hardware": "a card", "torch": "2.0"}
    for method, dataset, seed, base, novel in (
        ("coop", "world:a", 1, 0.8, 0.4),
        ("coop", "world:a", 2, 0.6, 0.4),
        ("coop", "world:b", 1, 0.5, 0.3),
        ("coop", "world:b", 2, 0.5, 0.5),
        ("vpt", "world:a", 1, 0.9, 0.9),  # not on every dataset: no mean
        ("linear-probe", "world:a", 1, 0.9, None),
        ("linear-probe", "world:b", 1, 0.7, None),
    ):
        hm = None if novel is None else 2 * base * novel / (base + novel)
        row = {"base": base, "novel": novel, "hm": hm, "joint": base / 2}
        result = {
            "modes": {"default": row}, "trainable_parameters": 1, "adapter_bytes": 4, "steps": 1,
            "seconds": {"train": 1.0}, "made_with": made,
        }  # fmt: skip
        cell = make_cell("base-to-novel", method, dataset, seed)
        Grid(tmp_path / "out" / "mini").store(Outcome(cell, result))
    path = str(tmp_path / "fair.csv")
    fair.main(["csv", "--out", str(tmp_path / "out"), "--csv", path])
    text = re.sub(" +", " ", fair.show(path))
    # HM of coop: a 53.3 and 48.0, b 37.5 and 50.0; by seed 45.4 and 49.0
    assert re.search(r"\| coop \| 60\.0 \| 40\.0 \| 47\.2 \| 2\.5 \| 30\.0 \|", text), text
    assert "| linear-probe | 80.0 | - | - |" in text
    assert "| coop | 70.0 / 40.0 / 50.7 | 50.0 / 40.0 / 43.8 |" in text
    assert "| vpt |" not in text.split("###")[1]
    header = Path(path).read_text().splitlines()[0].split(",")
    assert header[:4] == ["date", "hardware", "torch", "dear"]
