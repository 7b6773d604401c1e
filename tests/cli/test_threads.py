"""`--threads`: on every command that computes, with an effect, before PyTorch and after."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

from dear.cli import build_app
from dear.utils.parallel import cpu_limit

#: Commands that list, copy, or show what is there.
IDLE = {"backbones", "methods", "list", "cache", "clear", "show", "push", "pull", "bundle", "import"}


def commands(group, prefix=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*prefix, name))
        else:
            yield (*prefix, name), command


def test_every_computing_command_has_the_option() -> None:
    by_name = dict(commands(typer.main.get_command(build_app())))
    without = {
        words[-1]
        for words, command in by_name.items()
        if not any("--threads" in parameter.opts for parameter in command.params)
    }
    assert without == IDLE - {"cache"}


def test_it_changes_the_threads_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, str(before))
    try:
        result = CliRunner().invoke(build_app(), ["predict", "no-such-run", "a.jpg", "--threads", "3"])
        assert result.exit_code != 0
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def after_main(*arguments: str, show: str, environment: dict[str, str]) -> list[str]:
    """The words that a process prints of `show` after it ran the command."""
    code = (
        f"import os, sys; sys.argv = {['dear', *arguments]}\n"
        "from dear.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules  # which would have read its settings too early\n"
        f"import torch; print({show})"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout.split()


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in names}


def test_it_reaches_a_pytorch_that_is_imported_later() -> None:
    environment = without("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    shown = after_main(
        "predict", "none", "a.jpg", "--threads", "1", show="torch.get_num_threads()", environment=environment
    )
    assert shown[-1] == "1"


@pytest.mark.parametrize(
    ("settings", "spins"),
    [({}, "30000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_openmp_spins_less_unless_the_user_set_it(settings, spins) -> None:
    environment = without("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") | settings
    assert (
        after_main("--version", show="os.environ.get('GOMP_SPINCOUNT')", environment=environment)[-1] == spins
    )


def test_zero_threads_are_refused() -> None:
    assert CliRunner().invoke(build_app(), ["predict", "run", "a.jpg", "--threads", "0"]).exit_code == 2


@pytest.mark.parametrize(("text", "cores"), [("50000 100000", 1), ("max 100000", None), ("99000 10", None)])
def test_the_cpu_limit_of_a_container(tmp_path, text, cores) -> None:
    (tmp_path / "cpu.max").write_text(text)
    if cores == 1 and os.cpu_count() == 1:
        pytest.skip("one core")
    assert cpu_limit(tmp_path / "cpu.max") == cores
