"""Kills adapt, discover and bench at random moments, runs them again, and compares the results.

`python tests/faults/killing.py --kills 50` is what `make faults` runs. A case starts a command in an empty
folder, ends it at a random moment, looks whether every file it left is whole, runs the same command again and
compares what it left with what an undisturbed run leaves. Three ways to end it:

- time: SIGKILL after a random part of the time an undisturbed run takes;
- write: SIGKILL just before a random one of its file operations (open, rename, remove, folder), or with the
  first half of a file on disk;
- ctrl-c: SIGINT at a random time; the command must leave with status 130 and one line.

The children are forked from a process that has imported everything: a case takes a second, not ten.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch

torch.set_num_threads(1)

WAYS = ("time", "write", "ctrl-c")
PATIENCE = 300.0  # seconds for one run; the machine may be busy


@dataclass(frozen=True)
class Command:
    """What is run, and how to tell whether two of its results are the same."""

    name: str
    arguments: Callable[[Path, Path], list[str]]  # (data, out) -> argv
    result: Callable[[Path], dict[str, object]]  # what must agree, by file
    kept: str  # pattern of the files that a rerun continues from


@dataclass
class Counts:
    """What happened in the cases of one command and way."""

    killed: int = 0
    finished_first: int = 0
    parts_left: int = 0  # half-written temporary files that a kill left (and the rerun removed)
    continued: int = 0  # cases in which the killed run had left work to continue from
    faults: list[str] = field(default_factory=list)


def make_data(folder: Path, classes: int = 4, each: int = 10) -> Path:
    """A small folder of class folders with images of the attribute world."""
    from dear.data import open_data

    task = open_data("world:textures", "test")
    for label, name in enumerate(task.classes[:classes]):
        rows = (task.labels == label).nonzero().flatten().tolist()[:each]
        for number, row in enumerate(rows):
            path = folder / "photos" / name.replace(" ", "_") / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            task.image(row).save(path)
    words = ["red", "blue", "striped", "dotted", "round", "square", "a car", "a dog", "night", "snow"]
    tags = [
        "Color",
        "Color",
        "Texture",
        "Texture",
        "Shape",
        "Shape",
        "Object",
        "Animal",
        "Weather",
        "Weather",
    ]
    lines = "".join(f"{word}\t{tag}\n" for word, tag in zip(words, tags, strict=True))
    (folder / "words.txt").write_text(lines)
    return folder


def adapted(out: Path) -> dict[str, object]:
    run = out / "run"
    found: dict[str, object] = {p.name: p.read_bytes() for p in run.iterdir() if p.name != "metrics.json"}
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics.pop("seconds") >= 0
    assert metrics.pop("trained")
    return {**found, "metrics.json": metrics}


def discovered(out: Path) -> dict[str, object]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def benched(out: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.suffix == ".json":
            cell = json.loads(path.read_text())
            for key in ("seconds", "trained_before"):
                cell["result"].pop(key, None)
            found[name] = cell
        elif path.suffix == ".safetensors":
            tensors = safetensors.torch.load(path.read_bytes())
            found[name] = {key: tensor.numpy().tobytes() for key, tensor in tensors.items()}
        elif path.suffix == ".html":
            found[name] = "a page"  # times of training stand in it
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def _adapt(data: Path, out: Path) -> list[str]:
    words = f"adapt --data {data}/photos --shots 4 --epochs 5 --out {out}/run --resume --device cpu"
    return f"{words} --no-calibrate".split()


def _discover(data: Path, out: Path) -> list[str]:
    words = f"roles discover --images {data}/photos --split all --corpus {data}/words.txt --concepts tags"
    return f"{words} --phrases 3 --batch 1 --out {out}/roles.json --device cpu".split()


def _bench(data: Path, out: Path) -> list[str]:
    words = f"bench few-shot --datasets {data}/photos --methods zeroshot,coop,dear --seeds 1 --shots 1,2"
    return f"{words} --recipe epochs=2 --out {out} --device cpu".split()


def _ablate(data: Path, out: Path) -> list[str]:
    words = f"ablate inference --datasets {data}/photos --seeds 1,2 --shots 1 --recipe epochs=1"
    return f"{words} --out {out} --device cpu".split()


COMMANDS = {
    "adapt": Command("adapt", _adapt, adapted, "run/resume.safetensors"),
    "discover": Command("discover", _discover, discovered, ".*.resume.safetensors"),
    "bench": Command("bench", _bench, benched, "cells/*.json"),
    "ablate": Command("ablate", _ablate, benched, "cells/*.json"),
}


def whole(out: Path) -> tuple[list[str], int]:
    """Names of files that are not whole, and how many temporary ones were left."""
    broken, parts = [], 0
    for path in out.rglob("*"):
        if path.is_dir() or path.name.endswith(".lock"):
            continue
        if path.name.endswith(".part"):
            parts += 1
            continue
        content = path.read_bytes()
        try:
            if path.suffix == ".json":
                json.loads(content)
            elif path.suffix == ".jsonl":
                assert not content or content.endswith(b"\n")
                [json.loads(line) for line in content.splitlines()]
            elif path.suffix == ".safetensors":
                safetensors.torch.load(content)
            elif path.suffix == ".html":
                assert content.rstrip().endswith(b"</html>")
            else:
                assert content.endswith(b"\n")
        except Exception as error:
            broken.append(f"{path.name}: {error!r}")
    return broken, parts


def start(argv: list[str], log: Path, before: Callable[[], None] | None = None) -> int:
    """Run `dear ARGV` in a forked child; returns its process id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["dear", *argv]
        if before is not None:
            before()
        from dear.cli import main

        main()
        status = 0
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def end(pid: int, patience: float = PATIENCE) -> int:
    """Wait for a child: its exit status, or minus the signal that ended it."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGALRM  # it hung


_LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT  # whether a child has ended, without burying it
_WRITES = ("os.rename", "os.remove", "os.mkdir", "os.chmod")


def watched(out: Path, act: Callable[[], None]) -> Callable[[], None]:
    """For a child: `act` is called before every file operation that changes something below `out`."""
    root = str(out)

    def begin() -> None:
        def hook(event: str, arguments: tuple[object, ...]) -> None:
            if event == "open":
                path, _, flags = arguments
                if not isinstance(path, str) or not path.startswith(root):
                    return
                if int(flags) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):  # type: ignore[call-overload]
                    act()
            elif event in _WRITES and str(arguments[0]).startswith(root):
                act()

        sys.addaudithook(hook)
        real = os.fsync

        def fsync(handle: int) -> None:
            before = os.fstat(handle).st_size
            os.ftruncate(handle, before // 2)  # half of it is on disk …
            act()
            os.ftruncate(handle, 0)
            raise_back(handle, before)
            real(handle)

        def raise_back(handle: int, size: int) -> None:
            os.lseek(handle, 0, os.SEEK_SET)
            os.write(handle, contents.pop(handle))
            assert os.fstat(handle).st_size == size

        contents: dict[int, bytes] = {}

        def keeping(handle: int) -> None:
            os.lseek(handle, 0, os.SEEK_SET)
            with open(f"/proc/self/fd/{handle}", "rb") as file:
                contents[handle] = file.read()
            fsync(handle)

        os.fsync = keeping

    return begin


class Trial:
    """One command: its undisturbed result, how long it takes and how many file operations it makes."""

    def __init__(self, command: Command, data: Path, work: Path) -> None:
        self.command, self.data, self.out = command, data, work / command.name
        self.log = work / f"{command.name}.log"
        count = work / "operations"

        def tick() -> None:
            with open(count, "ab") as file:
                file.write(b".")

        began = time.monotonic()
        self.fresh()
        self.must_end_well(watched(self.out, tick))
        self.seconds = time.monotonic() - began
        self.expected = command.result(self.out)
        self.operations = count.stat().st_size
        count.unlink()

    @property
    def argv(self) -> list[str]:
        """The command line after `dear`."""
        return self.command.arguments(self.data, self.out)

    def fresh(self) -> None:
        """Begin with an empty folder."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)

    def run(self, before: Callable[[], None] | None = None) -> tuple[int, str]:
        """Exit status and what was said."""
        return end(start(self.argv, self.log, before)), self.log.read_text()

    def must_end_well(self, before: Callable[[], None] | None = None) -> None:
        """Run to the end."""
        status, said = self.run(before)
        assert status == 0, f"{self.command.name} left with {status}: {said[-2000:]}"

    def agrees(self) -> bool:
        """Whether the folder holds what an undisturbed run leaves."""
        return self.command.result(self.out) == self.expected

    def case(self, way: str, rng: random.Random, counts: Counts) -> None:
        """One disturbed run and its rerun."""
        self.fresh()
        if way == "write":
            left = rng.randint(1, self.operations)

            def die() -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            status = end(start(self.argv, self.log, watched(self.out, die)))
        else:
            began = time.monotonic()
            pid = start(self.argv, self.log)
            wait = rng.uniform(0.0, self.seconds)
            while time.monotonic() - began < wait and os.waitid(os.P_PID, pid, _LOOK) is None:
                time.sleep(0.002)
            took = time.monotonic() - began
            if took < wait:
                self.seconds = took  # the machine was busier when it was measured
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if way == "time" else signal.SIGINT)
            status = end(pid)
        if status == 0:
            counts.finished_first += 1
            return
        counts.killed += 1
        if way == "ctrl-c":
            said = self.log.read_text().strip()
            last = said.splitlines()[-1:]  # before it stands what the command was about to do
            if status != 130 or "Traceback" in said or not last or not last[0].startswith("dear: "):
                counts.faults.append(f"Ctrl-C: status {status}, said {said[-300:]!r}")
        elif status != -signal.SIGKILL:
            counts.faults.append(f"left with {status}: {self.log.read_text()[-300:]!r}")
        broken, parts = whole(self.out)
        counts.faults += broken
        counts.parts_left += parts
        counts.continued += any(self.out.glob(self.command.kept))
        status, said = self.run()
        if status != 0:
            counts.faults.append(f"the rerun left with {status}: {said[-300:]!r}")
            return
        found = self.command.result(self.out)
        if found != self.expected:
            wrong = [n for n in {*found, *self.expected} if found.get(n) != self.expected.get(n)]
            counts.faults.append(f"the rerun's result differs in {wrong}")


