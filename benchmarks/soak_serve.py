"""A service under load for a long time: adapters come, change and go, clients misbehave.

    nice -n 10 python benchmarks/soak_serve.py --minutes 30 --clients 8 --rate 20 --csv soak.csv

Four runs (two of DeAR, one zero-shot, one of DeAR on a corrected backbone) come, change and go. Every answer
is compared with what its adapter says alone; it must belong to a version of the adapter that was in the
folder around the request. Prints one line per half minute and ends with status 1 after a wrong answer, a lost
request, or memory that grew by more than `--most-growth` over the second half.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import torch
from measure.http_load import server
from measure.serving import jpegs

import dear
from dear._io.image_file import normalize, open_image, resize_crop
from dear.clip.correction import Correction
from dear.runs.folder import load_run
from dear.workflows.speed import add_rows, machine

_COUNTED = ("status 200", "status 404", "status 409", "status 429", "put", "removed", "broken", "misbehaved")


class Soak:
    """Runs that change, the answers they may give, and what was seen."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.store = folder / "runs", folder / "store"
        self.folder.mkdir()
        self.random, self.lock, self.stop = random.Random(seed), threading.Lock(), threading.Event()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.files = jpegs(4, 160, 120)
        self.expected: dict[str, torch.Tensor] = {}  # kind of run -> probabilities [files, C]
        self.present: dict[str, list[tuple[float, float, str]]] = {}  # adapter -> (from, to, kind)
        clip = dear.load("mini")
        size, pixels = clip.config.view, []
        for content in self.files:
            pixels.append(resize_crop(open_image(content), size))
        views = normalize(torch.stack(pixels), clip.config.mean, clip.config.std)
        width = clip.config.embed_dim
        changed = clip.corrected(Correction(torch.eye(width).roll(1, 0), torch.full((width,), 0.01)))
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
            self.expected[kind] = load_run(self.store / kind, clip).logits(views).softmax(-1)
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
        with httpx.Client(base_url=address, timeout=120) as client:
            while not self.stop.wait(pause):
                name = chance.choice(["still-a", "still-c", "still-d", *(f"moving-{n}" for n in range(6))])
                place, began = chance.randrange(len(self.files)), time.monotonic()
                files = [("files", ("a.jpg", self.files[place]))]
                try:
                    reply = client.post(f"/v1/models/{name}/classify", files=files, data={"top": "12"})
                except httpx.TransportError as error:
                    if not self.stop.is_set():
                        self.note(f"lost: {error!r}")
                    continue
                self.judge(name, place, began, reply)

    def judge(self, name: str, place: int, began: float, reply: Any) -> None:
        """Compare an answer with every run that the name stood for meanwhile."""
        self.counts[f"status {reply.status_code}"] += 1
        if reply.status_code != 200:
            fits = reply.status_code == 429 or (reply.status_code in (404, 409) and "moving" in name)
            if not fits:
                self.note(f"{name}: {reply.status_code} {reply.text[:200]}")
            return
        got = {one["name"]: one["probability"] for one in reply.json()["answers"][0]["classes"]}
        with self.lock:  # the service looks at the folder every two seconds, and may be late under load
            kinds = {k for since, to, k in self.present[name] if to > began - 30 and since < time.monotonic()}
        names = sorted(got)
        for kind in kinds:
            want = self.expected[kind][place]
            order = sorted(zip(self.classes, want.tolist(), strict=True))
            if all(abs(got[n] - p) < 1e-4 for n, p in order) and names == [n for n, _ in order]:
                return
        self.note(f"{name}: a wrong answer: {got}")

    def misbehave(self, address: str, seed: int) -> None:
        """Cut uploads, no images, huge headers, slow bytes, wrong paths."""
        chance, host, port = random.Random(seed), "127.0.0.1", int(address.rpartition(":")[2])
        while not self.stop.wait(chance.uniform(0.1, 0.6)):
            self.counts["misbehaved"] += 1
            try:
                with socket.create_connection((host, port), timeout=5) as line:
                    start = b"POST /v1/models/still-a/classify HTTP/1.1\r\nHost: x\r\n"
                    kind = chance.randrange(5)
                    if kind == 0:  # announces more than it sends, then goes away
                        line.sendall(
                            start + b"Content-Type: application/json\r\nContent-Length: 5000\r\n\r\n{"
                        )
                    elif kind == 1:
                        line.sendall(bytes(chance.randrange(256) for _ in range(200)))
                    elif kind == 2:
                        line.sendall(
                            start + b'Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{"top":-1'
                        )
                        line.recv(1000)
                    elif kind == 3:  # a whole image, but nobody waits for the answer
                        body = io.BytesIO()
                        body.write(
                            b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n'
                        )
                        body.write(self.files[0] + b"\r\n--x--\r\n")
                        head = (
                            f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {body.tell()}"
                        )
                        line.sendall(start + head.encode() + b"\r\n\r\n" + body.getvalue())
                    else:
                        for byte in start:
                            line.sendall(bytes([byte]))
                            time.sleep(0.01)
            except OSError:
                pass

    def note(self, sentence: str) -> None:
        """Keep what went wrong."""
        self.wrong.append(sentence)
        print("WRONG", sentence, flush=True)

    @property
    def classes(self) -> list[str]:
        """Class names of the runs."""
        config = json.loads((self.store / "a" / "config.json").read_text(encoding="utf-8"))
        return list(config["classes"])


def resident(pid: int) -> float:
    """Megabytes of the server's process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def main() -> None:
    """Run for some minutes and judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rate", type=float, help="requests per second at most, over all clients")
    parser.add_argument("--csv", type=Path, help="add a row per half minute to this file")
    parser.add_argument("--most-growth", type=float, default=60, help="megabytes over the second half")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        soak = Soak(Path(name))
        soak.put("still-a", "a")
        soak.put("still-c", "c")
        soak.put("still-d", "d")
        command = [sys.executable, "-c", "from dear.cli import main; main()", "serve", str(soak.folder),
                   "--adapters", "4", "--device", "cpu", "--port"]  # fmt: skip
        pids: list[int] = []
        with server(command, pids) as address:
            work = [threading.Thread(target=soak.change)]
            pause = options.clients / options.rate if options.rate else 0.0
            work += [
                threading.Thread(target=soak.ask, args=(address, n, pause)) for n in range(options.clients)
            ]
            work += [threading.Thread(target=soak.misbehave, args=(address, n)) for n in range(2)]
            for one in work:
                one.start()
            began, memory = time.monotonic(), []
            until = began + 60 * options.minutes
            while time.monotonic() < until:
                time.sleep(min(30, max(0.1, until - time.monotonic())))
                memory.append(resident(pids[0]))
                row = {"minute": round((time.monotonic() - began) / 60, 1), "megabytes": round(memory[-1], 1)}
                row |= {name: soak.counts[name] for name in _COUNTED} | {"wrong_or_lost": len(soak.wrong)}
                print(json.dumps(row), flush=True)
                if options.csv:
                    add_rows(options.csv, [{**machine(torch.device("cpu")), **row}])
            soak.stop.set()
            for one in work:
                one.join()
    growth = memory[-1] - memory[len(memory) // 2]
    print(json.dumps({"wrong": len(soak.wrong), "growth_megabytes": round(growth, 1), **soak.counts}))
    sys.exit(1 if soak.wrong or growth > options.most_growth else 0)


if __name__ == "__main__":
    main()
