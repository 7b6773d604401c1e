"""The service on a GPU in a minute: HTTP, engine, adapters and service, each row as soon as it is known.

    python benchmarks/serve_gpu.py --csv serve_gpu.csv        # within a minute on an H200
    python benchmarks/serve_gpu.py --device cpu --backbone mini --adapters 20 --batches 1 8 --in-flight 8

A random ViT-B/16, DeAR adapters of 100 classes made on the spot, JPEG files of 500 x 375 pixels. The two
servers (the service, and plain FastAPI with the same model) are separate processes, with the same random
weights, and get ready while adapters are made here; HTTP comes first when they are, so that it has its time.
Rows of HTTP say the processor time of a request in the server's process alone (`server_ms`), its decoders not
included. Every stage stops at its deadline; one that fails is printed and left out.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import uvicorn
from fastapi import FastAPI, UploadFile
from measure.http_client import BOUNDARY, form, load, processor_seconds
from measure.serving import Batching, Load, batch_seconds, jpegs, make_adapters, memory, under_load
from measure.task import roles_of
from PIL import Image

import dear
from dear.methods import DeAR
from dear.runs.model import Model
from dear.runs.spec import Spec, plain, roles_digest
from dear.serve import server as serving
from dear.serve.decoding.worker import Template
from dear.serve.engine import Answerer, Engine, ImageJob
from dear.serve.service import Service
from dear.serve.settings import ServeSettings
from dear.tasks.speed import add_rows, machine

COLUMNS = ("what", "backbone", "server", "adapters", "batch", "images", "in_flight", "images_per_s",
           "requests_per_s", "ms", "p50_ms", "p99_ms", "mean_batch", "of_engine", "megabytes",
           "server_ms")  # fmt: skip
Rows = Iterator[dict[str, Any]]
_NAME = "run-0"
_HTTP_SECONDS = 20.0  # for six measurements, starts of clients included


def _age() -> float:
    """Seconds that this process is old: imports take their share of the time."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


_BEGAN = time.monotonic() - _age()


