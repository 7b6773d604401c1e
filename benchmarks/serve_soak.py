"""A service under attack: adapters come, change and go, three keys misbehave, a fourth must not notice.

    python benchmarks/serve_soak.py --minutes 30 --clients 4 --rate 8 --first --csv soak.csv

Four runs (two of DeAR, one zero-shot, one of DeAR on a corrected backbone) come, change and go. Two thirds of
the requests of the good keys name classes: lists that come again, and lists that are new each second, which
several clients then ask for at once. Every answer is compared with the adapter's own; it must belong to a
version of the adapter that was in the folder around the request, and come within `--most-wait` seconds.
Meanwhile three other keys send
every hostile request that `tests/serve` knows (`measure/hostile_load.py`): JPEG files of many scans, bytes
that stand for gigabytes of pixels, endless lists and headers, silent connections, floods of images and of new
class names, damaged uploads; and decoding processes are killed. Prints one line per half minute and ends with
status 1 after a wrong, late or lost answer, a status 500 for anybody, memory that grew by more than
`--most-growth`, or a stop that took longer than its limit. Of a late answer it says
how long the server computed meanwhile, for whomever, and how long its threads waited for processors that
other programs had. With `--first` (root) all of it goes before other programs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch
from measure.hostile_load import Attackers
from measure.http_load import server
from measure.serving import jpegs

import dear
from dear.clip.correction import Correction
from dear.images.open import open_image
from dear.images.views import normalize, resize_crop
from dear.runs.folder import load_run
from dear.tasks.speed import add_rows, machine

_COUNTED = ("status 200", "status 404", "status 409", "put", "removed", "broken", "killed")
GOOD = [f"the-good-key-number-{number}" for number in range(2)]
MANAGE, DRAIN = "the-management-key-0123", 5.0
BAD = [f"hostile-key-number-{number}" for number in range(3)]
NAMES = [f"{color} {thing}" for color in ("torn", "old", "flat", "wet", "odd")
         for thing in ("boat", "cup", "door", "tree", "shoe", "lamp", "horse", "bridge", "apple", "chair",
                       "clock", "drum", "fence", "glove", "hat", "kite", "ladder", "nail", "oven", "pear",
                       "quilt", "rope", "spoon", "tent")]  # fmt: skip
SIZES = (3, 17, 33, 101)  # of the lists of classes that requests name


def class_list(chance: random.Random) -> tuple[str, ...]:
    """Classes to name in a request; every other list adds to the adapter's own."""
    names = chance.sample(NAMES, chance.choice(SIZES))
    return (f"+{names[0]}" if chance.random() < 0.5 else names[0], *names[1:])


