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
from dear.images.open import ImageLike, PlainJpeg, plain_jpeg
from dear.images.resample_tensors import resampling_weights, round_to_bytes
from dear.images.views import Axis, Size, View, axes_of, side_of, view_pixels
from dear.utils.memory import reuse_freed_memory
from dear.utils.parallel import map_threads

#: contents of files -> their pixels, uint8 [height, width, 3] on the device; None where decoding failed
Decode = Callable[[Sequence[bytes]], Sequence[Tensor | None]]
_DECODED_AT_ONCE = 128  # files per call of the decoder, which decodes the next ones while these are resized
_HOST_THREADS = 4  # threads that read headers for the decoder
_TIMED_FILES, _SLOW_SECONDS = 8, 1e-3  # files whose reading is timed, and the time that counts as slow
_MOST_PIXELS = 1 << 25  # per call of the decoder; 400 MB as floating-point numbers


@lru_cache(maxsize=8)
def decoder_of(device: torch.device) -> Decode | None:
    """A decoder of JPEG files on a GPU; None where nvImageCodec is not installed or finds no hardware."""
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
        parameters = codec.DecodeParams(apply_exif_orientation=False, color_spec=codec.ColorSpec.SRGB)
        lock = threading.Lock()

        def decode(contents: Sequence[bytes]) -> list[Tensor | None]:
            files = [codec.CodeStream(content) for content in contents]
            stream = torch.cuda.current_stream(device).cuda_stream
            with lock:  # one decoder for all threads
                images = decoder.decode(files, params=parameters, cuda_stream=stream)
            return [None if image is None else torch.as_tensor(image, device=device) for image in images]

        reuse_freed_memory()
        return decode if _can_decode(decode) else None
    except Exception:  # not installed, made for another CUDA, or without the library it needs
        return None


def _can_decode(decode: Decode) -> bool:
    """Whether a decoder can decode a small JPEG file."""
    file = io.BytesIO()
    Image.new("RGB", (16, 8), (200, 100, 50)).save(file, "JPEG")
    pixels = decode([file.getvalue()])[0]
    return pixels is not None and pixels.shape == (8, 16, 3)


def device_views(sources: Sequence[ImageLike], size: Size, device: torch.device, decode: Decode) -> Tensor:
    """The views of images, uint8 [b, 3, size, size] on a device.

    `decode` decodes plain JPEG files; the CPU decodes all others, and those that it cannot.
    The views are computed on a stream of this thread, and complete when the function returns.
    """
    stream = _stream(device)
    with torch.inference_mode(False), torch.cuda.stream(stream):
        views = torch.empty(len(sources), 3, side_of(size), side_of(size), dtype=torch.uint8, device=device)
        with _read_lock:  # one thread reads while another decodes; two that read would slow each other down
            files = {index: file for index, file in enumerate(_read_plain_files(sources)) if file is not None}
        rest = [index for index in range(len(sources)) if index not in files]
        for indices in _group_by_size(files):
            decoded = decode([files[index].content for index in indices])
            on_device = {
                index: _rotate_upright(pixels, files[index].orientation)
                for index, pixels in zip(indices, decoded, strict=True)
                if pixels is not None and pixels.shape == (files[index].height, files[index].width, 3)
            }
            if on_device:
                views[list(on_device)] = resize_images(list(on_device.values()), size)
            rest += [index for index in indices if index not in on_device]
        if rest:
            others = np.stack(map_threads(lambda index: view_pixels(sources[index], size), rest))
            views[rest] = torch.from_numpy(np.ascontiguousarray(others.transpose(0, 3, 1, 2))).to(device)
        if stream is not None:
            stream.synchronize()
        return views


