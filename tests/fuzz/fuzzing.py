"""Coverage-guided fuzzing of a reader: the only allowed outcomes are a right answer and a `DearError`.

Good inputs are changed a little, again and again; a change that reaches a line of `dear` not reached before
is kept and changed further. While a reader works, an audit hook watches that it starts no program, opens no
connection and writes nothing outside its own folder.
"""

from __future__ import annotations

import hashlib
import os
import random
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import mutate

import dear
from dear.errors import DearError

HOME = str(Path(dear.__file__).parent)
SLOW = 20.0  # seconds; a reader that takes longer for one small input hangs
_FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen")
_CONNECTED = ("socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True)
class Target:
    """A reader to be fuzzed.

    Attributes:
        name: what is read.
        seeds: inputs that are read rightly.
        read: reads an input, and asserts what must hold of an answer.
        change: makes a new input of one; `mutate` has some.
        words: pieces worth putting in.
    """

    name: str
    seeds: Sequence[bytes]
    read: Callable[[bytes], object]
    change: mutate.Mutator = mutate.bytes_of
    words: Sequence[bytes] = ()


@dataclass
class Result:
    """What became of the cases of one reader."""

    name: str
    cases: int = 0
    answered: int = 0
    refused: int = 0
    kept: int = 0
    lines: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


class Watch:
    """An audit hook that is on while a reader works; hooks cannot be taken away, so there is one."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in _FORBIDDEN or event in _CONNECTED:
            self.seen.append(f"{event} {args!r}"[:300])
        elif event == "open" and isinstance(args[0], str | bytes) and isinstance(args[2], int):
            path = os.path.realpath(os.fsdecode(args[0]))
            if args[2] & _WRITING and not path.startswith((self.folder, "/dev/null", "/dev/shm")):
                self.seen.append(f"writes {path}")

    @contextmanager
    def on(self, folder: Path) -> Iterator[list[str]]:
        """Collect what is forbidden; files may be written below `folder` alone."""
        self.folder, self.seen = os.path.realpath(folder), []
        try:
            yield self.seen
        finally:
            self.folder = None


@contextmanager
def lines_of_dear() -> Iterator[set[tuple[CodeType, int]]]:
    """Collects the lines of the package that are run."""
    seen: set[tuple[CodeType, int]] = set()

    def local(frame: FrameType, event: str, arg: object) -> Any:
        seen.add((frame.f_code, frame.f_lineno))
        return local

    def entered(frame: FrameType, event: str, arg: object) -> Any:
        return local(frame, event, arg) if frame.f_code.co_filename.startswith(HOME) else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        yield seen
    finally:
        sys.settrace(before)


def fuzz(target: Target, cases: int, seed: int, folder: Path, keep: Path, watch: Watch) -> Result:
    """Read `cases` inputs: the good ones first, then changes of them.

    Args:
        target: the reader.
        cases: how many.
        seed: of all changes.
        folder: the only place where files may be written.
        keep: where inputs with a forbidden outcome are kept, for `replay`.
        watch: the audit hook.
    """
    rng = random.Random(f"{seed}/{target.name}")
    pool = list(target.seeds)
    known: set[tuple[CodeType, int]] = set()
    result = Result(target.name)
    began = time.monotonic()
    for number in range(cases):
        new = number >= len(target.seeds)
        base = rng.choice(target.seeds if rng.random() < 0.4 else pool)
        data = target.change(base, rng, pool, target.words) if new else target.seeds[number]
        (folder / "current").write_bytes(data)  # what a crash of the process leaves to be looked at
        with lines_of_dear() as lines:
            fault, good = outcome(target, data, folder, watch)
        result.cases += 1
        result.answered += good
        result.refused += not good and fault is None
        if not new and not good:
            fault = fault or "a good input was refused"
        if fault is not None:
            result.failures.append(keep_input(target, data, fault, keep))
        elif lines - known and new and len(data) < 100_000:
            pool.append(data)
        known |= lines
    result.kept, result.lines = len(pool) - len(target.seeds), len(known)
    result.seconds = time.monotonic() - began
    return result


def outcome(target: Target, data: bytes, folder: Path, watch: Watch) -> tuple[str | None, bool]:
    """What is wrong with the outcome of one input (None: nothing), and whether it was answered."""
    began = time.monotonic()
    good, fault = False, None
    with watch.on(folder) as seen:
        try:
            target.read(data)
            good = True
        except DearError as error:
            if not str(error).strip():
                fault = "refused without a word"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            fault = "".join(traceback.format_exception(error))
    if seen:
        fault = f"did what no reader may: {seen[:3]}"
    if time.monotonic() - began > SLOW:
        fault = f"took {time.monotonic() - began:.0f} s"
    return fault, good and fault is None


def keep_input(target: Target, data: bytes, fault: str, keep: Path) -> str:
    """Keep an input and what it did; returns a line for people."""
    keep.mkdir(parents=True, exist_ok=True)
    path = keep / f"{target.name}-{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.write_bytes(data)
    path.with_suffix(".txt").write_text(fault, encoding="utf-8", errors="replace")
    return f"{path}: {fault.strip().splitlines()[-1][:200]}"


def limit_memory(more: int = 3 << 30) -> None:
    """Let this process take `more` bytes beyond what it has: a bomb becomes a MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))