class Soak:
    """Runs that change, the answers they may give, and what was seen."""

    def __init__(self, folder: Path, most_wait: float, seed: int = 0) -> None:
        self.most_wait = most_wait
        #: of good requests: seconds, from when to when, and whether the list of classes was new
        self.waits: list[tuple[float, float, float, str]] = []
        self.folder, self.store = folder / "runs", folder / "store"
        self.folder.mkdir()
        self.random, self.lock, self.stop = random.Random(seed), threading.Lock(), threading.Event()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.files = jpegs(4, 160, 120)
        #: kind of run -> logits [files, C] of its own classes and of NAMES; a list's are some of the columns
        self.expected: dict[str, torch.Tensor] = {}
        self.present: dict[str, list[tuple[float, float, str]]] = {}  # adapter -> (from, to, kind)
        clip = dear.load("mini")
        size, pixels = clip.config.view, []
        for content in self.files:
            pixels.append(resize_crop(open_image(content), size))
        views = normalize(torch.stack(pixels), clip.config.mean, clip.config.std)
        width = clip.config.embed_dim
        changed = clip.with_correction(Correction(torch.eye(width).roll(1, 0), torch.full((width,), 0.01)))
        kinds = {
            "a": ("dear", 1, clip),
            "b": ("dear", 2, clip),
            "c": ("zeroshot", 1, clip),
            "d": ("dear", 3, changed),
        }
        for kind, (method, number, backbone) in kinds.items():
            fitted = dear.Classifier(
                method=method, backbone=backbone, shots=1, epochs=1, seed=number, calibrate=False
            )
            fitted.fit("world:vehicles").save(self.store / kind)
            run = load_run(self.store / kind, clip)
            self.classes = list(run.classes)
            self.expected[kind] = run.with_classes((*self.classes, *NAMES)).logits(views)
        assert load_run(self.store / "d", clip).clip.correction is not None

    def put(self, name: str, kind: str) -> None:
        """Put a run into the folder, in one rename; the one of that name before it goes."""
        fresh = self.folder / f".{name}.new"
        shutil.copytree(self.store / kind, fresh)
        for path in fresh.iterdir():
            path.touch()
        self.take_away(name)
        fresh.rename(self.folder / name)
        with self.lock:
            self.present.setdefault(name, []).append((time.monotonic(), float("inf"), kind))

    def take_away(self, name: str) -> None:
        """Remove a run; the service may answer for it until it looks again."""
        if (self.folder / name).exists():
            shutil.rmtree(self.folder / name)
            with self.lock:
                since, _, kind = self.present[name][-1]
                self.present[name][-1] = (since, time.monotonic(), kind)

    def change(self) -> None:
        """Add, replace and remove runs at random."""
        names = [f"moving-{number}" for number in range(6)]
        while not self.stop.wait(self.random.uniform(0.5, 3.0)):
            name = self.random.choice(names)
            if self.random.random() < 0.25:
                self.take_away(name)
                self.counts["removed"] += 1
            elif self.random.random() < 0.15:
                self.take_away(name)
                (self.folder / name).mkdir()
                for file in ("config.json", "adapter.safetensors", "metrics.json"):
                    (self.folder / name / file).write_bytes(b"{broken")
                self.stop.wait(1)
                shutil.rmtree(self.folder / name)
                self.counts["broken"] += 1
            else:
                self.put(name, self.random.choice(["a", "b", "c", "d"]))
                self.counts["put"] += 1

    def ask(self, address: str, seed: int, pause: float = 0.0) -> None:
        """A well-behaved client; adapters called `still` must always answer."""
        chance = random.Random(seed)
        headers = {"Authorization": f"Bearer {GOOD[seed % len(GOOD)]}"}
        names = ["still-a", "still-c", "still-d", *(f"moving-{n}" for n in range(6))]
        with httpx.Client(base_url=address, timeout=120, headers=headers) as client:
            while not self.stop.wait(pause):
                place, began = chance.randrange(len(self.files)), time.monotonic()
                kind = chance.choice(("own", "old", "new"))
                same = random.Random(int(began) if kind == "new" else chance.randrange(8))
                name = (same if kind == "new" else chance).choice(names)
                classes = () if kind == "own" else class_list(same)
                data = {"top": "200", **({"classes": ",".join(classes)} if classes else {})}
                self.counts[f"{kind} classes"] += 1
                files = [("files", ("a.jpg", self.files[place]))]
                if self.stop.is_set():
                    return
                try:
                    reply = client.post(f"/v1/models/{name}/classify", files=files, data=data)
                except httpx.TransportError as error:
                    if not self.stop.is_set():
                        self.note(f"lost: {error!r}")
                    continue
                ended = time.monotonic()
                self.waits.append((ended - began, began, ended, kind))
                self.judge(name, classes, place, began, reply)

    def judge(self, name: str, classes: tuple[str, ...], place: int, began: float, reply: Any) -> None:
        """Compare an answer with every run that the name stood for meanwhile."""
        self.counts[f"status {reply.status_code}"] += 1
        if reply.status_code == 503 and self.stop.is_set():  # cut off by the drain limit
            return
        if reply.status_code != 200:
            if reply.status_code not in (404, 409) or "moving" not in name:
                self.note(f"{name}: {reply.status_code} {reply.text[:200]}")
            return
        got = {one["name"]: one["probability"] for one in reply.json()["answers"][0]["classes"]}
        with self.lock:  # the service looks at the folder every two seconds, and may be late under load
            kinds = {k for since, to, k in self.present[name] if to > began - 30 and since < time.monotonic()}
        adds = not classes or classes[0].startswith("+")
        expected = [*(self.classes if adds else ()), *(one.removeprefix("+") for one in classes)]
        columns = [[*self.classes, *NAMES].index(one) for one in expected]
        for kind in kinds:
            row = self.expected[kind][place, columns].softmax(-1).tolist()
            if sorted(got) == sorted(expected) and all(
                abs(got[one] - p) < 1e-4 for one, p in zip(expected, row, strict=True)
            ):
                return
        self.note(f"{name} on {classes[:3]}… ({len(classes)}): a wrong answer: {str(got)[:500]}")

    def kill_decoders(self, pid: int) -> None:
        """Kill a decoding process of the service now and then, as a system short of memory does."""
        while not self.stop.wait(self.random.uniform(5, 15)):
            decoders = [child for template in children(pid) for child in children(template)]
            if decoders:
                with suppress(ProcessLookupError):
                    os.kill(self.random.choice(decoders), signal.SIGKILL)
                    self.counts["killed"] += 1

    def note(self, sentence: str) -> None:
        """Keep what went wrong."""
        self.wrong.append(sentence)
        print("WRONG", sentence, flush=True)


