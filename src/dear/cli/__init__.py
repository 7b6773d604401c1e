"""The command line: one module a command group; each parses, calls and prints."""


def main() -> None:
    """Entry point of the `dear` command."""
    raise SystemExit("no commands yet")