def run(names: list[str], ways: list[str], kills: int, seed: int, say: Callable[[str], None] = print) -> int:
    """Every command in every way until `kills` of each were killed; the number of faults."""
    faults = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="dear-faults-") as folder:
        work = Path(folder).resolve()
        data = make_data(work / "data")
        for name in names:
            trial = Trial(COMMANDS[name], data, work)
            say(f"{name}: undisturbed {trial.seconds:.1f} s, {trial.operations} file operations")
            for way in ways:
                rng, counts = random.Random(f"{seed}/{name}/{way}"), Counts()
                while counts.killed < kills:
                    trial.case(way, rng, counts)
                    if counts.finished_first > 3 * kills + 10:
                        counts.faults.append("it finishes before it can be killed")
                        break
                faults[name] += len(counts.faults)
                say(
                    f"{name}, {way}: {counts.killed} killed, {counts.finished_first} were done before, "
                    f"{counts.parts_left} temporary files left, {counts.continued} reruns continued work, "
                    f"{len(counts.faults)} faults"
                )
                for fault in counts.faults[:20]:
                    say(f"  {fault}")
    return sum(faults.values())


def warm_up() -> None:
    """Import what the commands import, so that forked children need not."""
    from dear.clip.factory import load

    load("mini")
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # reads a good part of PyTorch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="for each command and way")
    parser.add_argument("--commands", default="adapt,discover,bench,ablate")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    warm_up()
    faults = run(options.commands.split(","), options.ways.split(","), options.kills, options.seed, _say)
    sys.exit(1 if faults else 0)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
