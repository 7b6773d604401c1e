"""Images per second from JPEG files to training views on the device: our feed and a PyTorch DataLoader.

    python benchmarks/images.py --device cuda --images 512 --csv benchmarks/results/images.csv

Files of 500 x 375 pixels that compress like photographs. Ours decodes each image once, keeps it as bytes
on the device and crops, resizes, flips and norms there; the loader does all of it with Pillow in worker
processes, in every epoch. Both give views of the same distribution. Later epochs matter most: a run has
ten.
"""

from __future__ import annotations

from pathlib import Path

from measure.images import image_rates
from measure.script import DEVICE, arguments, record

import dear


def main() -> None:
    options = arguments(__doc__, device=DEVICE, images=512, batch=16, epochs=3, workers=[8], csv=Path)
    clip = dear.Clip(dear.ClipConfig.named("ViT-B-16")).to(options.device)
    rows = image_rates(clip, options.images, options.batch, options.epochs, tuple(options.workers))
    record(options.csv, rows, options.device)


if __name__ == "__main__":
    main()
