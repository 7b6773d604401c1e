"""Memory of many run folders in the service's store, plain or each with a correction of its own."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dear.clip.correction import Correction
from dear.clip.model import Clip
from dear.runs.folder import write_correction
from dear.serve.engine import Engine, ImageJob
from dear.serve.store import AdapterStore
from measure.http_load import make_runs
from measure.serving import memory


def memory_rows(clip: Clip, counts: Sequence[int], corrected: bool) -> Iterator[dict[str, Any]]:
    """Megabytes of adapters that were loaded from their folders and have answered an image."""
    with tempfile.TemporaryDirectory() as name:
        runs = Path(name) / "runs"
        make_runs(runs, max(counts))
        if corrected:
            for number, run in enumerate(sorted(runs.iterdir())):
                _correct(run, clip.config.embed_dim, number)
        store = AdapterStore(runs, clip, max(counts))
        store.refresh()
        engine, before, done = Engine(clip), memory(clip.device), 0
        for count in sorted(counts):
            for first in range(done, count, 8):
                _answer(store, engine, [f"run-{n}" for n in range(first, min(first + 8, count))])
            done, used = count, (memory(clip.device) - before) / 1e6
            yield {
                "backbone": clip.name,
                "corrected": corrected,
                "adapters": count,
                "megabytes": round(used, 1),
            }


def _answer(store: AdapterStore, engine: Engine, names: Sequence[str]) -> None:
    side = engine.clip.config.vision.image_size
    blank = torch.zeros(3, side, side, dtype=torch.uint8)
    engine.compute([ImageJob(blank, store.get(name).answerer) for name in names])


def _correct(run: Path, width: int, seed: int) -> None:
    """Give a run folder a correction of its own."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.eye(width) + 0.01 * torch.randn(width, width, generator=generator)
    own = Correction(matrix, torch.zeros(width))
    write_correction(run, own)
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    config["correction"] = {"note": "", "heads": [], "digest": own.digest}
    (run / "config.json").write_text(json.dumps(config), encoding="utf-8")
