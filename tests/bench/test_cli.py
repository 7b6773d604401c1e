"""`dear bench` and `dear ablate` from the outside: files, exit statuses, one-line errors, continued runs."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dear.cli import build_app
from dear.errors import UsageError

FAST = ["--recipe", "epochs=1", "--recipe", "batch=16", "--shots", "2"]


@pytest.fixture
def dear(backbone, roles_file, table, tmp_path):
    """Runs a command on the tiny backbone; returns the result."""

    def call(*words, datasets=table):
        common = ["-b", backbone, "--roles", roles_file, "--datasets", datasets, "--device", "cpu"]
        return CliRunner().invoke(build_app(), [*words, *common, *FAST, "--out", str(tmp_path / "grid")])

    return call


def test_bench_writes_cells_tables_and_a_page_and_continues(dear, tmp_path):
    first = dear("bench", "base-to-novel", "--seeds", "1,2", "--json")
    assert first.exit_code == 0, first.output
    answer = json.loads(first.stdout)
    assert (answer["computed"], answer["cached"], answer["failed"]) == (4, 0, {})
    for name in ("base-to-novel.md", "base-to-novel.csv", "base-to-novel.tex", "base-to-novel.html"):
        assert (tmp_path / "grid" / name).stat().st_size > 100
    assert len(list((tmp_path / "grid" / "cells").iterdir())) == 4
    second = json.loads(dear("bench", "base-to-novel", "--seeds", "1,2,3", "--json").stdout)
    assert (second["computed"], second["cached"]) == (2, 4)


def test_a_failing_cell_gives_status_1_and_the_others_their_table(dear, tmp_path, caplog):
    result = dear(
        "bench", "base-to-novel", "--methods", "zeroshot,dear", "--seeds", "1", "--set", "dear.first_layer=99"
    )
    assert result.exit_code == 1
    assert "zeroshot" in result.stdout
    assert "first_layer" in caplog.text
    assert "Failed cells: 1" in (tmp_path / "grid" / "base-to-novel.html").read_text()


def test_ablate_runs_a_study_and_shares_cells(dear, tmp_path):
    result = dear("ablate", "isolation,inference", "--seeds", "1", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["computed"] == 2
    text = (tmp_path / "grid" / "ablations.md").read_text()
    assert "readonly" in text
    assert "decoupled" in text
    assert "| *paper: eleven sets* |" in text


def test_an_ablation_starts_from_a_preset(dear, tmp_path):
    result = dear("ablate", "isolation", "--seeds", "1", "--recipe", "quick", "--json")
    assert result.exit_code == 0, result.output
    cells = [json.loads(path.read_text()) for path in (tmp_path / "grid" / "cells").glob("*.json")]
    assert {cell["cell"]["spec"]["preset"] for cell in cells} == {"quick"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "few-shots"], "'few-shots'"),
        (["bench", "base-to-novel", "--seeds", "one"], "one"),
        (["bench", "base-to-novel", "--set", "beta=1"], "beta=1"),
        (["bench", "base-to-novel", "--engine", "slurm"], "'slurm'"),
        (["bench", "base-to-novel", "--threads", "0"], "threads"),
        (["bench", "base-to-novel", "--set", "dera.beta=1"], "'dera'"),
        (["bench", "base-to-novel", "--gpus", "0.5"], "gpus"),
        (["bench", "base-to-novel", "--engine", "ray", "--workers", "2"], "workers"),
        (["bench", "base-to-novel", "--recipe", "seed=3"], "seed"),
        (["bench", "base-to-novel", "--methods", "zeroshot"], "roles"),
        (["bench", "base-to-novel", "--template", "x"], "x"),
        (["ablate", "everything"], "everything"),
    ],
)
def test_wrong_use_is_one_sentence(dear, words, message):
    result = dear(*words)
    assert isinstance(result.exception, UsageError)
    with pytest.raises(UsageError, match=message):
        raise result.exception


def test_a_grid_killed_in_the_middle_is_continued_with_the_same_numbers(
    dear, backbone, roles_file, table, tmp_path
):
    """SIGKILL after the second cell appears; the rest is computed by a second run."""
    out = tmp_path / "grid"
    words = ["bench", "base-to-novel", "-b", backbone, "--roles", roles_file, "--datasets", table]
    words += ["--device", "cpu", *FAST, "--out", str(out), "--seeds", "1,2,3"]
    whole = CliRunner().invoke(
        build_app(), [*words[:-4], "--out", str(tmp_path / "whole"), "--seeds", "1,2,3", "--json"]
    )
    assert json.loads(whole.stdout)["computed"] == 6
    code = (
        "import os, signal; from dear.bench.store import Grid; from dear.cli import build_app\n"
        "store = Grid.store\n"
        "def die(self, outcome):\n"
        "    store(self, outcome)\n"
        "    if len(list((self.folder / 'cells').iterdir())) == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Grid.store = die\n"
        "build_app()()"
    )
    killed = subprocess.run([sys.executable, "-c", code, *words], check=False, capture_output=True)
    assert killed.returncode == -9
    again = json.loads(CliRunner().invoke(build_app(), [*words, "--json"]).stdout)
    assert (again["cached"], again["computed"]) == (2, 4)
    assert _modes(out) == _modes(tmp_path / "whole")


def _modes(folder):
    return {p.name: json.loads(p.read_text())["result"]["modes"] for p in (folder / "cells").glob("*.json")}
