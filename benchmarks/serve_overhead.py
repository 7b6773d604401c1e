"""Processor time of the service's Python code: towers and decoders are replaced by ready results.

    python benchmarks/serve_overhead.py                 # without HTTP, then requests of 1 and 16 images
    python benchmarks/serve_overhead.py http --images 16 --profile
    python benchmarks/serve_overhead.py http --images 1 --instead "Starlette's forms"

Rows say microseconds per request, of the whole process, of the event loop's thread and of the computing
thread: the least of some rounds, for other programs on the machine only add to it.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import itertools
import json
import logging
import os
import pstats
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from measure.http_client import form, load
from measure.serving import jpegs, make_adapters
from measure.task import roles_of
from serve_gpu import backbone, free_port, write_run
from torch import Tensor

from dear.clip.gpu import Recorder
from dear.serve import app, forms, requests
from dear.serve.batcher import Batcher
from dear.serve.connection import BoundedConnection
from dear.serve.decoding import Upload
from dear.serve.engine import Engine, ImageJob
from dear.serve.routes import router
from dear.serve.service import Service
from dear.serve.settings import ServeSettings

try:
    import uvloop
except ImportError:
    uvloop = None


def starlettes_forms() -> None:
    """Have Starlette's parser read every form."""
    requests.parse_form = lambda *values: forms._run_without_loop(forms.parse_by_starlette(*values))


def fastapis_routes() -> None:
    """Have FastAPI handle the routes that it describes."""

    def with_router(routes: list[Any], **options: Any) -> FastAPI:
        application = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, **options)
        application.include_router(router)
        return application

    app.Starlette = with_router  # type: ignore[assignment,misc]


#: what a part of the service is replaced by with `--instead`
INSTEAD = {"Starlette's forms": starlettes_forms, "FastAPI's routes": fastapis_routes}


class Known(Recorder):
    """Computes a result once, for one image, and repeats it."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Hashable, Any] = {}  # tuples of tensors

    def __call__(self, key: Hashable, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """The known result, for as many rows."""
        if key not in self._known:
            first = function(*(None if one is None else one[:1] for one in inputs))
            self._known[key] = _each(first, lambda one: one.repeat(1024, *[1] * (one.ndim - 1)))
        return _each(self._known[key], lambda one: one[: len(inputs[0])])


def _each(tensors: tuple[Tensor | None, ...], use: Callable[[Tensor], Tensor]) -> Any:
    """A tuple of the same kind, of what `use` makes of its tensors."""
    parts = (None if one is None else use(one) for one in tensors)
    return type(tensors)._make(parts) if hasattr(tensors, "_make") else tuple(parts)


class NoDecoder:
    """In the place of `Decoder`: every file is the same ready image."""

    starting = False

    def __init__(self, side: int) -> None:
        self._pixels = torch.randint(0, 256, (3, side, side), dtype=torch.uint8)

    async def decode(self, uploads: Sequence[Upload], caller: str = "") -> list[Tensor]:
        """The image, as often as files came."""
        return [self._pixels] * len(uploads)

    def close(self) -> None:
        """Nothing runs."""

    def is_stalled(self, seconds: float) -> bool:
        """Nothing waits."""
        return False


class Clocks:
    """Processor time of this process and of its threads by name."""

    def __init__(self) -> None:
        self.before = self.now()

    @staticmethod
    def now() -> dict[str, float]:
        """Seconds by name."""
        seconds = {"all": time.process_time()}
        for thread in threading.enumerate():
            if thread.ident is not None:
                seconds[thread.name] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        return seconds

    def each(self, count: int) -> dict[str, float]:
        """Microseconds per piece since the start."""
        now = self.now()
        titles = {"all": "us", "loop": "loop_us", "dear-serve-compute": "compute_us"}
        return {
            title: round(1e6 * (now[name] - self.before.get(name, 0.0)) / count, 1)
            for name, title in titles.items() if name in now
        }  # fmt: skip


def direct(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One image per request, without HTTP."""
    torch.manual_seed(0)
    clip = backbone(options.backbone)
    adapters = make_adapters(clip, options.adapters, options.classes, roles_of(clip.config))
    rankings = {adapter: adapter.ranking() for adapter in adapters}
    engine = Engine(clip, run=Known())
    side = clip.config.vision.image_size
    pixels = torch.randint(0, 256, (3, side, side), dtype=torch.uint8)
    sizes: list[int] = []
    batcher: Batcher[ImageJob, Tensor] = Batcher(
        engine.compute, options.batch, 0.004, 4096, observe=lambda images, _: sizes.append(images)
    )

    async def client(numbers: Iterator[int]) -> None:
        for number in numbers:
            adapter = adapters[number % len(adapters)]
            await batcher.compute([ImageJob(pixels, adapter, rankings[adapter])])

    async def all_clients(count: int) -> None:
        numbers = iter(range(count))
        await asyncio.gather(*(client(numbers) for _ in range(options.in_flight)))

    def go() -> None:
        run = uvloop.run if uvloop is not None else asyncio.run
        run(all_clients(4 * options.in_flight + 2 * len(adapters)))
        sizes.clear()
        count = options.requests
        with profiled(options.profile):
            clocks, began = Clocks(), time.perf_counter()
            run(all_clients(count))
            wall = time.perf_counter() - began
        rows.append({"what": "direct", "per_s": round(count / wall), **clocks.each(count),
                     "mean_batch": round(sum(sizes) / len(sizes), 1)})  # fmt: skip

    rows: list[dict[str, Any]] = []
    thread = threading.Thread(target=go, name="loop")
    thread.start()
    thread.join()
    batcher.close()
    yield min(rows, key=lambda row: row["us"])


