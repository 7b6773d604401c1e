"""A sample of `make faults`: killed at random moments, full disk, read-only folder, second process, clock."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from killing import COMMANDS, Counts, Trial, end, make_data, start, warm_up, whole

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks and watches children")


@pytest.fixture(scope="module")
def open_folder():
    """A folder that every user may look into (pytest's own is closed to others)."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder).resolve()


@pytest.fixture(scope="module")
def trials(open_folder):
    warm_up()
    data = make_data(open_folder / "data")
    made: dict[str, Trial] = {}

    def trial(name: str) -> Trial:
        if name not in made:
            made[name] = Trial(COMMANDS[name], data, open_folder)
        made[name].fresh()
        return made[name]

    return trial


@pytest.mark.parametrize(
    ("name", "ways"),
    [("adapt", "time write"), ("discover", "time write ctrl-c"), ("bench", "write"), ("ablate", "ctrl-c")],
)
def test_killed_anywhere_every_file_is_whole_and_the_rerun_agrees(trials, name, ways):
    trial = trials(name)
    for way in ways.split():
        counts, rng = Counts(), random.Random(f"sample {name} {way}")
        while counts.killed < 1:
            trial.case(way, rng, counts)
        assert counts.faults == []


@pytest.mark.parametrize(("name", "limit"), [("adapt", 50_000), ("discover", 2_000), ("bench", 1_000)])
def test_a_disk_that_fills_up_is_one_line_and_harms_nothing(trials, name, limit):
    trial = trials(name)

    def small_files() -> None:  # the kernel refuses to make a file longer, as a full disk would
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    status, said = trial.run(small_files)
    assert status == 1
    assert len(errors(said)) == 1
    assert "File too large" in said
    assert whole(trial.out) == ([], 0)
    trial.must_end_well()
    assert trial.agrees()


@pytest.mark.parametrize("name", ["adapt", "discover", "bench"])
def test_a_folder_that_may_not_be_written_is_one_line(trials, name):
    trial = trials(name)
    trial.out.chmod(0o555)

    def without_privileges() -> None:  # nothing is read-only for root, so its capabilities are given up
        version = (ctypes.c_uint32 * 2)(0x20080522, 0)
        assert ctypes.CDLL(None).capset(version, (ctypes.c_uint32 * 6)()) == 0

    began = time.monotonic()
    status, said = trial.run(without_privileges)
    trial.out.chmod(0o755)
    assert time.monotonic() - began < max(5.0, trial.seconds)  # told before the work, not after it
    assert status in (1, 2)
    assert len(errors(said)) == 1, said
    told = [line for line in said.splitlines() if not line.startswith("notice: ")]
    assert told[0].startswith(f"dear: {trial.out}")
    assert list(trial.out.iterdir()) == []


def errors(said: str) -> list[str]:
    """The lines of an error; before it a command may have told what it is about to do."""
    return [line for line in said.strip().splitlines() if line.startswith("dear: ")]


def jumping_clock() -> None:
    """The wall clock goes back or forth by years at every look; monotonic clocks cannot."""
    real, rng = time.time, random.Random(4)
    time.time = lambda: real() + rng.choice((-3e8, 0.0, 3e8))
    time.time_ns = lambda: int(time.time() * 1e9)


def test_a_second_process_is_told_whatever_the_clock_says_and_the_first_goes_on(trials, open_folder):
    trial = trials("adapt")
    first = start(trial.argv, trial.log, jumping_clock)
    deadline = time.monotonic() + 60
    while not (trial.out / "run/resume.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(first, signal.SIGSTOP)
    for moment in (0, 4_000_000_000):  # the lock looks very old, then very young
        os.utime(trial.out / "run/.lock", (moment, moment))
        log = open_folder / "second.log"
        status = end(start(trial.argv, log, jumping_clock))
        (line,) = log.read_text().splitlines()
        assert (status, f"{trial.out}/run" in line) == (2, True)
    os.kill(first, signal.SIGCONT)
    assert end(first) == 0
    assert trial.agrees()  # and its seconds are not negative


def test_two_processes_may_compute_one_grid(trials, open_folder):
    trial = trials("ablate")
    both = [start(trial.argv, open_folder / f"grid-{number}.log") for number in range(2)]
    assert [end(pid) for pid in both] == [0, 0]
    assert trial.agrees()
