"""How long an image takes in onnxruntime against eager PyTorch, in one run.

python benchmarks/onnx_latency.py --threads 2 --csv benchmarks/results/onnx_latency.csv

The two are measured in turns on the same pixels, so that whatever else the machine does falls on both; what
counts is the ratio. PyTorch runs its fused attention and all savings of the ordinary inference path.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import torch
from measure.clock import medians

import dear
from dear.export.onnx import export_onnx
from dear.export.runtime import OnnxModel
from dear.heads.roles import RoleMap
from dear.methods import DeAR, Method
from dear.workflows.speed import add_rows, machine


def model_named(name: str, classes: int) -> Method:
    """DeAR with random adapters on a random CLIP of that shape, or on an embedded backbone."""
    random = name in dear.ClipConfig.names()
    clip = dear.Clip(dear.ClipConfig.named(name)) if random else dear.load(name)
    heads = clip.config.vision.heads
    table2 = (clip.config.vision.layers, heads) == (12, 12)
    roles = RoleMap.table2() if table2 else RoleMap.uniform("mixed", clip.config.vision.last_third, heads)
    return DeAR(clip, [f"class {number}" for number in range(classes)], roles=roles)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["mini", "ViT-B-16"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to measure each")
    parser.add_argument("--csv", type=Path, default=None, help="append the figures to this table")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for name in options.models:
        method = model_named(name, options.classes)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            difference = export_onnx(method, path).difference
            model = OnnxModel(path, threads=options.threads)
        for batch in options.batches:
            size = method.clip.config.vision.image_size
            pixels = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))
            works = {"eager": partial(method.all_logits, pixels), "onnx": partial(model.run, pixels.numpy())}
            eager, runtime = medians(works, 5, warm_up=1, at_least=options.seconds).values()
            rows.append(
                {
                    **{name: value for name, value in machine(pixels.device).items() if name != "dear"},
                    "model": name,
                    "batch": batch,
                    "pytorch_ms": f"{1e3 * eager:.2f}",
                    "onnxruntime_ms": f"{1e3 * runtime:.2f}",
                    "onnxruntime_to_pytorch": f"{runtime / eager:.3f}",
                    "largest_difference": f"{difference:.1e}",
                }
            )
            print(
                f"{name}, batch {batch}: PyTorch {1e3 * eager:.1f} ms, onnxruntime {1e3 * runtime:.1f} ms, "
                f"ratio {runtime / eager:.2f}"
            )
    if options.csv:
        add_rows(options.csv, rows)


if __name__ == "__main__":
    main()
