"""Waits of others while a service is attacked: one row per attack, with and without nginx in front.

    python benchmarks/attacks_serve.py --csv benchmarks/results/serve_attacks.csv
    python benchmarks/attacks_serve.py --only pipelining chunks --seconds 5

Every row has the longest wait of `/health/live` and of a one-image request of another key while an attack
runs, next to the same without an attack (the machine may be busy), and the statuses that the attack got. All
traffic is on the loopback. nginx is used if it is installed (`apt-get install nginx-light`).
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import torch
from measure.http_load import server
from measure.serving import jpegs

import dear
from dear.tasks.speed import add_rows, machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "serve"))
from hostile import empty_webp, many_scans

VICTIM, HOSTILE, MANAGE = "the-key-of-a-victim-01", "the-key-of-an-attacker", "the-management-key-0123"
NGINX = Path(__file__).parents[1] / "examples" / "serve" / "nginx.conf"
Attack = Callable[[str, str], "Counter[str]"]


def post(address: str, path: str, count: int = 1, **request: object) -> Counter[str]:
    """Send one request `count` times at once; statuses."""
    headers = {"Authorization": f"Bearer {HOSTILE}", **dict(request.pop("headers", {}))}  # type: ignore[call-overload]

    def send(_: int) -> str:
        try:
            return str(httpx.post(f"{address}{path}", headers=headers, timeout=60, **request).status_code)  # type: ignore[arg-type]
        except httpx.TransportError as error:
            return type(error).__name__

    with ThreadPoolExecutor(count) as pool:
        return Counter(pool.map(send, range(count)))


def connections(address: str, data: bytes, count: int, seconds: float) -> Counter[str]:
    """Open connections, send data, read nothing."""
    host, port = address.removeprefix("http://").split(":")
    lines, seen = [], Counter[str]()
    for _ in range(count):
        try:
            line = socket.create_connection((host, int(port)), timeout=5)
            line.sendall(data)
            lines.append(line)
            seen["open"] += 1
        except OSError as error:
            seen[type(error).__name__] += 1
    time.sleep(seconds)
    for line in lines:
        line.close()
    return seen


def files(*contents: bytes) -> list[tuple[str, tuple[str, bytes]]]:
    return [("files", (f"{number}.jpg", content)) for number, content in enumerate(contents)]


def attacks(photo: bytes, seconds: float) -> dict[str, Attack]:
    """The attacks of the review, by name: called with the address and the path of an adapter."""
    get = b"GET /docs HTTP/1.1\r\nHost: a\r\n\r\n"
    quotes = [
        b'--x\r\nContent-Disposition: form-data; name="files"; x="' + b";" * 4000 + b'"\r\n\r\na\r\n'
    ] * 255
    form = {"content-type": "multipart/form-data; boundary=x"}
    chunked = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer " + HOSTILE.encode()
    chunked += b"\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 200_000
    many = "+" + ",".join(f"thing {n}" for n in range(400))
    segments = b"\xff\xd8" + b"\xff\xe0\x00\x02" * 2_000_000
    classify = "/v1/models/still/classify"
    return {
        "S1 one new class list at once": lambda a, p: post(
            a, classify, 8, files=files(photo), data={"classes": f"{many}, {time.monotonic()}"}
        ),
        "S2 jpeg of empty segments": lambda a, p: post(a, classify, 4, files=files(segments)),
        "S3 headers of form parts": lambda a, p: post(
            a, classify, 8, content=b"".join(quotes) + b"--x--\r\n", headers=form
        ),
        "S4 pipelining": lambda a, p: connections(a, get * 1000, 520, seconds),
        "S5 chunks of one byte": lambda a, p: connections(a, chunked, 20, seconds),
        "S6 silent connections": lambda a, p: connections(a, b"", 1100, seconds),
        "S7 listing": lambda a, p: Counter(
            httpx.get(f"{a}/v1/models", headers={"Authorization": f"Bearer {HOSTILE}"}).status_code.__str__()
            for _ in range(100)
        ),
        "S8 new class lists": lambda a, p: sum(
            (post(a, classify, 4, files=files(photo), data={"classes": f"{time.time()}"}) for _ in range(20)),
            Counter[str](),
        ),
        "S9 galleries": lambda a, p: post(a, "/v1/models/still/retrieve", 8, files=files(photo)),
        "S10 unreadable files": lambda a, p: post(a, classify, 8, files=files(*[b"no image " * 99] * 60)),
        "S12 upgrade": lambda a, p: connections(
            a, b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
            b"Content-Length: 4\r\n\r\nGET ", 64, 1.0
        ),
        "scans": lambda a, p: post(a, classify, 4, files=files(many_scans(7000, 95))),
        "pixels": lambda a, p: post(a, classify, 4, files=files(*[empty_webp(7000)] * 2)),
        "long JSON list": lambda a, p: post(
            a, classify, 4, content=b'{"images": [' + b'"",' * 4_000_000 + b'""]}',
            headers={"content-type": "application/json"},
        ),
        "base64 frames": lambda a, p: post(
            a, "/v1/embeddings", 4,
            json={"input": "data:video/jpeg;base64," + ",".join([base64.b64encode(photo).decode()] * 100)},
        ),
    }  # fmt: skip


class Probe:
    """Asks every 50 ms and keeps the longest wait."""

    def __init__(self, send: Callable[[], httpx.Response]) -> None:
        self.longest, self.failed, self._send, self._stop = 0.0, 0, send, threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self.failed += self._send().status_code != 200
            except httpx.TransportError:
                self.failed += 1
            self.longest = max(self.longest, time.monotonic() - began)
            self._stop.wait(0.05)

    def stop(self) -> None:
        """Ask no longer."""
        self._stop.set()
        self._thread.join()


def waits(address: str, photo: bytes, attack: Callable[[], Counter[str]]) -> dict[str, object]:
    """Longest waits of others while an attack runs."""
    key = {"Authorization": f"Bearer {VICTIM}"}
    classify = f"{address}/v1/models/still/classify"
    with httpx.Client(timeout=60) as one, httpx.Client(timeout=60, headers=key) as other:
        live = Probe(lambda: one.get(f"{address}/health/live"))
        victim = Probe(lambda: other.post(classify, files=files(photo)))
        try:
            statuses = attack()
        finally:
            live.stop()
            victim.stop()
    return {
        "live_s": round(live.longest, 2), "victim_s": round(victim.longest, 2),
        "failed": live.failed + victim.failed, "statuses": json.dumps(dict(statuses)),
    }  # fmt: skip


@contextmanager
def proxied(address: str) -> Iterator[str]:
    """Nginx in front of a service."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        text = NGINX.read_text().replace("DEAR;", f"{address.removeprefix('http://')};")
        text = text.replace("LISTEN", f"127.0.0.1:{port}").replace("/tmp/", f"{folder}/")
        (Path(folder) / "nginx.conf").write_text(text)
        command = ["nginx", "-c", f"{folder}/nginx.conf", "-p", folder, "-g", "daemon off;"]
        process = subprocess.Popen(command)
        try:
            for _ in range(100):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    """Attack and print a row each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="attacks whose name has one of these words")
    parser.add_argument("--seconds", type=float, default=8.0, help="that connections are held")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    photo = jpegs(1)[0]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fitted = dear.Classifier(method="zeroshot", backbone="mini", calibrate=False)
        fitted.fit("world:vehicles").save(folder / "runs" / "still")
        keys = [{"key": VICTIM, "models": ["*"], "name": "victim"}, {"key": HOSTILE, "models": ["*"]}]
        (folder / "keys.json").write_text(json.dumps({"keys": keys, "management": MANAGE}))
        command = [sys.executable, "-c", "from dear.cli import main; main()", "serve", str(folder / "runs"),
                   "--keys", str(folder / "keys.json"), "--device", "cpu", "--port"]  # fmt: skip
        address = stack.enter_context(server(command, []))
        fronts = {"none": address}
        if shutil.which("nginx"):
            fronts["nginx"] = stack.enter_context(proxied(address))
        for proxy, front in fronts.items():
            rows = {"no attack": lambda a, p: (time.sleep(options.seconds), Counter[str]())[1]}
            for name, attack in (rows | attacks(photo, options.seconds)).items():
                if options.only and not any(word in name for word in (*options.only, "no attack")):
                    continue
                row = {"attack": name, "proxy": proxy}
                row |= waits(front, photo, lambda attack=attack, front=front: attack(front, ""))  # type: ignore[misc]
                print(json.dumps(row), flush=True)
                if options.csv:
                    add_rows(options.csv, [{**machine(torch.device("cpu")), **row}])


if __name__ == "__main__":
    main()