def resident(pid: int) -> float:
    """Megabytes of the server's process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    paths = Path("/proc").glob(f"{pid}/task/*/children")
    return [int(one) for path in paths for one in path.read_text(encoding="ascii").split()]


class Processors:
    """Processor time of the server's threads, and how long they were ready while other programs had it."""

    def __init__(self, pid: int) -> None:
        self._pid, self._seen, self._stop = pid, [(time.monotonic(), 0.0, 0.0)], threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            with suppress(OSError):
                paths = Path(f"/proc/{self._pid}/task").glob("*/schedstat")
                rows = [path.read_text(encoding="ascii").split() for path in paths]
                used, waited = (sum(int(row[place]) for row in rows) / 1e9 for place in (0, 1))
                self._seen.append((time.monotonic(), used, waited))

    def between(self, since: float, until: float) -> tuple[float, float]:
        """Seconds used and waited for, over all threads."""
        before = next((one for one in reversed(self._seen) if one[0] <= since), self._seen[0])
        after = next((one for one in reversed(self._seen) if one[0] <= until), self._seen[-1])
        return after[1] - before[1], after[2] - before[2]

    def stop(self) -> None:
        """Watch no longer."""
        self._stop.set()
        self._thread.join()


def go_first() -> None:
    """Give a new session, and so all its processes, the highest priority.

    Linux shares processors between sessions first: `nice` alone decides little among sessions.
    """
    with suppress(PermissionError):  # one that a shell started as a job's leader stays in the shell's session
        os.setsid()
    os.setpriority(os.PRIO_PROCESS, 0, -20)
    with suppress(FileNotFoundError):  # processors are not shared by sessions
        Path("/proc/self/autogroup").write_text("-20", encoding="ascii")


def growth(megabytes: list[float]) -> float:
    """From the middle third to the last, by medians: what requests hold for a moment is not growth."""
    third = len(megabytes) // 3
    return round(median(megabytes[2 * third :]) - median(megabytes[third : 2 * third] or megabytes), 1)


def summary(waits: list[tuple[float, float, float, str]]) -> dict[str, float]:
    """Median, 99th percentile and longest of the waits."""
    seconds = sorted(one[0] for one in waits) or [0.0]
    at = {"p50_s": 0.5, "p99_s": 0.99, "longest_s": 1.0}
    return {name: round(seconds[int(share * (len(seconds) - 1))], 3) for name, share in at.items()}


