"""The service under load: adapters from one to a thousand, distinct against identical, waiting times, memory.

    python benchmarks/serve.py direct --device cuda --decoders 14        # decoder, queue, engine; no HTTP
    python benchmarks/serve.py direct --device cpu --backbone mini --adapters 1 10 100 --requests 400
    python benchmarks/serve.py http --requests 300                       # `dear serve` beside plain FastAPI
    python benchmarks/serve.py draft                                     # JPEG decoding at a reduced scale

`direct` takes a random ViT-B/16 and DeAR adapters made on the spot, JPEG files of 500 x 375 pixels in memory,
and answers every file with the probabilities of 100 classes. `http` sends the files over the loopback.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from measure.draft import draft_effect
from measure.peft_mix import peft_batch_seconds
from measure.serving import Batching, Load, batch_seconds, jpegs, make_adapters, memory, under_load

import dear
from dear.serve.engine import Engine
from dear.train.precision import choose
from dear.workflows.speed import add_rows, machine


def direct(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the service without HTTP."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    clip = _backbone(options.backbone, device)
    roles = None
    if clip.config.vision.layers != 12:
        from dear.heads.known import known_roles

        roles = known_roles(clip)
    files = jpegs(64)
    before = memory(device)
    methods = make_adapters(clip, max(options.adapters), options.classes, roles)
    engine = Engine(clip)
    batching = Batching(options.largest, options.wait_ms / 1000, options.decoders)
    rows: list[dict[str, Any]] = []

    def add(what: str, **figures: Any) -> None:
        row = {"what": what, **figures}
        print(json.dumps(row), flush=True)
        rows.append(row)

    for batch in options.batches:  # the engine alone, decoded images
        for count in options.adapters:
            seconds = batch_seconds(engine, methods[:count], batch, options.repeats)
            add("engine", adapters=count, batch=batch, images_per_s=round(batch / seconds, 1),
                ms=round(1000 * seconds, 3))  # fmt: skip
    add("memory", adapters=len(methods), megabytes=round((memory(device) - before) / 1e6, 1))
    load = Load(options.requests, options.in_flight)
    for _ in range(2):  # twice, so that a drift of the machine shows
        for count in options.adapters:
            add("jpeg", adapters=count, in_flight=load.in_flight,
                **under_load(engine, methods[:count], files, load, batching))  # fmt: skip
    for in_flight in options.loads:
        few = Load(max(64, min(options.requests, 40 * in_flight)), in_flight)
        add("load", adapters=len(methods), in_flight=in_flight,
            **under_load(engine, methods, files, few, batching))  # fmt: skip
    for count in options.peft:
        dtype = choose("auto", device)
        found = peft_batch_seconds(clip.config, count, 64, device, dtype, options.repeats)
        if found is None:
            add("peft", adapters=count, images_per_s=None)
            break
        add("peft", adapters=count, batch=64, images_per_s=round(64 / found, 1), ms=round(1000 * found, 3))
    return rows


def draft(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the effect of reduced decoding on features."""
    from dear.data.open import open_data

    clip = dear.load("mini")
    images = open_data("world:mixed", "test")
    chosen = [images.image(number) for number in range(0, len(images), max(1, len(images) // 64))][:64]
    rows = draft_effect(clip, chosen, options.sides)
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def http(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of `dear serve` and of a plain FastAPI program, over the loopback."""
    from measure.http_load import compare

    rows = compare(options.requests, options.in_flight, options.adapters)
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def _backbone(name: str, device: torch.device) -> dear.Clip:
    if name in dear.ClipConfig.names():
        return dear.Clip(dear.ClipConfig.named(name)).to(device)
    return dear.load(name, device=str(device))


def main() -> None:
    """Measure, print, and add rows to a CSV file if one is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["direct", "http", "draft"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backbone", default="ViT-B-16")
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--loads", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32, 64, 256])
    parser.add_argument("--peft", type=int, nargs="*", default=[1, 10, 64])
    parser.add_argument("--largest", type=int, default=256)
    parser.add_argument("--wait-ms", type=float, default=4.0)
    parser.add_argument("--decoders", type=int, default=os.cpu_count() or 4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sides", type=int, nargs="*", default=[256, 512, 1024, 2048])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--csv", type=Path, help="add the rows to this file (one kind of rows)")
    options = parser.parse_args()
    rows = {"direct": direct, "http": http, "draft": draft}[options.what](options)
    where = machine(torch.device(options.device))
    if options.json:
        options.json.write_text(json.dumps({"machine": where, "rows": rows}, indent=1), encoding="utf-8")
    if options.csv:
        add_rows(options.csv, [{**where, **row} for row in rows])


if __name__ == "__main__":
    main()
