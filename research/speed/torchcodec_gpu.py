"""JPEG on a GPU: TorchCodec compared with the decoders in use: files per second, pixels, damaged files.

    python research/speed/torchcodec_gpu.py PHOTOS --csv research/results/torchcodec_gpu.csv

PHOTOS is a folder with JPEG files; those in color and without an orientation are decoded from memory to
pixels on the GPU, in batches and in turns. In use are nvImageCodec's hardware decoder (extra `nvjpeg`) and,
where that is not installed, simplejpeg in threads. Pixels are compared with Pillow's, as stored and saved
again without subsampling of colors; damaged files (cut, or with changed bytes) are decoded in separate
processes. Needs torchcodec 0.16 or later.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path

import numpy as np
import simplejpeg
import torch
import torchcodec
from measure.script import add_options, parser_of, record
from PIL import ExifTags, Image
from torch import Tensor
from torchcodec.decoders import decode_jpeg
from torchcodec_cpu import damaged, with_pillow

from dear.images.gpu import decoder_of

Batch = Callable[[Sequence[bytes]], Sequence[Tensor | None]]
DEVICE = torch.device("cuda")


def with_torchcodec(contents: Sequence[bytes]) -> list[Tensor]:
    images = decode_jpeg(
        [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents],
        mode="RGB",
        device=DEVICE,
    )
    return [image.permute(1, 2, 0) for image in images]


def with_nvimagecodec(contents: Sequence[bytes]) -> Sequence[Tensor | None]:
    decode = decoder_of(DEVICE)
    if decode is None:
        raise RuntimeError("nvImageCodec is required, but is not installed or finds no hardware decoder")
    return decode(contents)


def with_threads(pool: ThreadPoolExecutor, contents: Sequence[bytes]) -> list[Tensor]:
    arrays = pool.map(partial(simplejpeg.decode_jpeg, colorspace="RGB"), contents)
    return [torch.from_numpy(array).to(DEVICE, non_blocking=True) for array in arrays]


def timed(decode: Batch, contents: Sequence[bytes], batch: int) -> tuple[float, float]:
    """Files per second and processor milliseconds per file."""
    torch.cuda.synchronize()
    start, processor = time.perf_counter(), time.process_time()
    for first in range(0, len(contents), batch):
        decode(contents[first : first + batch])
    torch.cuda.synchronize()
    seconds, busy = time.perf_counter() - start, time.process_time() - processor
    return len(contents) / seconds, 1000 * busy / len(contents)


def upright_color(path: Path) -> bool:
    image = Image.open(path)
    return image.mode == "RGB" and image.getexif().get(ExifTags.Base.Orientation, 1) == 1


def without_subsampling(content: bytes) -> bytes:
    out = BytesIO()
    Image.open(BytesIO(content)).save(out, "JPEG", quality=90, subsampling=0)
    return out.getvalue()


def differences(decode: Batch, contents: Sequence[bytes]) -> tuple[float, int]:
    """Share of values within 1 of Pillow's, and the largest difference."""
    values = []
    for content in contents:
        pixels = decode([content])[0]
        if pixels is not None:
            values.append(np.abs(pixels.cpu().numpy().astype(int) - with_pillow(content)).ravel())
    joined = np.concatenate(values)
    return float(np.mean(joined <= 1)), int(joined.max())


def survive(name: str, content: bytes, seed: int, cases: int, counts: SynchronizedArray[int]) -> None:
    """Decode damaged copies; counts: answers, errors, slowest in ms."""
    decode = {"TorchCodec": with_torchcodec, "nvImageCodec": with_nvimagecodec}[name]
    decode([content])
    rng = random.Random(seed)
    for _ in range(cases):
        start = time.perf_counter()
        try:
            pixels = decode([damaged(content, rng)])[0]
            torch.cuda.synchronize()
            counts[0 if pixels is not None else 1] += 1
        except Exception:
            counts[1] += 1
        counts[2] = max(counts[2], int(1000 * (time.perf_counter() - start)))


def hostile(name: str, content: bytes, cases: int) -> dict[str, int]:
    """What damaged files lead to; a process that ends otherwise is a crash, and the next one continues."""
    total = {"answers": 0, "errors": 0, "crashes": 0, "slowest_ms": 0}
    context = multiprocessing.get_context("spawn")
    part = 50
    for seed in range(cases // part):
        counts = context.Array("i", 3)
        process = context.Process(target=survive, args=(name, content, seed, part, counts))
        process.start()
        process.join(120)
        if process.is_alive():
            process.kill()
        process.join()
        total["answers"] += counts[0]
        total["errors"] += counts[1]
        total["crashes"] += process.exitcode != 0
        total["slowest_ms"] = max(total["slowest_ms"], counts[2])
    return total


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("photos", type=Path)
    add_options(parser, files=2048, batch=128, repeats=5, threads=16, cases=200, csv=Path)
    options = parser.parse_args()
    photos = [path.read_bytes() for path in sorted(options.photos.rglob("*.jpg")) if upright_color(path)]
    contents = (photos * (options.files // len(photos) + 1))[: options.files]
    ways: dict[str, Batch] = {"TorchCodec": with_torchcodec}
    if decoder_of(DEVICE) is not None:
        ways["nvImageCodec"] = with_nvimagecodec
    ways[f"simplejpeg, {options.threads} threads"] = partial(
        with_threads, ThreadPoolExecutor(options.threads)
    )
    pixels = np.mean([np.prod(Image.open(BytesIO(photo)).size) for photo in photos])
    facts = {
        "cuda": torch.version.cuda,
        "torchcodec": torchcodec.__version__,
        "photos": len(photos),
        "megapixels": round(pixels / 1e6, 3),
    }
    speeds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for decode in ways.values():
        timed(decode, contents[: 2 * options.batch], options.batch)
    for _ in range(options.repeats):
        for name, decode in ways.items():
            speeds[name].append(timed(decode, contents, options.batch))
    kinds = {"as stored": photos, "without subsampling": [without_subsampling(photo) for photo in photos]}
    rows: list[dict[str, object]] = []
    for name, decode in ways.items():
        rate, busy = (sorted(values)[options.repeats // 2] for values in zip(*speeds[name], strict=True))
        single = max(timed(decode, contents[:64], 1)[0] for _ in range(options.repeats))
        rows += [
            {
                "way": name,
                "measure": f"files per second, batches of {options.batch}",
                "value": round(rate, 1),
            },
            {"way": name, "measure": "files per second, one at a time", "value": round(single, 1)},
            {"way": name, "measure": "processor ms per file", "value": round(busy, 3)},
        ]
        for kind, files in kinds.items():
            near, largest = differences(decode, files)
            rows.append({"way": name, "measure": f"within 1 of Pillow, {kind}", "value": round(near, 5)})
            rows.append({"way": name, "measure": f"largest difference from Pillow, {kind}", "value": largest})
        if name in ("TorchCodec", "nvImageCodec"):
            for measure, value in hostile(name, photos[0], options.cases).items():
                rows.append({"way": name, "measure": f"damaged files: {measure}", "value": value})
    record(options.csv, [{**facts, **row} for row in rows], DEVICE)


if __name__ == "__main__":
    main()
