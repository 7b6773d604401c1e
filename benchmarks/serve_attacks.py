"""Waits of others while a service is attacked: one row per attack, with and without nginx in front.

    python benchmarks/serve_attacks.py --csv benchmarks/results/serve_attacks.csv
    python benchmarks/serve_attacks.py --only pipelining chunks --seconds 5

Every row has the longest wait of `/health/live` and of a one-image request of another key while an attack
runs, next to the same without an attack, the processor time of the event loop, and the statuses that the
attack got. `load` is the load average of the machine; `nice -n -10` goes before other programs (`priority`).
All traffic is on the loopback. nginx is used if it is installed (`apt-get install nginx-light`).
"""

from __future__ import annotations

import argparse
import base64
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx
import torch
from measure.http_load import server
from measure.serving import jpegs
from serve_gpu import write_run

import dear
from dear.tasks.speed import add_rows, machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from hostile import empty_webp, many_scans

VICTIM_ADDRESS, HOSTILE_ADDRESS = "127.0.0.2", "127.0.0.3"  # a proxy's limits are per address
VICTIM, HOSTILE, MANAGE = "the-key-of-a-victim-01", "the-key-of-an-attacker", "the-management-key-0123"
NGINX = Path(__file__).parents[1] / "examples" / "serve" / "nginx.conf"
Attack = Callable[[str, str], "Counter[str]"]


def post(address: str, path: str, count: int = 1, **request: object) -> Counter[str]:
    """Send one request `count` times at once; statuses."""
    headers = {"Authorization": f"Bearer {HOSTILE}", **dict(request.pop("headers", {}))}  # type: ignore[call-overload]

    def send(_: int) -> str:
        try:
            with client(HOSTILE_ADDRESS) as sender:
                return str(sender.post(f"{address}{path}", headers=headers, **request).status_code)  # type: ignore[arg-type]
        except httpx.TransportError as error:
            return type(error).__name__

    with ThreadPoolExecutor(count) as pool:
        return Counter(pool.map(send, range(count)))


def client(local_address: str) -> httpx.Client:
    """A client at one of the addresses of the loopback."""
    transport = httpx.HTTPTransport(local_address=local_address, verify=False)  # no TLS: no certificates
    return httpx.Client(timeout=60, transport=transport)


def listing(address: str, count: int, at_once: int) -> Counter[str]:
    """Ask for the list of adapters; statuses."""

    def send(_: int) -> str:
        with client(HOSTILE_ADDRESS) as sender:
            reply = sender.get(f"{address}/v1/models", headers={"Authorization": f"Bearer {HOSTILE}"})
            return str(reply.status_code)

    with ThreadPoolExecutor(at_once) as pool:
        return Counter(pool.map(send, range(count)))


def connections(address: str, data: bytes, count: int, seconds: float) -> Counter[str]:
    """Open connections, send data, read nothing."""
    host, port = address.removeprefix("http://").split(":")
    lines, seen = [], Counter[str]()
    for _ in range(count):
        try:
            line = socket.create_connection((host, int(port)), 5, (HOSTILE_ADDRESS, 0))
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
    """The attacks of the review by name, called with the address and the proxy, which names a gallery."""
    get = b"GET /docs HTTP/1.1\r\nHost: a\r\n\r\n"
    quotes = [
        b'--x\r\nContent-Disposition: form-data; name="files"; x="' + b";" * 4000 + b'"\r\n\r\na\r\n'
    ] * 255
    form = {"content-type": "multipart/form-data; boundary=x"}
    chunked = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer " + HOSTILE.encode()
    chunked += b"\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 600_000
    many = "+" + ",".join(f"thing {n}" for n in range(400))
    segments = b"\xff\xd8" + b"\xff\xe0\x00\x02" * 7_900_000
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
        "S7 listing": lambda a, p: listing(a, 200, 40),
        "S8 new class lists": lambda a, p: sum(
            (post(a, classify, 4, files=files(photo), data={"classes": f"{time.time()}"}) for _ in range(20)),
            Counter[str](),
        ),
        "S9 galleries": lambda a, p: post(
            a, "/v1/models/still/retrieve", 8, files=files(photo), data={"gallery": p}
        ),
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


