"""The service under load: adapters from one to a thousand, distinct against identical, waiting times, memory.

    python benchmarks/serve.py direct --device cuda --decoders 14        # decoder, queue, engine; no HTTP
    python benchmarks/serve.py direct --device cpu --backbone mini --largest 32 --batches 32 --requests 3000
    python benchmarks/serve.py http --backbone mini --requests 300       # `dear serve` and plain FastAPI
    python benchmarks/serve.py threads --backbone mini                   # a CPU's threads and batch sizes
    python benchmarks/serve.py memory [--corrected]                      # a thousand run folders, loaded

`direct` takes a random ViT-B/16 (or `--backbone`) and DeAR adapters made on the spot, JPEG files of 500 x 375
pixels in memory, and answers every file with the probabilities of 100 classes. `http` sends the files over
the loopback. Rows are printed and added to `--csv` as they come.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure.cpu import thread_rows
from measure.folder_memory import memory_rows
from measure.http_load import compare
from measure.peft_mix import peft_batch_seconds
from measure.serving import Batching, Load, batch_seconds, jpegs, make_adapters, memory, under_load

import dear
from dear.clip.variant import matrix_dtype
from dear.heads.known_roles import known_roles, read_roles
from dear.heads.roles import RoleMap
from dear.serve.engine import Engine
from dear.tasks.speed import add_rows, machine

COLUMNS = {
    "direct": ("what", "backbone", "adapters", "batch", "in_flight", "images_per_s", "ms", "p50_ms", "p99_ms",
               "mean_batch", "megabytes"),
}  # fmt: skip

Rows = Iterator[dict[str, Any]]


def direct(options: argparse.Namespace) -> Rows:
    """Rows of the service without HTTP."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    clip, roles = _backbone(options, device)
    files = jpegs(64)
    before = memory(device)
    methods = make_adapters(clip, max(options.adapters), options.classes, roles)
    engine = Engine(clip)
    batching = Batching(options.largest, options.wait_ms / 1000, options.decoders)
    for batch in options.batches:  # the engine alone, decoded images; 1 adapter means identical ones
        chosen = [methods[:count] for count in options.adapters]
        for group, seconds in zip(chosen, batch_seconds(engine, chosen, batch, options.repeats), strict=True):
            yield {"what": "engine", "adapters": len(group), "batch": batch,
                   "images_per_s": round(batch / seconds, 1), "ms": round(1000 * seconds, 3)}  # fmt: skip
    used = round((memory(device) - before) / 1e6, 1)
    yield {"what": "memory", "adapters": len(methods), "megabytes": used}
    load = Load(options.requests, options.in_flight)
    for _ in range(2):  # twice, so that a drift of the machine shows
        for count in options.adapters:
            yield {"what": "jpeg", "adapters": count, "in_flight": load.in_flight,
                   **under_load(engine, methods[:count], files, load, batching)}  # fmt: skip
    for in_flight in options.loads:
        few = Load(max(64, min(options.requests, 40 * in_flight)), in_flight)
        yield {"what": "load", "adapters": len(methods), "in_flight": in_flight,
               **under_load(engine, methods, files, few, batching)}  # fmt: skip
    batch = options.batches[-1] if options.batches else 64
    for count in options.peft:
        dtype = matrix_dtype("auto", device)
        seconds = peft_batch_seconds(clip.config, count, batch, device, dtype, options.repeats)
        yield {"what": "peft LoRA rank 4", "adapters": count, "batch": batch,
               "images_per_s": round(batch / seconds, 1), "ms": round(1000 * seconds, 3)}  # fmt: skip


def threads(options: argparse.Namespace) -> Rows:
    """Rows of an answer's time on a CPU."""
    clip, roles = _backbone(options, torch.device("cpu"))
    yield from thread_rows(clip, roles, options.batches, options.threads, options.repeats)


def folders(options: argparse.Namespace) -> Rows:
    """Rows of the memory of run folders on `mini`, with `--corrected` each with another correction."""
    yield from memory_rows(dear.load("mini"), options.adapters, options.corrected)


def http(options: argparse.Namespace) -> Rows:
    """Rows of `dear serve` and of a plain FastAPI program, over the loopback."""
    shape = options.backbone, options.device, options.images, options.clients, options.rounds
    yield from compare(options.requests, options.loads, options.adapters, options.threads, *shape)


def _backbone(options: argparse.Namespace, device: torch.device) -> tuple[dear.Clip, RoleMap | None]:
    """The backbone and its role map; None: the paper's."""
    if options.backbone in dear.ClipConfig.names():
        return dear.Clip(dear.ClipConfig.named(options.backbone), options.backbone).to(device), None
    clip = dear.load(options.backbone, device=str(device))
    return clip, read_roles(options.roles) if options.roles else known_roles(clip)


KINDS = {"direct": direct, "http": http, "threads": threads, "memory": folders}


def main() -> None:
    """Measure, print, and add rows to a CSV file if one is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=list(KINDS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backbone", default="ViT-B-16")
    parser.add_argument("--roles", help="role map file of the backbone")
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--loads", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32, 64, 256])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--images", type=int, nargs="+", default=[1], help="of a request over HTTP")
    parser.add_argument("--clients", type=int, default=1, help="processes that send requests over HTTP")
    parser.add_argument("--rounds", type=int, default=3, help="of both servers in turn, over HTTP")
    parser.add_argument("--corrected", action="store_true", help="each run has another correction")
    parser.add_argument("--peft", type=int, nargs="*", default=[1, 10, 64])
    parser.add_argument("--largest", type=int, default=64)
    parser.add_argument("--wait-ms", type=float, default=4.0)
    parser.add_argument("--decoders", type=int, default=os.cpu_count() or 4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--csv", type=Path, help="add the rows to this file (one kind of rows)")
    options = parser.parse_args()
    where = machine(torch.device(options.device))
    for row in KINDS[options.what](options):
        print(json.dumps(row), flush=True)
        if options.csv:
            full = {"backbone": options.backbone, **row} if options.what == "direct" else row
            columns = COLUMNS.get(options.what, tuple(row))
            add_rows(options.csv, [{**where, **{name: full.get(name, "") for name in columns}}])


if __name__ == "__main__":
    main()
