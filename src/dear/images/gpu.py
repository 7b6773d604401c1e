"""Views of images made on a GPU: plain JPEG files are decoded and resized there, others come from the CPU.

The decoder is the hardware for it that data-center GPUs have (A100, H100, H200), by NVIDIA's nvImageCodec
where that is installed (the extra `nvjpeg`). It interpolates colors as libjpeg-turbo does, so that its pixels
are the CPU's to 1 of 255; torchvision's decoder, which does not, is up to 46 off. Resizing is Pillow's: first
across, then down, with 8 bits between.
"""

from __future__ import annotations

import importlib
import io
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dear.images.jpeg import TURNS
from dear.images.open import PlainJpeg, Source, plain_jpeg
from dear.images.views import Axis, Size, View, axes_of, side_of, view_pixels
from dear.utils.memory import keep_freed
from dear.utils.parallel import threaded

#: from the contents of files to their pixels, uint8 [height, width, 3] on the device; None: it could not
Decode = Callable[[Sequence[bytes]], Sequence[Tensor | None]]
_AT_ONCE = 128  # files that the decoder gets; while it has the next ones, these are resized
_HOST_THREADS = 4  # that read headers for it
_TRIED, _SLOW_SECONDS = 8, 1e-3  # files that are read to see whether each takes longer than this
_MOST_PIXELS = 1 << 25  # of them; 400 MB as floating-point numbers


@lru_cache(maxsize=8)
def decoder_of(device: torch.device) -> Decode | None:
    """What decodes JPEG files on a GPU; None where nvImageCodec is not installed or finds no decoder."""
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # the CPU's reader reports damaged files
    try:
        codec: Any = importlib.import_module("nvidia.nvimgcodec")
        gpu = torch.cuda.current_device() if device.index is None else device.index
        # Only the hardware: where CPU and GPU share the work, pixels are up to 3 of 255 off, and a file costs
        # as much of the CPU's time as libjpeg-turbo takes.
        decoder = codec.Decoder(
            device_id=gpu,
            max_num_cpu_threads=_HOST_THREADS,
            backends=[codec.Backend(codec.HW_GPU_ONLY)],
            options=":fancy_upsampling=1",
        )
        how = codec.DecodeParams(apply_exif_orientation=False, color_spec=codec.ColorSpec.SRGB)
        lock = threading.Lock()

        def decode(contents: Sequence[bytes]) -> list[Tensor | None]:
            files = [codec.CodeStream(content) for content in contents]
            stream = torch.cuda.current_stream(device).cuda_stream
            with lock:  # one decoder for all threads
                images = decoder.decode(files, params=how, cuda_stream=stream)
            return [None if one is None else torch.as_tensor(one, device=device) for one in images]

        keep_freed()
        return decode if _decodes(decode) else None
    except Exception:  # not installed, made for another CUDA, or without the library it needs
        return None


def _decodes(decode: Decode) -> bool:
    """Whether a decoder can decode a small JPEG file."""
    file = io.BytesIO()
    Image.new("RGB", (16, 8), (200, 100, 50)).save(file, "JPEG")
    pixels = decode([file.getvalue()])[0]
    return pixels is not None and pixels.shape == (8, 16, 3)


def device_views(sources: Sequence[Source], size: Size, device: torch.device, decode: Decode) -> Tensor:
    """The views of images, uint8 [b, 3, size, size] on a device.

    `decode` decodes plain JPEG files; the CPU decodes what it cannot, and all other files.
    They are computed on a stream of this thread and ready when the function returns.
    """
    stream = _stream(device)
    with torch.inference_mode(False), torch.cuda.stream(stream):
        views = torch.empty(len(sources), 3, side_of(size), side_of(size), dtype=torch.uint8, device=device)
        with _reading:  # two threads that read slow each other down; one decodes while another reads
            files = {place: file for place, file in enumerate(_plain_files(sources)) if file is not None}
        remaining = [place for place in range(len(sources)) if place not in files]
        for places in _portions(files):
            decoded = decode([files[place].content for place in places])
            good = {
                place: _upright(pixels, files[place].orientation)
                for place, pixels in zip(places, decoded, strict=True)
                if pixels is not None and pixels.shape == (files[place].height, files[place].width, 3)
            }
            if good:
                views[list(good)] = resized(list(good.values()), size)
            remaining += [place for place in places if place not in good]
        if remaining:
            others = np.stack(threaded(lambda place: view_pixels(sources[place], size), remaining))
            views[remaining] = torch.from_numpy(np.ascontiguousarray(others.transpose(0, 3, 1, 2))).to(device)
        if stream is not None:
            stream.synchronize()
        return views


def _plain_files(sources: Sequence[Source]) -> list[PlainJpeg | None]:
    """`plain_jpeg` of each; by several threads where files come slowly, else they get in each other's way."""
    jpegs: list[PlainJpeg | None] = []
    quickest = math.inf  # of the first few; any may have waited for another thread
    for source in sources[:_TRIED]:
        began = time.perf_counter()
        jpegs.append(plain_jpeg(source))
        quickest = min(quickest, time.perf_counter() - began)
    rest = sources[_TRIED:]
    slow = quickest > _SLOW_SECONDS
    return jpegs + (threaded(plain_jpeg, rest) if slow else [plain_jpeg(source) for source in rest])


