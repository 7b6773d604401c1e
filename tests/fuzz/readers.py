"""All readers that are fuzzed, by name; each module is imported when one of its readers is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuzzing import Target

_MODULES = {
    "readers_text": (
        *("json", "role-map", "table-csv", "table-jsonl", "split-file", "name-lists", "draw", "corpus"),
        *("class-name", "template"),
    ),
    "readers_tensors": (
        *("hf-weights", "hf-config", "openclip-config", "shard-index", "torch-pickle", "torch-file"),
        *("archive-tree", "archive-file", "safetensors", "kept-moments"),
    ),
    "readers_tokenizers": ("tokenizer-pieces", "tokenizer-json", "code-config"),
    "readers_runs": (
        *("run-config", "run-roles", "adapter", "resume-state", "log", "metrics", "cell", "onnx-description"),
        "onnx-file",
    ),
    "readers_images": tuple(
        f"image-{kind}" for kind in ("jpeg", "png", "gif", "webp", "tiff", "bmp", "ppm", "avif")
    ),
}
NAMES = tuple(name for names in _MODULES.values() for name in names)

# Cases against 1 for the others: readers that build models or pages take milliseconds, training more.
SHARES = {
    **dict.fromkeys(("role-map", "class-name", "table-csv", "table-jsonl"), 1.5),
    **dict.fromkeys(("hf-weights", "hf-config", "openclip-config", "shard-index", "code-config"), 0.6),
    **dict.fromkeys(("torch-pickle", "torch-file", "archive-tree", "template", "metrics"), 0.5),
    **dict.fromkeys(("run-config", "run-roles", "adapter", "archive-file", "onnx-file"), 0.25),
    **dict.fromkeys(("cell", "resume-state"), 0.1),
}


def share(name: str) -> float:
    """How many cases a reader gets, against 1."""
    return SHARES.get(name, 1.0)


def find(name: str) -> Callable[[Path], Target]:
    """What makes the target of a reader: a function of the folder it may write in."""
    module = next(module for module, names in _MODULES.items() if name in names)
    factory: Callable[[Path], Target] = importlib.import_module(module).TARGETS[name]
    return factory
