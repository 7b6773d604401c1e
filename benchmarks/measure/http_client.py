"""Clients that send prepared requests over kept connections, in processes of their own.

They read no more of an answer than its length, so that they are not what is measured.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

BOUNDARY = b"boundary-of-a-form"  #: of `form`


def form(files: Sequence[bytes]) -> bytes:
    """A multipart body of image files."""
    parts = [
        b'--%s\r\nContent-Disposition: form-data; name="files"; filename="%d.jpg"\r\n\r\n%s\r\n'
        % (BOUNDARY, number, content)
        for number, content in enumerate(files)
    ]
    return b"".join(parts) + b"--%s--\r\n" % BOUNDARY


def load(
    address: str,
    names: Sequence[str],
    bodies: Sequence[bytes],
    requests: int,
    in_flight: int,
    clients: int,
    warm: bool = True,
    seconds: float = 3600.0,
    started: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Rate and waiting times of requests that go round over adapters and bodies, and how many they were.

    A connection sends its next request when it was answered, for so many seconds at most; the connections
    are spread over `clients` processes. With `warm` every adapter is asked twice before. `started` is called
    just before the requests that count.
    """
    clients = min(clients, in_flight)
    plan = {
        "address": address, "names": list(names), "bodies": [base64.b64encode(b).decode() for b in bodies],
        "requests": requests // clients, "in_flight": in_flight // clients, "warm": warm,
        "seconds": seconds,
    }  # fmt: skip
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", "from measure.http_client import main; main()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths},
        )
        for _ in range(clients)
    ]  # fmt: skip
    for one in running:
        assert one.stdin is not None
        one.stdin.write(json.dumps(plan) + "\n")
        one.stdin.flush()
    for one in running:  # all are warm
        assert one.stdout is not None
        one.stdout.readline()
    started()
    for one in running:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    found = [json.loads(one.communicate()[0]) for one in running]
    waited = sorted(second for one in found for second in one["seconds"])
    wall = max(one["end"] for one in found) - min(one["start"] for one in found)
    return {
        "requests": len(waited),
        "requests_per_s": round(len(waited) / wall, 2),
        "p50_ms": round(1000 * waited[len(waited) // 2], 1),
        "p99_ms": round(1000 * waited[int(0.99 * (len(waited) - 1))], 1),
    }


def processor_seconds(pid: int, children: bool = True) -> float:
    """Processor time of a process and, with `children`, of those that it started and that are there."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    if not children:
        return own
    found = [
        path.read_text(encoding="ascii").split() for path in Path(f"/proc/{pid}/task").glob("*/children")
    ]
    return own + sum(processor_seconds(int(child)) for some in found for child in some)


def main() -> None:
    """One process of clients."""
    plan = json.loads(sys.stdin.readline())
    asyncio.run(_measure(plan))


async def _measure(plan: dict[str, Any]) -> None:
    bodies = [base64.b64decode(body) for body in plan["bodies"]]
    to = urlsplit(plan["address"])
    requests = [
        b"POST /v1/models/%s/classify HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n"
        b"Content-Type: multipart/form-data; boundary=%s\r\n\r\n"
        % (name.encode(), to.netloc.encode(), len(body), BOUNDARY) + body
        for name in plan["names"] for body in bodies[: max(1, 64 // len(plan["names"]))]
    ]  # fmt: skip
    lines = [await asyncio.open_connection(to.hostname, to.port) for _ in range(plan["in_flight"])]
    if plan["warm"]:
        await _all(lines, requests, iter(range(max(2 * len(plan["names"]), plan["in_flight"]))), [])
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    seconds: list[float] = []
    start = time.time()
    until = time.monotonic() + plan["seconds"]
    numbers = itertools.takewhile(lambda _: time.monotonic() < until, range(plan["requests"]))
    await _all(lines, requests, numbers, seconds)
    print(json.dumps({"start": start, "end": time.time(), "seconds": seconds}))
    for _, writer in lines:
        writer.close()


async def _all(lines: Any, requests: Sequence[bytes], numbers: Iterator[int], seconds: list[float]) -> None:
    await asyncio.gather(*(_client(*line, requests, numbers, seconds) for line in lines))


async def _client(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, requests: Sequence[bytes],
    numbers: Iterator[int], seconds: list[float],
) -> None:  # fmt: skip
    for number in numbers:
        began = time.perf_counter()
        writer.write(requests[number % len(requests)])
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        body = await reader.readexactly(length)
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise RuntimeError(f"{head.decode()} {body[:300].decode()}")
        seconds.append(time.perf_counter() - began)
