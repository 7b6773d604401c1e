"""Every hostile request that `tests/serve` knows, sent by processes of their own.

In the process of the good clients they would take the interpreter from them, and their waits would be ours.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from safetensors.numpy import load, save

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
from hostile import broken_zips, empty_webp, encoded, many_scans, packed

_fork = multiprocessing.get_context("fork")


class Attackers:
    """One process per key; they begin with `begin` and hand over what they saw with `end`.

    Args:
        address: of the service.
        keys: one per process.
        management: key for uploads.
        run: a run folder to damage.
        files: good images.
    """

    def __init__(self, address: str, keys: Sequence[str], management: str, run: Path, files: list[bytes]):
        self._start, self._stop = _fork.Event(), _fork.Event()
        self._seen: Any = _fork.Queue()
        self._all = [
            _fork.Process(target=self._work, args=(number, address, key, management, run, files), daemon=True)
            for number, key in enumerate(keys)
        ]
        for one in self._all:
            one.start()

    def begin(self) -> None:
        """Attack from now on."""
        self._start.set()

    def stop(self) -> None:
        """Begin no further request."""
        self._stop.set()

    def end(self) -> Counter[str]:
        """How often each kind of request got each status, or which error."""
        self.stop()
        counts: Counter[str] = Counter()
        for _ in self._all:
            counts += self._seen.get(timeout=120)
        for one in self._all:
            one.join()
        return counts

    def _work(
        self, number: int, address: str, key: str, management: str, run: Path, files: list[bytes]
    ) -> None:
        attacks = hostile_requests(address, key, management, run, files)
        counts: Counter[str] = Counter()
        self._start.wait()
        number *= len(attacks) // len(self._all)
        while not self._stop.wait(0.2):
            name, send = attacks[number % len(attacks)]
            number += 1
            counts["hostile"] += 1
            try:
                for status in send():
                    counts[f"{name} {status}"] += 1
            except (OSError, httpx.TransportError) as error:
                counts[f"{name} {type(error).__name__}"] += 1
        self._seen.put(counts)


def hostile_requests(
    address: str, key: str, management: str, run: Path, files: Sequence[bytes]
) -> list[tuple[str, Callable[[], Iterable[int]]]]:
    """What a hostile key does, by name; each gives the statuses of its answers."""
    own, manage = {"Authorization": f"Bearer {key}"}, {"Authorization": f"Bearer {management}"}
    port = int(address.rpartition(":")[2])
    classify = f"{address}/v1/models/still-a/classify"
    scans, webp, slow = many_scans(4000, 300), empty_webp(7000), many_scans(4000, 12)
    photo = encoded(Image.effect_noise((4000, 3000), 30).convert("RGB"), "JPEG")
    zips = [*broken_zips(run).values(), packed(run, metrics_json=b"not json"), packed(run, config_json=b"{}")]
    tensors = load((run / "adapter.safetensors").read_bytes())
    huge = save({name: np.full_like(one, 3e38) for name, one in tensors.items()})
    zips.append(packed(run, adapter_safetensors=huge))
    good, long = packed(run), json.dumps({"images": ["a" * 3_000_000]}).encode()
    empty = b'{"images": [' + b'"",' * 1_000_000 + b'""]}'

    def post(kind: str | None = None, **request: Any) -> list[int]:
        headers = own if kind is None else {**own, "content-type": kind}
        return [httpx.post(classify, headers=headers, timeout=60, **request).status_code]

    def texts() -> list[int]:
        body = {"input": ["a"] * 256}
        return [httpx.post(f"{address}/v1/embeddings", json=body, headers=own, timeout=60).status_code]

    def images(contents: Sequence[bytes], **data: str) -> list[int]:
        return post(files=[("files", (str(n), content)) for n, content in enumerate(contents)], data=data)

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
            return [one for found in pool.map(images, [list(files) * 16] * 4) for one in found]

    def upload(content: bytes, name: str = "uploaded") -> int:
        target = f"{address}/v1/models/{name}/upload"
        return httpx.put(target, content=content, headers=manage, timeout=60).status_code

    def parallel() -> list[int]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(upload, [good] * 4))

    def names() -> list[int]:
        new = ",".join(f"thing {random.random()}" for _ in range(1000))
        return images(files[:1], classes=new)

    def odd() -> list[int]:
        kind = "multipart/form-data; charset={}; boundary=x"
        found = images(files[:1], top="²") + images(files[:1], top="9" * 5000)
        for charset in ("undefined", "punycode"):
            found += post(kind.format(charset), content=b"--x\r\n\r\n")
        return [*found, *post("application/json", content=b"[" * 90_000)]

    def wrong_keys() -> list[int]:
        headers = [{"Authorization": f"Bearer {key[:-1]}{n}x"} for n in range(20)]
        return [httpx.get(f"{address}/v1/models", headers=one, timeout=60).status_code for one in headers]

    head = b"POST /v1/models/still-a/classify HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + key.encode()
    cut = head + b"\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n{"
    return [
        ("scans", lambda: images([scans] * 4)),
        ("webp", lambda: images([webp] * 64)),
        ("one webp", lambda: images([webp])),
        ("slow scans", lambda: images([slow] * 4)),
        ("photos", lambda: images([photo] * 6)),
        ("empty strings", lambda: post("application/json", content=empty)),
        ("names", names),
        ("flood", flood),
        ("silent", silent),
        ("bad uploads", lambda: [upload(one) for one in zips]),
        ("folder", lambda: [upload(good, "photos")]),
        ("parallel uploads", parallel),
        ("slow header", lambda: raw(*(bytes([byte]) for byte in head), wait=0.01)),
        ("long header", lambda: raw(head, *[b"\r\nX: " + b"a" * 60_000] * 50)),
        ("cut body", lambda: raw(cut)),
        ("slow body", lambda: raw(cut, *[b" "] * 100, wait=0.02)),
        ("noise", lambda: raw(random.randbytes(200))),
        ("odd", odd),
        ("wrong keys", wrong_keys),
        ("texts", texts),
        ("json", lambda: post("application/json", content=long)),
    ]
