"""Engines compute the same cells: in this process, in several, on a real local Ray; workers may be killed."""

import json
import sys
import textwrap

import pytest
from made_cells import make_cell

from dear.bench import engines
from dear.bench.cells import Environment
from dear.bench.engines import Local, OnRay, make_engine
from dear.bench.store import Grid
from dear.errors import UsageError

CELLS = [make_cell("base-to-novel", "dear", "d", seed) for seed in range(1, 7)]
MODULE = """
    import os, random, signal, time
    from pathlib import Path

    def value(cell, place):
        return {"number": random.Random(cell["spec"]["seed"]).random(), "place": place["data_root"]}

    def fragile(cell, place):
        mark = Path(place["data_root"]) / f"killed-{cell['spec']['seed']}"
        if cell["spec"]["seed"] in (2, 5) and not mark.exists():
            mark.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        return value(cell, place)

    def late(cell, place):
        folder, seed = Path(place["data_root"]), cell["spec"]["seed"]
        with (folder / f"begun-{seed}").open("a") as file:
            file.write("x")
        while seed == 1 and not (folder / "begun-4").exists():
            time.sleep(0.01)
        if seed == 1 and (folder / "begun-1").read_text() == "x":
            os.kill(os.getpid(), signal.SIGKILL)
        return value(cell, place)

    def doomed(cell, place):
        if cell["spec"]["seed"] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"deaf": signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])}
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A module that worker processes can import too."""
    (tmp_path / "grid_work_for_tests.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("grid_work_for_tests", None)
    import grid_work_for_tests

    return grid_work_for_tests


@pytest.fixture(scope="module")
def ray():
    """A real Ray with two workers on this machine."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


def _numbers(folder, engine, place, cells=CELLS):
    grid = Grid(folder)
    summary = grid.run(cells, place, engine)
    files = {path.name: path.read_bytes() for path in sorted((folder / "cells").glob("*.json"))}
    return files, summary


def test_processes_survive_a_kill_write_the_same_bytes_and_compute_nothing_twice(tmp_path, work):
    place = Environment("mini", data_root=str(tmp_path))
    alone, _ = _numbers(tmp_path / "one", Local(work.value), place)
    several, summary = _numbers(tmp_path / "two", Local(work.late, workers=2), place)
    assert several == alone
    assert len(several) == len(summary.computed) == 6
    assert summary.failed == {}
    begun = [(tmp_path / f"begun-{seed}").read_text() for seed in range(1, 7)]
    assert begun[0] == "xx"
    assert begun[1:3] == ["x", "x"]


def test_a_cell_that_always_kills_its_process_fails_alone(tmp_path, work):
    # The fourth cell is lost with the third; that cells which wait are computed after a loss is tested above.
    place = Environment("mini", str(tmp_path))
    _, summary = _numbers(tmp_path / "out", Local(work.doomed, workers=2), place, CELLS[:4])
    assert [cell.seed for cell in summary.failed] == [3]
    assert "died twice" in summary.failed[CELLS[2]]
    assert len(summary.computed) == 3
    # a Ctrl-C at the terminal, which reaches every process, is heard by the first alone
    written = [json.loads(Grid(tmp_path / "out").path(cell).read_text()) for cell in summary.computed]
    assert [document["result"] for document in written] == [{"deaf": True}] * 3


def test_ray_writes_the_same_bytes_and_survives_a_killed_worker(tmp_path, work, ray):
    place = Environment("mini", data_root=str(tmp_path))
    alone, _ = _numbers(tmp_path / "one", Local(work.value), place)
    import ray.cloudpickle as cloudpickle

    cloudpickle.register_pickle_by_value(work)  # the tests' module is not installed on the workers
    on_ray, summary = _numbers(tmp_path / "ray", OnRay(work.fragile), place)
    assert on_ray == alone
    assert summary.failed == {}
    assert (tmp_path / "killed-2").exists()


def test_ray_reports_a_cell_whose_worker_is_always_lost(tmp_path, work, ray):
    import ray.cloudpickle as cloudpickle

    cloudpickle.register_pickle_by_value(work)
    _, summary = _numbers(tmp_path / "out", OnRay(work.doomed, retries=0), Environment("mini", str(tmp_path)))
    assert [cell.seed for cell in summary.failed] == [3]
    assert "lost" in summary.failed[CELLS[2]]


def test_missing_ray_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="cluster"):
        make_engine("ray", engines.attempt)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("slurm", {}, "'slurm'"),
        ("local", {"address": "x"}, "address"),
        ("local", {"gpus": 0.5}, "gpus"),
        ("local", {"workers": 0}, "workers.*0"),
        ("ray", {"workers": 2}, "workers"),
    ],
)
def test_wrong_engines_are_refused(name, options, message):
    with pytest.raises(UsageError, match=message):
        make_engine(name, engines.attempt, **options)


def test_real_cells_on_ray_agree_with_this_process(tmp_path, backbone, table, roles_file, ray):
    import dear
    from dear.bench.engines import compute
    from dear.bench.plan import Request, plan
    from dear.heads.roles import RoleMap

    request = Request(
        backbone="tiny",
        identity=dear.load(backbone).identity,
        roles=RoleMap.load(roles_file),
        methods=["zeroshot", "dear"],
        datasets=[table],
        seeds=[1, 2],
        shots=[4],
        recipe={"epochs": 2},
    )
    cells, place = plan("base-to-novel", request), Environment(backbone, roles_file=roles_file)
    results_of_runs = []
    for name, engine in (("here", Local(compute)), ("ray", OnRay(compute))):
        grid = Grid(tmp_path / name)
        assert grid.run(cells, place, engine).failed == {}
        results = [grid.read(cell) for cell in cells]
        results_of_runs.append([{k: v for k, v in result.items() if k != "seconds"} for result in results])
    assert results_of_runs[0] == results_of_runs[1]
