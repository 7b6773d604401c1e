"""What commands print where nobody watches: progress is for terminals."""

from __future__ import annotations

import sys

import pytest

from dear.cli.printing import stages


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