def _read_plain_files(sources: Sequence[ImageLike]) -> list[PlainJpeg | None]:
    """`plain_jpeg` of each; by several threads where reading is slow, otherwise they block each other."""
    jpegs: list[PlainJpeg | None] = []
    quickest = math.inf  # of the first few files; some may have waited for another thread
    for source in sources[:_TIMED_FILES]:
        start = time.perf_counter()
        jpegs.append(plain_jpeg(source))
        quickest = min(quickest, time.perf_counter() - start)
    rest = sources[_TIMED_FILES:]
    slow = quickest > _SLOW_SECONDS
    return jpegs + (map_threads(plain_jpeg, rest) if slow else [plain_jpeg(source) for source in rest])


_read_lock = threading.Lock()
_thread = threading.local()


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream of this thread on a GPU; its short work has priority over that of a model."""
    if device.type != "cuda":
        return None
    streams: dict[torch.device, torch.cuda.Stream] = _thread.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device, priority=-1)
    return streams[device]


def _group_by_size(files: dict[int, PlainJpeg]) -> Iterator[list[int]]:
    """Indices of files that are decoded together: images of similar size, within a limit of memory."""
    batch: list[int] = []
    longest = 0  # side; images may be rotated
    sizes = {index: (file.width * file.height, file.width) for index, file in files.items()}
    for index in sorted(files, key=sizes.__getitem__):
        side = max(files[index].width, files[index].height)
        longest = max(longest, side)
        if len(batch) == _DECODED_AT_ONCE or (batch and (len(batch) + 1) * longest**2 > _MOST_PIXELS):
            yield batch
            batch, longest = [], side
        batch.append(index)
    if batch:
        yield batch


def _rotate_upright(pixels: Tensor, orientation: int) -> Tensor:
    """[height, width, 3] rotated upright, by EXIF's number."""
    mirrored, transposed = TURNS.get(orientation, ((), False))
    upright = pixels.flip(mirrored) if mirrored else pixels
    return upright.transpose(0, 1) if transposed else upright


def resize_images(images: Sequence[Tensor], size: Size) -> Tensor:
    """The views of images uint8 [height, width, 3] of any sizes, uint8 [b, 3, size, size] on their device."""
    device, side = images[0].device, side_of(size)
    height, width = (max(image.shape[axis] for image in images) for axis in (0, 1))
    padded = torch.empty(len(images), 3, height, width, dtype=torch.uint8, device=device)
    start = 0
    for (rows, columns, _), batch in groupby(images, key=lambda image: image.shape):
        stacked = torch.stack(list(batch)).permute(0, 3, 1, 2)  # [n, h, w, 3] -> [n, 3, h, w]
        padded[start : start + len(stacked), :, :rows, :columns] = stacked
        start += len(stacked)
    bilinear = isinstance(size, View) and size.bilinear
    axes = [axes_of(image.shape[1], image.shape[0], size) for image in images]
    across = _weights([one for one, _ in axes], width, side, bilinear, device)  # [b, S, w]
    down = _weights([one for _, one in axes], height, side, bilinear, device)  # [b, S, h]
    with torch.autocast(device.type, enabled=False):  # mixed precision would round the weights
        narrow = round_to_bytes(torch.bmm(padded.float().flatten(1, 2), across.transpose(1, 2)))  # [b, 3h, S]
        square = round_to_bytes(torch.matmul(down[:, None], narrow.view(len(images), 3, height, side)))
    return square.to(torch.uint8)


def _weights(axes: Sequence[Axis], extent: int, side: int, bilinear: bool, device: torch.device) -> Tensor:
    """Weights [b, side, extent] of each image; those of images of one size are computed once."""
    kinds = {axis: number for number, axis in enumerate(dict.fromkeys(axes))}
    numbers = [(axis.start, axis.length, axis.resized, axis.first) for axis in kinds]
    start, length, new, first = torch.tensor(numbers, dtype=torch.float64).to(device).unbind(1)
    weights = resampling_weights(start, length, extent, side, new, first, bilinear).float()
    if len(kinds) == 1:
        return weights.expand(len(axes), -1, -1)
    return weights[torch.tensor([kinds[axis] for axis in axes], device=device)]
