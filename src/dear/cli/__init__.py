"""The command line: one module per command group; each parses, calls and prints."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run `dear`: one line for what a user can mend, a stack trace only for our own faults."""
    try:
        from dear._io.text import shown
        from dear.cli.app import app
        from dear.cli.hints import sentence
        from dear.errors import DearError

        _show_notes()
        try:
            app()
        except DearError as error:
            print(f"dear: {shown(sentence(error))}", file=sys.stderr)
            sys.exit(error.status)
    except KeyboardInterrupt:  # while the modules are read, or a second one
        print("dear: stopped by you", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader went away: nothing to say
        sys.exit(0)


def _show_notes() -> None:
    """Print what the library's logger says, notes included, on standard error."""
    import logging

    from dear._io.text import shown

    class Printed(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print(shown(record.getMessage()), file=sys.stderr)

    log = logging.getLogger("dear")
    log.setLevel(logging.INFO)
    if not any(type(handler).__name__ == "Printed" for handler in log.handlers):
        log.addHandler(Printed())
