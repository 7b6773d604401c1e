"""`dear serve` and a plain FastAPI program with one model, both over the loopback with the same clients."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import httpx

import dear
from dear.clip.checkpoint import save_hf
from dear.heads.roles import RoleMap
from measure.http_client import form, load, processor_seconds
from measure.serving import jpegs

_SERVE = "from dear.cli import main; main()"
_PLAIN = """
import io, sys, dear, uvicorn
from fastapi import FastAPI, UploadFile
from PIL import Image
model, app = dear.Classifier.load(sys.argv[1], device=sys.argv[2]), FastAPI()
@app.get("/health/ready")
def ready(): return {}
@app.post("/v1/models/{name}/classify")
def classify(name: str, files: list[UploadFile]):
    return model.predict_proba([Image.open(io.BytesIO(one.file.read())) for one in files]).tolist()
uvicorn.run(app, port=int(sys.argv[3]), log_level="error")
"""


def compare(
    requests: int,
    loads: Sequence[int],
    adapters: Sequence[int],
    threads: Sequence[int],
    backbone: str = "mini",
    device: str = "cpu",
    images: Sequence[int] = (1,),
    clients: int = 1,
    rounds: int = 3,
) -> Iterator[dict[str, Any]]:
    """Rows per server, threads, adapters, images of a request and requests in flight.

    Both servers run and are asked in turn, `rounds` times, so that a drift of the machine meets both; rows
    are medians. An image is a JPEG of 500 x 375. The name of a shape as backbone ("ViT-B-16") means random
    weights.
    """
    files = jpegs(16)
    with tempfile.TemporaryDirectory() as name:
        runs = Path(name) / "runs"
        if backbone in dear.ClipConfig.names():
            save_hf(dear.Clip(dear.ClipConfig.named(backbone)), Path(name) / "backbone")
            backbone = str(Path(name) / "backbone")
        make_runs(runs, max(adapters), backbone, device)
        plain = [sys.executable, "-c", _PLAIN, str(runs / "run-0"), device]
        served = [sys.executable, "-c", _SERVE, "serve", str(runs), "--backbone", backbone,
                  "--device", device, "--port"]  # fmt: skip
        for used in threads:
            pids: list[int] = []
            with server(plain, pids, used) as one, server(served, pids, used) as other:
                where = {"plain FastAPI": (one, pids[0]), "dear serve": (other, pids[1])}
                asked = [("plain FastAPI", 1), *(("dear serve", count) for count in adapters)]
                for each, in_flight in product(images, loads):
                    bodies = [form([files[(n + k) % len(files)] for k in range(each)]) for n in range(16)]
                    some = max(4 * in_flight, requests // each)
                    seen: dict[tuple[str, int], list[dict[str, float]]] = {}
                    for _, (title, count) in product(range(rounds), asked):
                        names, (address, pid) = [f"run-{number}" for number in range(count)], where[title]
                        load(address, names, bodies, in_flight, in_flight, clients)
                        before = processor_seconds(pid)
                        found = load(address, names, bodies, some, in_flight, clients, warm=False)
                        taken = processor_seconds(pid) - before
                        found["processor_ms"] = 1000 * taken / found.pop("requests")
                        seen.setdefault((title, count), []).append(found)
                    for (title, count), rows in seen.items():
                        middle = {key: round(median(row[key] for row in rows), 2) for key in rows[0]}
                        yield {
                            "server": title, "threads": used, "adapters": count, "images": each,
                            "in_flight": in_flight, "images_per_s": round(middle["requests_per_s"] * each, 1),
                            **middle,
                        }  # fmt: skip


def make_runs(folder: Path, count: int, backbone: str = "mini", device: str = "cpu") -> None:
    """Run folders: one is trained shortly, the others are copies of it."""
    roles = None if backbone == "mini" else RoleMap.table2()
    classifier = dear.Classifier(
        method="dear", backbone=backbone, roles=roles, shots=1, epochs=1, device=device
    )
    folder.mkdir(parents=True)
    classifier.fit("world:vehicles").save(folder / "run-0")
    for number in range(1, count):
        shutil.copytree(folder / "run-0", folder / f"run-{number}")


@contextmanager
def server(
    command: Sequence[str], pids: list[int] | None = None, threads: int | None = None
) -> Iterator[str]:
    """Start a server on a free port, given as its last argument; it is stopped at the end.

    Its process id is put into `pids`. `threads` of its computations; None: as in this process's environment.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(Path(dear.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen([*command, str(port)], env=environment, stderr=said)
        if pids is not None:
            pids.append(process.pid)
        try:
            for _ in range(600):
                try:
                    if httpx.get(f"{address}/health/ready", timeout=2).status_code == 200:
                        break
                except httpx.TransportError:
                    if process.poll() is not None:
                        said.seek(0)
                        raise RuntimeError(f"the server stopped: {said.read().decode()[-2000:]}") from None
                    time.sleep(0.2)
            yield address
        finally:
            process.terminate()
            process.wait(60)