_reading = threading.Lock()
_own = threading.local()


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    """This thread's stream for a GPU, whose short work goes before that of a model."""
    if device.type != "cuda":
        return None
    streams: dict[torch.device, torch.cuda.Stream] = _own.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device, priority=-1)
    return streams[device]


def _portions(files: dict[int, PlainJpeg]) -> Iterator[list[int]]:
    """Places of files that are decoded together: images of like sizes, as many as memory holds."""
    some: list[int] = []
    longest = 0  # side; images may be turned
    sizes = {place: (file.width * file.height, file.width) for place, file in files.items()}
    for place in sorted(files, key=sizes.__getitem__):
        side = max(files[place].width, files[place].height)
        longest = max(longest, side)
        if len(some) == _AT_ONCE or (some and (len(some) + 1) * longest**2 > _MOST_PIXELS):
            yield some
            some, longest = [], side
        some.append(place)
    if some:
        yield some


def _upright(pixels: Tensor, orientation: int) -> Tensor:
    """[height, width, 3] upright, by EXIF's number."""
    mirrored, transposed = TURNS.get(orientation, ((), False))
    upright = pixels.flip(mirrored) if mirrored else pixels
    return upright.transpose(0, 1) if transposed else upright


def resized(images: Sequence[Tensor], size: Size) -> Tensor:
    """The views of images uint8 [height, width, 3] of any sizes, uint8 [b, 3, size, size] on their device."""
    device, side = images[0].device, side_of(size)
    height, width = (max(image.shape[axis] for image in images) for axis in (0, 1))
    padded = torch.empty(len(images), 3, height, width, dtype=torch.uint8, device=device)
    start = 0
    for (rows, columns, _), some in groupby(images, key=lambda image: image.shape):
        together = torch.stack(list(some)).permute(0, 3, 1, 2)
        padded[start : start + len(together), :, :rows, :columns] = together
        start += len(together)
    bilinear = isinstance(size, View) and size.bilinear
    axes = [axes_of(image.shape[1], image.shape[0], size) for image in images]
    across = _weights([one for one, _ in axes], width, side, bilinear, device)  # [b, S, w]
    down = _weights([one for _, one in axes], height, side, bilinear, device)  # [b, S, h]
    with torch.autocast(device.type, enabled=False):  # mixed precision would round the weights
        narrow = to_steps(torch.bmm(padded.float().flatten(1, 2), across.transpose(1, 2)))  # [b, 3h, S]
        square = to_steps(torch.matmul(down[:, None], narrow.view(len(images), 3, height, side)))
    return square.to(torch.uint8)


def _weights(axes: Sequence[Axis], extent: int, side: int, bilinear: bool, device: torch.device) -> Tensor:
    """Weights [b, side, extent] of each image; those of images of one size are computed once."""
    kinds = {axis: number for number, axis in enumerate(dict.fromkeys(axes))}
    numbers = [(one.start, one.length, one.resized, one.first) for one in kinds]
    start, length, new, first = torch.tensor(numbers, dtype=torch.float64).to(device).unbind(1)
    weights = resampling(start, length, extent, side, new, first, bilinear).float()
    if len(kinds) == 1:
        return weights.expand(len(axes), -1, -1)
    return weights[torch.tensor([kinds[axis] for axis in axes], device=device)]


def to_steps(values: Tensor) -> Tensor:
    """Rounded in place to whole steps of 255, half up as in Pillow, and clipped where the filter overshot."""
    return values.add_(0.5).floor_().clamp_(0, 255)


def resampling(
    start: Tensor,
    length: Tensor,
    extent: int,
    size: int,
    resized: Tensor | None = None,
    first: Tensor | None = None,
    bilinear: bool = False,
) -> Tensor:
    """Weights [B, size, extent] that resize `length` [B] pixels from `start` [B] on, bicubic, antialiased.

    The pixels are resized to `resized` [B], of which those from `first` [B] on are wanted; by default to
    `size`, all of them. `extent` counts the pixels of the whole axis; rows sum to 1 and are 0 outside the
    stretch.
    """
    device = start.device
    step = (length / (size if resized is None else resized))[:, None, None]  # source pixels a result pixel
    spread = step.clamp(min=1)  # the filter widens when images shrink: antialiasing
    source = torch.arange(extent, device=device)[None, None, :] - start[:, None, None]  # [B, 1, n]
    rows = torch.arange(size, device=device)[None, :, None]
    if first is not None:
        rows = rows + first[:, None, None]
    center = (rows + 0.5) * step  # [B, S, 1]
    distance = ((source + 0.5 - center) / spread).abs()
    weights = (1 - distance).clamp(min=0) if bilinear else _cubic(distance)  # [B, S, n]
    weights = weights * ((source >= 0) & (source < length[:, None, None]))
    return weights / weights.sum(-1, keepdim=True)


def _cubic(x: Tensor, a: float = -0.5) -> Tensor:
    """Keys' cubic convolution kernel of a distance, zero beyond 2."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