def probe(url: str, photo: bytes | None, stop: Event, send: Connection) -> None:
    """Ask every 50 ms until `stop`; then send the longest wait and the number of failed requests.

    It runs in a process: threads of the attacker would wait for the interpreter's lock.
    """
    longest, failed = 0.0, 0
    key = {"Authorization": f"Bearer {VICTIM}"}
    with client(VICTIM_ADDRESS) as asker:
        while not stop.is_set():
            began = time.monotonic()
            try:
                request = {} if photo is None else {"files": files(photo), "headers": key}
                reply = asker.request("POST" if request else "GET", url, **request)  # type: ignore[arg-type]
                failed += reply.status_code != 200
            except httpx.TransportError:
                failed += 1
            longest = max(longest, time.monotonic() - began)
            stop.wait(0.05)
    send.send((longest, failed))


def loop_seconds(pid: int) -> float:
    """Processor time of the thread with the event loop of a service: its main thread."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def waits(address: str, photo: bytes, pid: int, attack: Callable[[], Counter[str]]) -> dict[str, object]:
    """Longest waits of others while an attack runs, and what the attack costs the event loop."""
    fork = multiprocessing.get_context("fork")  # nothing else runs in this process now
    targets = {f"{address}/health/live": None, f"{address}/v1/models/still/classify": photo}
    stop, probes = fork.Event(), []
    for url, content in targets.items():
        receive, send = fork.Pipe(duplex=False)
        process = fork.Process(target=probe, args=(url, content, stop, send))
        process.start()
        probes.append((process, receive))
    before, began = loop_seconds(pid), time.monotonic()
    try:
        statuses = attack()
        used, seconds = loop_seconds(pid) - before, time.monotonic() - began
    finally:
        stop.set()
    (live, live_failed), (victim, victim_failed) = [receive.recv() for _, receive in probes]
    for process, _ in probes:
        process.join()
    return {
        "priority": os.getpriority(os.PRIO_PROCESS, 0), "load": round(os.getloadavg()[0], 1),
        "live_s": round(live, 2), "victim_s": round(victim, 2),
        "failed": live_failed + victim_failed, "attack_s": round(seconds, 1), "loop_cpu_s": round(used, 2),
        "statuses": json.dumps(dict(statuses)),
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
        Path(folder).chmod(0o755)  # nginx's workers run as another user and store long bodies here
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
        large = folder / "runs" / "large-0"
        write_run(large, dear.load("mini"), classes=1000)
        for number in range(1, 100):
            shutil.copytree(large, folder / "runs" / f"large-{number}")
        keys = [{"key": VICTIM, "models": ["*"], "name": "victim"}, {"key": HOSTILE, "models": ["*"]}]
        (folder / "keys.json").write_text(json.dumps({"keys": keys, "management": MANAGE}))
        command = [sys.executable, "-c", "from dear.cli import main; main()", "serve", str(folder / "runs"),
                   "--keys", str(folder / "keys.json"), "--gallery", "none=world:vehicles",
                   "--gallery", "nginx=world:vehicles", "--device", "cpu", "--port"]  # fmt: skip
        pids: list[int] = []
        address = stack.enter_context(server(command, pids))
        fronts = {"none": address}
        if shutil.which("nginx"):
            fronts["nginx"] = stack.enter_context(proxied(address))
        for proxy, front in fronts.items():
            rows = {"no attack": lambda a, p: (time.sleep(options.seconds), Counter[str]())[1]}
            for name, attack in (rows | attacks(photo, options.seconds)).items():
                if options.only and not any(word in name for word in (*options.only, "no attack")):
                    continue
                row = {"attack": name, "proxy": proxy}
                row |= waits(
                    front,
                    photo,
                    pids[0],
                    lambda attack=attack, front=front, proxy=proxy: attack(front, proxy),
                )  # type: ignore[misc]
                print(json.dumps(row), flush=True)
                if options.csv:
                    add_rows(options.csv, [{**machine(torch.device("cpu")), **row}])


if __name__ == "__main__":
    main()
