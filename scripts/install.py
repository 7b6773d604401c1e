#!/usr/bin/env python3
"""Install packages with pip and print which ones and how many remain; pip's warnings are left out.

    .venv/bin/python scripts/install.py --constraint constraints.txt --editable ".[dev]"

The arguments are those of `pip install`. The exit status is pip's; if it fails, its last lines are printed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = re.compile(
    r"(?:Downloading|Using cached|Processing) \S*?([^/\s]+\.whl)(?:\.metadata)?(?: \(([\d.]+ [MG]B)\))?"
)


def locked(path: Path = ROOT / "requirements-dev.txt") -> int:
    """Number of packages in the lock file: about what an installation from nothing needs."""
    return len(re.findall(r"^\S+==", path.read_text(), re.MULTILINE)) if path.is_file() else 0


class Lines:
    """Turns pip's lines into progress: a line per resolved package, then the number to be installed."""

    def __init__(self, expected: int) -> None:
        self.expected, self.names = expected, set[str]()
        self.total = 0  # packages to install, once pip has said so

    def __call__(self, line: str) -> str | None:
        """What to print for a line of pip, if anything."""
        if line.startswith("Installing collected packages: "):
            self.total = line.count(",") + 1
            return f"  unpacking {self.total} packages"
        if line.startswith("ERROR"):
            return line
        if (match := FILE.search(line)) is None:
            return None
        name, version, *_ = match[1].split("-")
        if name in self.names:
            return None
        self.names.add(name)
        size = f" ({match[2]})" if match[2] else ""
        return f"  {len(self.names):3} of about {max(self.expected, len(self.names))}: {name} {version}{size}"


def watch(lines: Lines, stop: threading.Event, show: Callable[[str], None], seconds: float = 5.0) -> None:
    """Every few seconds, print how many packages have been unpacked."""
    site = Path(sysconfig.get_paths()["purelib"])
    before = shown = 0
    while not stop.wait(seconds):
        present = sum(1 for _ in site.glob("*.dist-info"))
        if not lines.total:
            before = present
        elif shown < (count := min(present - before, lines.total)):
            shown = count
            show(f"  unpacked {shown} of {lines.total}")


def main(arguments: list[str]) -> int:
    """Run pip."""
    lines, stop, last = Lines(locked()), threading.Event(), deque[str](maxlen=20)

    def show(text: str) -> None:
        print(text, flush=True)

    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-color"]
    pip = subprocess.Popen(
        [*command, "--progress-bar", "off", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    watcher = threading.Thread(target=watch, args=(lines, stop, show), daemon=True)
    watcher.start()
    assert pip.stdout is not None
    for raw in pip.stdout:
        line = raw.strip()
        last.append(line)
        if (text := lines(line)) is not None:
            show(text)
    status = pip.wait()
    stop.set()
    watcher.join()
    show("\n".join(last) if status else "  done")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
