"""What commands print where nobody watches: progress is for terminals."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from dear.cli.printing import print_accuracy, stages


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_drawn_on_a_terminal_only(capsys, monkeypatch, terminal: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with stages() as progress:
        for done in range(3):
            progress("images", done, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert ("images" in err) == terminal


@pytest.mark.parametrize(
    ("modes", "title"),
    [
        ({"fused": 0.5, "decoupled": 1.0}, "run on photos, mode decoupled"),
        ({"default": 1.0}, "run on photos"),
    ],
)
def test_the_table_of_accuracies_names_its_mode_where_there_are_several(capsys, modes, title: str) -> None:
    mode = list(modes)[-1]
    figures = {"per_class": {"cat": 1.0}, "ece": 0.1, "ece_trained": 0.1, "ece_new": None, "images": 2}
    print_accuracy(
        SimpleNamespace(to_dict=lambda: {"mode": mode, "modes": modes, **figures}), "run on photos"
    )
    printed = capsys.readouterr().out.partition("┏")[0]
    assert " ".join(printed.split()) == title
