"""The training step of DeAR's recipe `strong` against the step of `paper`, at the same batch.

    python benchmarks/preset_step.py --device cuda

A random CLIP of the ViT-B/16 size; the steps take turns and medians count, as in step.py.
"""

from __future__ import annotations

import argparse

import torch
from measure.clock import medians
from measure.task import SpeedTask

import dear


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="ViT-B-16", choices=dear.ClipConfig.names())
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--classes", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    clip = dear.Clip(dear.ClipConfig.named(options.shape)).to(device)
    for batch in options.batch:
        steps = {
            name: SpeedTask(clip, batch, options.classes, preset=name).ours() for name in ("paper", "strong")
        }
        found = medians({name: way.run for name, way in steps.items()}, options.repeats)
        times = {name: 1000 * seconds / steps[name].count for name, seconds in found.items()}
        print(
            f"batch {batch}: paper {times['paper']:.3f} ms per step, strong {times['strong']:.3f} ms, "
            f"ratio {times['strong'] / times['paper']:.3f}"
        )


if __name__ == "__main__":
    main()
