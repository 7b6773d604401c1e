"""Many images and many classes: time and memory of the commands, each in a separate process.

`python benchmarks/load_data.py` makes a folder of 100,000 images in ten classes and one of 10,000 classes
with an image each (in a temporary folder, 0.5 GB of blocks), and runs `dear` on them. One thread.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure.script import arguments
from PIL import Image

WORDS = ("red", "green", "blue", "yellow", "pink", "white", "black", "brown", "orange", "grey")


def fill(folder: Path, classes: int, each: int) -> None:
    """Small images, every class of another color."""
    for label in range(classes):
        place = folder / (WORDS[label] if classes <= len(WORDS) else f"{WORDS[label % 10]} {label}")
        place.mkdir(parents=True)
        buffer = io.BytesIO()
        Image.new("RGB", (40, 36), (label * 37 % 256, label * 91 % 256, label * 53 % 256)).save(buffer, "PNG")
        for number in range(each):
            (place / f"{number:06}.png").write_bytes(buffer.getvalue())


def dear(title: str, *arguments: str) -> None:
    """Run a command; print its wall time and the most memory it held."""
    command = [sys.executable, "-c", "from dear.cli import main; main()", *arguments]
    began = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stderr is not None
    output, errors = child.stdout.read(), child.stderr.read()
    _, status, used = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - began
    if status != 0:
        sys.exit(f"{title} failed: {errors[-2000:]}")
    print(
        f"{title:58} {seconds:7.1f} s  {used.ru_maxrss / 1024:7.0f} MiB  {len(output):,} characters",
        flush=True,
    )


def main() -> None:
    options = arguments(__doc__, images=100_000, classes=10_000)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="dear-load-") as name:
        work = Path(name)
        many, wide = work / "many", work / "wide"
        fill(many, 10, options.images // 10)
        fill(wide, options.classes, 1)
        few = [str(path) for path in sorted(many.glob("red/*.png"))[:20]]
        dear("nothing (dear --version)", "--version")
        dear(f"data check, {options.images:,} images", "data", "check", str(many), "--json")
        dear("adapt, 1 shot of them", "adapt", "--data", str(many), "--shots", "1", "--epochs", "2",
             "--out", str(work / "run"), "--json")  # fmt: skip
        names = ",".join(f"{WORDS[n % 10]} {n}" for n in range(options.classes))
        dear(f"predict 20 images among {options.classes:,} class names", "predict", str(work / "run"), *few,
             "--classes", names, "--json")  # fmt: skip
        dear(f"data check, {options.classes:,} classes", "data", "check", str(wide), "--json")
        dear(f"zeroshot, {options.classes:,} classes, an image each", "zeroshot", "--data", str(wide),
             "--split", "all", "--json")  # fmt: skip


if __name__ == "__main__":
    main()
