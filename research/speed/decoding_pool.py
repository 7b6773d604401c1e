"""Decoding processes of the service compared with `pebble.ProcessPool`, in turns in one run.

    pip install pebble
    python research/speed/decoding_pool.py --csv research/results/decoding_pool.csv

Both have the same number of processes, a memory limit and a time limit per file, and return the same pixels.
Rows say images per second, and microseconds of processor time per image of the service's process and of all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pebble
import torch
from measure.serving import jpegs

from dear.serve.decoding import Decoder, Decoding, Upload
from dear.serve.decoding.process import _limit_memory
from dear.tasks.speed import add_rows, machine

IN_FLIGHT = 32
_decoding: Decoding


def prepare(decoding: Decoding) -> None:
    """Set up a process of pebble's."""
    global _decoding  # noqa: PLW0603
    _decoding = decoding
    torch.set_num_threads(1)
    _limit_memory(decoding.limits.decode_bytes)


def pixels(content: bytes, most: int) -> bytes:
    """Decode a file in a process of pebble's."""
    return _decoding.pixels(content, most)


class Pebble:
    """`Decoder` by pebble."""

    def __init__(self, workers: int, decoding: Decoding) -> None:
        self.decoding = decoding
        context = multiprocessing.get_context("forkserver")
        self.pool = pebble.ProcessPool(workers, initializer=prepare, initargs=(decoding,), context=context)

    async def decode(self, uploads: list[Upload]) -> list[torch.Tensor]:
        """All files of a request."""
        seconds = self.decoding.limits.decode_seconds
        tasks = [
            self.pool.schedule(pixels, (one.content, max(1, one.cost.pixels)), timeout=seconds)
            for one in uploads
        ]
        contents = [await asyncio.wrap_future(task) for task in tasks]
        side = self.decoding.size if isinstance(self.decoding.size, int) else self.decoding.size.side
        return [torch.from_numpy(np.frombuffer(one, np.uint8).copy()).view(3, side, side) for one in contents]

    def close(self) -> None:
        """End the processes."""
        self.pool.stop()
        self.pool.join()


def children_seconds() -> float:
    """Processor time of all processes that this one started, and that they started."""
    ticks = os.sysconf("SC_CLK_TCK")
    parents: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / ticks)
    total, todo = 0.0, [os.getpid()]
    while todo:
        process = todo.pop()
        for pid, (parent, seconds) in parents.items():
            if parent == process:
                total += seconds
                todo.append(pid)
    return total


async def measure(decoder: Any, files: list[Upload], count: int) -> dict[str, float]:
    """Decode `count` files, some in flight."""
    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            await decoder.decode([files[number % len(files)]])

    await asyncio.gather(*(client() for _ in range(4)))  # nothing is left: the processes are warm
    numbers = iter(range(count))
    usage, children, began = resource.getrusage(resource.RUSAGE_SELF), children_seconds(), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(IN_FLIGHT)))
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    service = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    return {
        "images_per_s": round(count / wall, 1),
        "service_us": round(1e6 * service / count),
        "all_us": round(1e6 * (service + children_seconds() - children) / count),
    }


def main() -> None:
    """Measure in turns and print the best figures of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    decoding = Decoding(options.side)
    files = [Upload("a.jpg", one, decoding.cost(one)) for one in jpegs(16)]
    pools = {
        "processes of the service": Decoder(options.workers, decoding),
        "pebble": Pebble(options.workers, decoding),
    }
    best: dict[str, dict[str, float]] = {}

    async def rounds() -> None:
        for _ in range(options.rounds):
            for name, pool in pools.items():
                row = await measure(pool, files, options.count)
                print(json.dumps({"what": name, **row}), flush=True)
                before = best.setdefault(name, row)
                best[name] = {
                    key: max(value, before[key]) if key == "images_per_s" else min(value, before[key])
                    for key, value in row.items()
                }

    asyncio.run(rounds())
    for name, row in best.items():
        line = {"what": name, "workers": options.workers, "side": options.side, **row}
        print(json.dumps(line), flush=True)
        if options.csv:
            add_rows(options.csv, [{**machine(torch.device("cpu")), **line}])
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