@contextmanager
def profiled(enabled: bool) -> Iterator[None]:
    """Print what takes longest in this thread."""
    if not enabled:
        yield
        return
    profile = cProfile.Profile(time.thread_time)
    profile.enable()
    yield
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def http(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Requests over the loopback, by clients in separate processes."""
    torch.manual_seed(0)
    clip = backbone(options.backbone)
    files = jpegs(16)
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder) / "run-0", clip, options.classes)
        settings = ServeSettings(largest_batch=options.batch, longest_wait=0.0)
        service = Service(Path(folder), clip, settings, recorder=Known())
        service.decoder = NoDecoder(clip.config.vision.image_size)  # type: ignore[assignment]
        log = logging.getLogger("dear.serve")
        log.handlers, log.propagate = [logging.StreamHandler(open(os.devnull, "w"))], False  # noqa: SIM115
        log.setLevel(logging.INFO)
        if not options.no_freeze:
            gc.freeze()  # as the service does
        protocol = BoundedConnection if options.http == "bounded" else options.http
        port = free_port()
        config = uvicorn.Config(
            app.make_app(service), port=port, http=protocol, ws="none", log_config=None,
            access_log=False, loop=options.loop,
        )  # fmt: skip
        server = uvicorn.Server(config)
        loops: list[asyncio.AbstractEventLoop] = []
        started = server.startup

        async def startup(sockets: list[socket.socket] | None = None) -> None:
            loops.append(asyncio.get_running_loop())
            await started(sockets)

        server.startup = startup  # type: ignore[method-assign]
        thread = threading.Thread(target=server.run, name="loop")
        thread.start()
        while not server.started:
            time.sleep(0.02)
        for images in options.images:
            bodies = [form([files[(n + k) % 16] for k in range(images)]) for n in range(4)]
            address, count = f"http://127.0.0.1:{port}", max(64, options.requests // images // options.rounds)
            load(address, ["run-0"], bodies, 200, options.http_in_flight, 2)
            profile = cProfile.Profile(time.thread_time)
            if options.profile:
                loops[0].call_soon_threadsafe(profile.enable)
            rows = []
            for _ in range(options.rounds):
                clocks = Clocks()
                figures = load(address, ["run-0"], bodies, count, options.http_in_flight, 2, warm=False)
                rows.append({"what": "http", "images": images, **clocks.each(count), **figures})
            if options.profile:
                done = threading.Event()
                loops[0].call_soon_threadsafe(lambda p=profile, d=done: (p.disable(), d.set()))
                done.wait()
                pstats.Stats(profile).sort_stats("tottime").print_stats(60)
            yield min(rows, key=lambda row: row["us"])
        server.should_exit = True
        thread.join()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["all", "direct", "http"], nargs="?", default="all")
    parser.add_argument("--backbone", default="mini")
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--in-flight", type=int, default=256, help="without HTTP")
    parser.add_argument("--http-in-flight", type=int, default=32)
    parser.add_argument("--images", type=int, nargs="+", default=[1, 16], help="of a request over HTTP")
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--instead", choices=INSTEAD, help="a library in the place of a part of the service")
    parser.add_argument("--loop", default="auto")
    parser.add_argument("--http", default="bounded")
    parser.add_argument("--no-freeze", action="store_true")
    parser.add_argument("--switch", type=float, default=0.0005)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(options.switch)  # as the service does
    if options.instead:
        INSTEAD[options.instead]()
    kinds = {"direct": direct, "http": http}
    chosen = kinds.values() if options.what == "all" else [kinds[options.what]]
    for row in itertools.chain.from_iterable(kind(options) for kind in chosen):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
