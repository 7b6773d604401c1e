"""TorchCodec's image decoders compared with the ones in use: files per second, pixels, damaged files.

    OMP_NUM_THREADS=1 python research/speed/torchcodec_cpu.py PHOTOS --csv torchcodec_images.csv

PHOTOS is a folder with JPEG files. They are saved in each format by Pillow and decoded from memory to RGB by
one thread, in turns, in processor time. Damaged files (cut, or with changed bytes) are decoded in separate
processes. Needs torchcodec 0.16 or later, a PyTorch that its wheel can load, and pillow-heif for HEIC.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import multiprocessing
import platform
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import simplejpeg
import torch
import torchcodec
from PIL import Image
from torchcodec import decoders

Decode = Callable[[bytes], np.ndarray]


def with_pillow(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def with_simplejpeg(content: bytes) -> np.ndarray:
    return simplejpeg.decode_jpeg(content, colorspace="RGB")


def with_torchcodec(name: str) -> Decode:
    decode = getattr(decoders, f"decode_{name}")

    def pixels(content: bytes) -> np.ndarray:
        tensor = decode(torch.frombuffer(bytearray(content), dtype=torch.uint8), mode="RGB")
        return tensor.movedim(-3, -1).numpy()

    return pixels


#: format -> the decoder in use, and how Pillow saves it
FORMATS: dict[str, tuple[str, Decode, dict[str, object]]] = {
    "jpeg": ("simplejpeg", with_simplejpeg, {"quality": 90}),
    "png": ("Pillow", with_pillow, {}),
    "webp": ("Pillow", with_pillow, {"quality": 90}),
    "avif": ("Pillow", with_pillow, {"quality": 80}),
    "gif": ("Pillow", with_pillow, {}),
    "heic": ("pillow-heif", with_pillow, {"quality": 80}),
}


def saved(image: Image.Image, name: str) -> bytes:
    out = io.BytesIO()
    image.save(out, "HEIF" if name == "heic" else name.upper(), **FORMATS[name][2])
    return out.getvalue()


def rate(decode: Decode, contents: list[bytes]) -> float:
    start = time.process_time()
    for content in contents:
        decode(content)
    return len(contents) / (time.process_time() - start)


def damaged(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    if rng.random() < 0.3:
        return bytes(changed[: rng.randrange(1, len(changed))])
    # half of the changes hit the header
    for _ in range(rng.randrange(1, 12)):
        end = min(len(changed), 200) if rng.random() < 0.5 else len(changed)
        changed[rng.randrange(end)] = rng.randrange(256)
    return bytes(changed)


def survive(decode: Decode, content: bytes, seed: int, cases: int, counts: multiprocessing.Array) -> None:
    """Decode damaged copies; counts: answers, errors, slowest in ms, peak memory in MB."""
    rng = random.Random(seed)
    for _ in range(cases):
        start = time.process_time()
        try:
            decode(damaged(content, rng))
            counts[0] += 1
        except Exception:
            counts[1] += 1
        counts[2] = max(counts[2], int(1000 * (time.process_time() - start)))
    counts[3] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def hostile(decode: Decode, content: bytes, cases: int) -> dict[str, int]:
    """What damaged files lead to; a process that ends otherwise is a crash, and the next one continues."""
    total = {"answers": 0, "errors": 0, "crashes": 0, "slowest_ms": 0, "peak_mb": 0}
    context = multiprocessing.get_context("fork")
    part = 20
    for seed in range(cases // part):
        counts = context.Array("i", 4)
        process = context.Process(target=survive, args=(decode, content, seed, part, counts))
        process.start()
        process.join()
        total["answers"] += counts[0]
        total["errors"] += counts[1]
        total["crashes"] += process.exitcode != 0
        total["slowest_ms"] = max(total["slowest_ms"], counts[2])
        total["peak_mb"] = max(total["peak_mb"], counts[3])
    return total


def main() -> None:
    from pillow_heif import register_heif_opener

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", type=Path)
    parser.add_argument("--files", type=int, default=40)
    parser.add_argument("--cases", type=int, default=400, help="damaged files per format and decoder")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    register_heif_opener()
    torch.set_num_threads(1)
    images = [
        Image.open(path).convert("RGB") for path in sorted(options.photos.rglob("*.jpg"))[: options.files]
    ]
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "torchcodec": torchcodec.__version__,
    }
    rows = []
    for name, (reference, decode, _) in FORMATS.items():
        contents = [saved(image, name) for image in images]
        by_torchcodec = with_torchcodec(name)
        differences = np.concatenate(
            [np.abs(by_torchcodec(c).astype(int) - with_pillow(c)).ravel() for c in contents]
        )
        pairs = [(rate(decode, contents), rate(by_torchcodec, contents)) for _ in range(5)]
        ours, codec = (sorted(values)[2] for values in zip(*pairs, strict=True))
        for way, one, speed in ((reference, decode, ours), ("TorchCodec", by_torchcodec, codec)):
            counted = hostile(one, contents[0], options.cases)
            row = {**facts, "format": name, "way": way, "files_per_second": round(speed, 1)}
            row["within_1_of_pillow"] = float(np.mean(differences <= 1)) if way == "TorchCodec" else 1.0
            row["largest_difference"] = int(differences.max()) if way == "TorchCodec" else 0
            rows.append({**row, **counted})
            print(rows[-1], flush=True)
    if options.csv:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
