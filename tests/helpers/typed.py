"""A command as it is typed, run in this process."""

from __future__ import annotations

import contextlib
import io
import sys
from subprocess import CompletedProcess

from dear.cli import main


def run(*words: str) -> CompletedProcess[str]:
    """Exit status, standard output and standard error of `dear WORDS`."""
    out, err, before, status = io.StringIO(), io.StringIO(), sys.argv, 0
    sys.argv = ["dear", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        sys.argv = before
    return CompletedProcess(words, status, out.getvalue(), err.getvalue())


def dear(*words: str) -> tuple[int, str]:
    """Exit status, and what was said on standard error."""
    done = run(*words)
    return done.returncode, done.stderr
