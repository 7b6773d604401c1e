"""A service under attack: adapters come, change and go, three keys misbehave, a fourth must not notice.

    nice -n 10 python benchmarks/soak_serve.py --minutes 30 --clients 4 --rate 8 --csv soak.csv

Four runs (two of DeAR, one zero-shot, one of DeAR on a corrected backbone) come, change and go. Every answer
of the good key is compared with what its adapter says alone; it must belong to a version of the adapter that
was in the folder around the request, and come within `--most-wait` seconds. Meanwhile three other keys send
every hostile request that `tests/serve` knows: JPEG files of many scans, bytes that stand for gigabytes of
pixels, endless lists and headers, silent connections, floods of images and of new class names, damaged
uploads. Prints one line per half minute and ends with status 1 after a wrong, late or lost answer, a status
500 for anybody, memory that grew by more than `--most-growth` over the second half, or a stop that took
longer than its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from measure.http_load import server
from measure.serving import jpegs
from PIL import Image

import dear
from dear._io.image_file import normalize, open_image, resize_crop
from dear.clip.correction import Correction
from dear.runs.folder import load_run
from dear.workflows.speed import add_rows, machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "serve"))
from hostile import broken_zips, empty_webp, encoded, many_scans

_COUNTED = ("status 200", "status 404", "status 409", "status 429", "put", "removed", "broken", "hostile")
GOOD, MANAGE, DRAIN = "the-good-key-0123456", "the-management-key-0123", 5.0
BAD = [f"hostile-key-number-{number}" for number in range(3)]


class Soak:
    """Runs that change, the answers they may give, and what was seen."""

    def __init__(self, folder: Path, most_wait: float, seed: int = 0) -> None:
        self.most_wait, self.waits = most_wait, list[float]()
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
        own = {"Authorization": f"Bearer {GOOD}"}
        with httpx.Client(base_url=address, timeout=120, headers=own) as client:
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
                waited = time.monotonic() - began
                self.waits.append(waited)
                if waited > self.most_wait:
                    self.note(f"{name}: waited {waited:.2f} s")
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

    def attack(self, address: str, key: str) -> None:
        """Every hostile request in turn, by one key."""
        attacks = self.attacks(address, key)
        number = BAD.index(key)
        while not self.stop.wait(0.2):
            name, function = attacks[number % len(attacks)]
            number += 1
            self.counts["hostile"] += 1
            try:
                for status in function():
                    self.counts[f"{name} {status}"] += 1
                    if status == 500:
                        self.note(f"{name}: status 500")
            except (OSError, httpx.TransportError) as error:
                self.counts[f"{name} {type(error).__name__}"] += 1

    def attacks(self, address: str, key: str) -> list[tuple[str, Callable[[], Iterable[int]]]]:
        """What a hostile key does, by name; each gives the statuses of its answers."""
        own, port = {"Authorization": f"Bearer {key}"}, int(address.rpartition(":")[2])
        classify = f"{address}/v1/models/still-a/classify"
        scans, webp, large = many_scans(4000, 300), empty_webp(7000), many_scans(4000, 12)
        photo = encoded(Image.effect_noise((4000, 3000), 30).convert("RGB"), "JPEG")
        zips = list(broken_zips(self.store / "a").values())
        empty = b'{"images": [' + b'"",' * 1_000_000 + b'""]}'

        def post(kind: str | None = None, **request: Any) -> list[int]:
            headers = own if kind is None else {**own, "content-type": kind}
            return [httpx.post(classify, headers=headers, timeout=60, **request).status_code]

        def texts() -> list[int]:
            body = {"texts": ["a"] * 256}
            return [httpx.post(f"{address}/v1/embeddings", json=body, headers=own, timeout=60).status_code]

        def images(contents: Sequence[bytes]) -> list[int]:
            return post(files=[("files", (str(n), content)) for n, content in enumerate(contents)])

        def raw(*parts: bytes, wait: float = 0.0) -> list[int]:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as line:
                for part in parts:
                    line.sendall(part)
                    time.sleep(wait)
            return []

        def silent() -> list[int]:
            lines = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(150)]
            time.sleep(1)
            for line in lines:
                line.close()
            return []

        def flood() -> list[int]:
            with ThreadPoolExecutor(4) as pool:
                return [one for found in pool.map(images, [self.files * 16] * 4) for one in found]

        def uploads() -> list[int]:
            manage = {"Authorization": f"Bearer {MANAGE}"}
            target = f"{address}/v1/models/uploaded/upload"
            return [httpx.put(target, content=one, headers=manage, timeout=60).status_code for one in zips]

        def names() -> list[int]:
            new = ",".join(f"thing {random.random()}" for _ in range(1000))
            return post(files=[("files", ("a", self.files[0]))], data={"classes": new})

        path, secret = b"POST /v1/models/still-a/classify", key.encode()
        head = path + b" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + secret
        cut = head + b"\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n{"
        return [
            ("scans", lambda: images([scans] * 4)),
            ("webp", lambda: images([webp] * 64)),
            ("one webp", lambda: images([webp])),
            ("large", lambda: images([large] * 4)),
            ("photos", lambda: images([photo] * 6)),
            ("empty strings", lambda: post("application/json", content=empty)),
            ("names", names),
            ("flood", flood),
            ("silent", silent),
            ("uploads", uploads),
            ("slow header", lambda: raw(*(bytes([byte]) for byte in head), wait=0.01)),
            ("long header", lambda: raw(head, *[b"\r\nX: " + b"a" * 60_000] * 50)),
            ("cut body", lambda: raw(cut)),
            ("noise", lambda: raw(random.randbytes(200))),
            ("texts", texts),
        ]

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
    parser.add_argument("--most-wait", type=float, default=2, help="seconds of a good request")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        soak = Soak(Path(name), options.most_wait)
        for kind in "acd":
            soak.put(f"still-{kind}", kind)
        names = [(GOOD, "good"), *((key, f"hostile {n}") for n, key in enumerate(BAD))]
        entries = [{"key": key, "models": ["*"], "name": title} for key, title in names]
        keys = Path(name) / "keys.json"
        keys.write_text(json.dumps({"keys": entries, "management": MANAGE}))
        command = [sys.executable, "-c", "from dear.cli import main; main()", "serve", str(soak.folder),
                   "--keys", str(keys), "--adapters", "12", "--device", "cpu", "--drain-seconds", str(DRAIN),
                   "--port"]  # fmt: skip
        pids: list[int] = []
        with server(command, pids) as address:
            pause = options.clients / options.rate if options.rate else 0.0
            clients = [
                threading.Thread(target=soak.ask, args=(address, n, pause)) for n in range(options.clients)
            ]
            for one in clients:
                one.start()
            time.sleep(options.minutes * 6)  # a tenth of the time in peace
            peace = max(soak.waits, default=0.0)
            work = [threading.Thread(target=soak.change)]
            work += [threading.Thread(target=soak.attack, args=(address, key)) for key in BAD]
            for one in work:
                one.start()
            began, memory = time.monotonic(), []
            until = began + 54 * options.minutes
            while time.monotonic() < until:
                time.sleep(min(30, max(0.1, until - time.monotonic())))
                memory.append(resident(pids[0]))
                waits = sorted(soak.waits)
                row = {"minute": round((time.monotonic() - began) / 60, 1), "megabytes": round(memory[-1], 1)}
                row |= {
                    "p99_s": round(waits[int(0.99 * (len(waits) - 1))], 2),
                    "longest_s": round(waits[-1], 2),
                }
                row |= {name: soak.counts[name] for name in _COUNTED} | {"wrong_or_lost": len(soak.wrong)}
                print(json.dumps(row), flush=True)
                if options.csv:
                    add_rows(options.csv, [{**machine(torch.device("cpu")), **row}])
            soak.stop.set()  # hostile requests are still being answered
            stopped = time.monotonic()
            os.kill(pids[0], signal.SIGTERM)
            while Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.05)
            stop = time.monotonic() - stopped
            for one in (*clients, *work):
                one.join()
    growth = memory[-1] - memory[len(memory) // 2]
    result = {"wrong": len(soak.wrong), "growth_megabytes": round(growth, 1), "stop_s": round(stop, 1)}
    print(json.dumps({**result, "longest_s_in_peace": round(peace, 2), **dict(sorted(soak.counts.items()))}))
    sys.exit(1 if soak.wrong or growth > options.most_growth or stop > DRAIN + 3.5 else 0)


if __name__ == "__main__":
    main()