class Measuring:
    """What the stages share."""

    def __init__(self, options: argparse.Namespace, clip: dear.Clip, servers: dict[str, Server]) -> None:
        self.options, self.clip, self.servers = options, clip, servers
        self.device, self.files = clip.device, jpegs(64)
        self.batching = Batching(*ServeSettings().batching(self.device.type),
                                 ServeSettings().decoding(self.device.type))  # fmt: skip
        self.engine = Engine(clip)
        self.adapters: list[Answerer] = []
        self.best = 0.0  # images per second of the engine

    def make(self) -> Rows:
        """Adapters with their texts encoded, as many as there is time for."""
        began, before = time.monotonic(), memory(self.device)
        until = _BEGAN + 0.4 * self.options.seconds
        count, classes = self.options.adapters, self.options.classes
        seconds = until - 0.4 * (until - began)
        waiting = make_adapters(self.clip, count, classes, roles_of(self.clip.config), seconds)
        side = self.clip.config.vision.image_size
        blank = torch.zeros(3, side, side, dtype=torch.uint8)
        while waiting and (len(self.adapters) < 64 or time.monotonic() < until):
            some, waiting = waiting[:32], waiting[32:]
            self.engine.compute([ImageJob(blank, one) for one in some])
            self.adapters += some
        milliseconds, more = 1000 * (time.monotonic() - began), (memory(self.device) - before) / 1e6
        yield {"what": "adapters made", "adapters": len(self.adapters), "ms": milliseconds, "megabytes": more}

    def run_engine(self) -> Rows:
        """Decoded images in; with one adapter all images of a batch have the same."""
        for batch in self.options.batches:
            repeats = max(5, min(40, 480 // batch))
            groups = [self.adapters[:1], self.adapters]
            for group, seconds in zip(
                groups, batch_seconds(self.engine, groups, batch, repeats, 1.5), strict=True
            ):
                self.best = max(self.best, batch / seconds)
                yield {"what": "engine", "adapters": len(group), "batch": batch,
                       "images_per_s": batch / seconds, "ms": 1000 * seconds}  # fmt: skip

    def run_service(self) -> Rows:
        """JPEG files in, answers out, without HTTP: many in flight, then one alone."""
        for in_flight, seconds in ((self.options.in_flight, 3.0), (1, 1.5)):
            requests = Load(10**6, in_flight, seconds)
            figures = under_load(self.engine, self.adapters, self.files, requests, self.batching)
            if self.best:
                figures["of_engine"] = figures["images_per_s"] / self.best
            yield {"what": "service", "adapters": len(self.adapters), "in_flight": in_flight, **figures}

    def wait_for_servers(self) -> Rows:
        """Until both answer an image; not for longer than leaves HTTP its time."""
        body = form(self.files[:1])
        for title, server in self.servers.items():
            while self.left > _HTTP_SECONDS:
                with suppress(OSError):
                    server.ask(body)
                    break
                time.sleep(0.1)
            else:
                raise TimeoutError(f"{title} has not started yet")
        yield {"what": "servers ready", "ms": 1000 * (time.monotonic() - _BEGAN)}

    def run_http(self) -> Rows:
        """Requests of one image and of 16, both servers in turn."""
        seconds = min(_HTTP_SECONDS, self.left) / 6 / 2  # the other half is for the start of clients
        for images, in_flight in ((1, 1), (1, 32), (16, 16)):
            bodies = [form([self.files[(n + k) % 64] for k in range(images)]) for n in range(4)]
            for title, server in self.servers.items():
                if self.left < 1:
                    raise TimeoutError(f"{title}, {images} images: no time was left")
                used = Stopwatch(server.pid)
                figures = load(
                    server.address, [_NAME], bodies, 10**6, in_flight, 4, seconds=seconds, started=used.start
                )
                each = 1000 * used.seconds() / figures.pop("requests")
                row = {"what": "http", "server": title, "images": images, "in_flight": in_flight, **figures}
                rate = images * figures["requests_per_s"]
                yield {**row, "adapters": 1, "images_per_s": rate, "server_ms": each}

    @property
    def left(self) -> float:
        """Seconds until all must be over."""
        return self.options.seconds - (time.monotonic() - _BEGAN)


class Stopwatch:
    """Processor time of a process alone, without those that it started."""

    def __init__(self, pid: int) -> None:
        self.pid, self._before = pid, 0.0

    def start(self) -> None:
        """From now on."""
        self._before = processor_seconds(self.pid, children=False)

    def seconds(self) -> float:
        """Since the start."""
        return processor_seconds(self.pid, children=False) - self._before


class Server(NamedTuple):
    """A server that runs."""

    port: int
    pid: int

    @property
    def address(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def ask(self, body: bytes) -> None:
        """Send a form, and wait for its answer."""
        kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY.decode()}"}
        request = urllib.request.Request(f"{self.address}/v1/models/{_NAME}/classify", body, kind)
        urllib.request.urlopen(request, timeout=10).read()


def serve_dear(name: str, device: str, runs: Path, port: int, switch_seconds: float | None) -> None:
    """The service, as `dear serve` starts it."""
    if device != "cpu":
        torch.set_num_threads(1)
    if switch_seconds is not None:
        serving.SWITCH_SECONDS = switch_seconds
    serving.run_server(Service(runs, backbone(name).to(device), ServeSettings()), "127.0.0.1", port)


def serve_plain(name: str, device: str, runs: Path, port: int, _: float | None) -> None:
    """The same model in a few lines of FastAPI."""
    model, app = Model.load(runs / _NAME, backbone(name).to(device)), FastAPI()

    @app.get("/health/live")
    def live() -> dict[str, str]:
        return {}

    @app.post("/v1/models/{name}/classify")
    def classify(name: str, files: list[UploadFile]) -> list[Any]:
        images = [Image.open(io.BytesIO(one.file.read())) for one in files]
        answers: list[Any] = model.probabilities(images).tolist()
        return answers

    uvicorn.run(app, port=port, log_level="error")


def backbone(name: str) -> dear.Clip:
    """Random weights of a shape, or the backbone of a name."""
    torch.manual_seed(0)
    named = name in dear.ClipConfig.names()
    return dear.Clip(dear.ClipConfig.named(name), name) if named else dear.load(name)


def write_run(folder: Path, clip: dear.Clip, classes: int) -> None:
    """A run folder of an adapter that was not trained."""
    roles = roles_of(clip.config)
    method = DeAR(clip, [f"class {number}" for number in range(classes)], roles=roles)
    spec = Spec(
        options=plain(msgspec.to_builtins(method.config)), classes=method.classes, template=method.template,
        backbone=clip.name, identity=clip.identity, fingerprint=clip.fingerprint,
        roles_digest=roles_digest(roles),
    )  # fmt: skip
    Model(method, spec=spec).save(folder)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def kill_children() -> None:
    """End all processes that this one has started: servers, clients, decoders."""
    for path in Path("/proc/self/task").glob("*/children"):
        for child in path.read_text(encoding="ascii").split():
            os.kill(int(child), signal.SIGKILL)


def run_stages(measuring: Measuring, write: Callable[[dict[str, Any]], None]) -> None:
    """All stages in turn; one that fails is printed and left out."""
    for stage in (measuring.make, measuring.wait_for_servers, measuring.run_http, measuring.run_engine,
                  measuring.run_service):  # fmt: skip
        try:
            for row in stage():
                write(row)
        except Exception as error:
            traceback.print_exc()
            print(f"left out: {stage.__name__}: {error!r}", flush=True)


def main() -> None:
    """Measure, print, and add rows to a CSV file if one is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backbone", default="ViT-B-16")
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--in-flight", type=int, default=256, help="of the service without HTTP")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--seconds", type=float, default=60, help="for everything, imports included")
    parser.add_argument(
        "--switch-seconds", type=float, help="the interpreter's switch interval in the service"
    )
    parser.add_argument("--csv", type=Path, help="add the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    clip = backbone(options.backbone)
    ports = {"plain FastAPI": free_port(), "dear serve": free_port()}
    spawn = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU that this one has seen
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder) / _NAME, clip, options.classes)
        servers = [
            spawn.Process(
                target=serve,
                args=(options.backbone, options.device, Path(folder), port, options.switch_seconds),
            )
            for serve, port in zip((serve_plain, serve_dear), ports.values(), strict=True)
        ]
        for server in servers:
            server.start()

        def give_up() -> None:
            print("left out: the rest; the time is over", flush=True)
            kill_children()
            os._exit(0)

        watch = threading.Timer(options.seconds + 1 - (time.monotonic() - _BEGAN), give_up)
        watch.daemon = True
        watch.start()
        try:
            Template.running()  # gets ready meanwhile
            clip = clip.to(options.device)
            where = {**machine(clip.device), "backbone": options.backbone}

            def write(row: dict[str, Any]) -> None:
                row = {
                    key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()
                }
                print(f"{time.monotonic() - _BEGAN:5.1f} s {json.dumps(row)}", flush=True)
                if options.csv:
                    full = {name: {**where, **row}.get(name, "") for name in (*where, *COLUMNS)}
                    add_rows(options.csv, [full])

            running = {title: Server(port, one.pid or 0)
                       for (title, port), one in zip(ports.items(), servers, strict=True)}  # fmt: skip
            run_stages(Measuring(options, clip, running), write)
        finally:
            kill_children()
    sys.stdout.flush()
    os._exit(0)  # a thread of the engine may still hang


if __name__ == "__main__":
    main()