def main() -> None:
    """Run for some minutes and judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rate", type=float, help="requests per second at most, over all clients")
    parser.add_argument("--csv", type=Path, help="add a row per half minute to this file")
    parser.add_argument(
        "--most-growth",
        type=float,
        default=60,
        help="megabytes, see `growth`",
    )
    parser.add_argument("--most-wait", type=float, default=2, help="seconds of a good request")
    parser.add_argument("--first", action="store_true", help="before all other programs of the machine")
    options = parser.parse_args()
    if options.first:
        go_first()
    with tempfile.TemporaryDirectory() as name:
        soak = Soak(Path(name), options.most_wait)
        for kind in "acd":
            soak.put(f"still-{kind}", kind)
        (soak.folder / "photos").mkdir()  # no run: no upload may take its place
        titles = {key: f"good {n}" for n, key in enumerate(GOOD)}
        titles |= {key: f"hostile {n}" for n, key in enumerate(BAD)}
        entries = [{"key": key, "models": ["*"], "name": title} for key, title in titles.items()]
        keys = Path(name) / "keys.json"
        keys.write_text(json.dumps({"keys": entries, "management": MANAGE}))
        command = [sys.executable, "-c", "from dear.cli import main; main()", "serve", str(soak.folder),
                   "--keys", str(keys), "--adapters", "12", "--device", "cpu", "--drain-seconds", str(DRAIN),
                   "--port"]  # fmt: skip
        pids: list[int] = []
        with server(command, pids) as address:
            attackers = Attackers(address, BAD, MANAGE, soak.store / "a", soak.files)
            processors = Processors(pids[0])
            result = run(soak, options, address, pids[0], attackers, processors)
            processors.stop()
    print(json.dumps(result))
    good = not soak.wrong and result["growth_megabytes"] <= options.most_growth
    sys.exit(0 if good and result["stop_s"] <= DRAIN + 3.5 else 1)


def run(
    soak: Soak,
    options: argparse.Namespace,
    address: str,
    pid: int,
    attackers: Attackers,
    processors: Processors,
) -> dict[str, Any]:
    """Ask, attack, swap and stop; prints rows and returns what was seen in all."""
    pause = options.clients / options.rate if options.rate else 0.0
    clients = [threading.Thread(target=soak.ask, args=(address, n, pause)) for n in range(options.clients)]
    for one in clients:
        one.start()
    time.sleep(options.minutes * 6)  # a tenth of the time in peace
    peace, work = summary(soak.waits), [threading.Thread(target=soak.change)]
    work.append(threading.Thread(target=soak.kill_decoders, args=(pid,)))
    for one in work:
        one.start()
    attackers.begin()
    began, memory, seen, processor = time.monotonic(), list[float](), len(soak.waits), list[float]()
    until = began + 54 * options.minutes
    while time.monotonic() < until:
        since = time.monotonic()
        time.sleep(min(30, max(0.1, until - time.monotonic())))
        memory.append(resident(pid))
        new, seen = soak.waits[seen:], len(soak.waits)
        for seconds, first, last, kind in new:
            used, others = processors.between(first, last)
            processor.append(used)
            if seconds > soak.most_wait:
                soak.note(
                    f"waited {seconds:.2f} s, in which the server computed for {used:.2f} s and its threads "
                    f"waited {others:.2f} s for processors; {kind} classes"
                )
                soak.counts["late"] += 1
                soak.counts[f"late, {kind} classes"] += 1
        row = {"minute": round((time.monotonic() - began) / 60, 1), "megabytes": round(memory[-1], 1)}
        row |= {"load": round(os.getloadavg()[0], 1), **summary(new)}
        used, others = processors.between(since, time.monotonic())
        row |= {"longest_processor_s": round(max(processor, default=0.0), 2)}
        row |= {"share_of_processors": round(used / max(used + others, 1e-9), 2)}
        own_classes = [one for one in new if one[3] == "own"]
        row |= {f"own_classes_{name}": value for name, value in summary(own_classes).items()}
        row |= {one: soak.counts[one] for one in _COUNTED} | {"wrong_late_or_lost": len(soak.wrong)}
        print(json.dumps(row), flush=True)
        if options.csv:
            where = {**machine(torch.device("cpu")), "priority": os.getpriority(os.PRIO_PROCESS, 0)}
            add_rows(options.csv, [{**where, **row}])
    soak.stop.set()  # hostile requests are still being answered
    attackers.stop()
    stopped = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.05)
    stop = time.monotonic() - stopped
    for one in (*clients, *work):
        one.join()
    hostile = attackers.end()
    for kind in [kind for kind in hostile if kind.endswith(" 500")]:
        soak.note(f"{hostile[kind]} x {kind}")
    if (soak.folder / "photos").is_dir() is False or any((soak.folder / "photos").iterdir()):
        soak.note("an upload took the place of a folder that is no run")
    return {
        "wrong_late_or_lost": len(soak.wrong), "late": soak.counts["late"], **summary(soak.waits),
        "longest_processor_s": round(max(processor, default=0.0), 2),
        "in_peace": peace, "growth_megabytes": growth(memory),
        "stop_s": round(stop, 1), **dict(sorted((soak.counts + hostile).items())),
    }  # fmt: skip


if __name__ == "__main__":
    main()
