"""Views made on a GPU are the CPU's; all but the decoder of a GPU runs on any device."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from device_files import file_of
from PIL import Image

from dear.errors import InputError
from dear.images import open as image_open
from dear.images.gpu import decoder_of, device_views, resize_images
from dear.images.views import Size, View, read_views

CPU = torch.device("cpu")


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colors, edges and noise."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int64)
    noisy = smooth + generator.integers(-30, 31, smooth.shape)
    noisy[height // 3 : height // 2, width // 4 : width // 2] = generator.integers(0, 256, 3)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def by_turbo(contents: Sequence[bytes]) -> list[torch.Tensor | None]:
    """A decoder as a GPU has one."""
    return [torch.from_numpy(simplejpeg.decode_jpeg(content, "RGB")) for content in contents]


def by_pillow(image: Image.Image, size: int, squash: bool, filter_: Image.Resampling) -> torch.Tensor:
    """CLIP's transform in Pillow's own calls, an axis at a time: in one call it chooses their order."""
    width, height = image.size
    short = min(image.size)
    new = (size, size) if squash else (int(size * width / short), int(size * height / short))
    whole = image.resize((new[0], height), filter_).resize(new, filter_)
    left, top = round((new[0] - size) / 2), round((new[1] - size) / 2)
    cut = whole.crop((left, top, left + size, top + size))
    return torch.from_numpy(np.array(cut)).permute(2, 0, 1)


SIZES = [(64, 48), (48, 64), (33, 33), (32, 32), (100, 37), (7, 5), (1, 9), (31, 400), (225, 224)]


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("bilinear", [False, True])
def test_images_of_all_sizes_are_resized_together_as_pillow_does_each(squash: bool, bilinear: bool) -> None:
    images = [photo(*size, seed) for seed, size in enumerate(SIZES)]
    views = resize_images([torch.from_numpy(np.array(image)) for image in images], View(32, squash, bilinear))
    filter_ = Image.Resampling.BILINEAR if bilinear else Image.Resampling.BICUBIC
    expected = torch.stack([by_pillow(image, 32, squash, filter_) for image in images])
    off = (views.int() - expected.int()).abs()
    assert views.dtype == torch.uint8
    assert off.max() <= 1
    assert (off > 0).float().mean() < (0.01 if bilinear else 1e-3)  # bilinear weights have many ties


def test_of_a_very_long_image_only_the_middle_is_used() -> None:
    image = photo(600, 20)
    (views,) = resize_images([torch.from_numpy(np.array(image))], 16)
    assert (views.int() - read_views([image], 16)[0].int()).abs().max() <= 1


def near(views: torch.Tensor, expected: torch.Tensor) -> bool:
    off = (views.int() - expected.int()).abs()
    return bool(off.max() <= 1 and (off > 0).float().mean() < 0.05)


@pytest.mark.parametrize("size", [24, View(24, squash=True), View(24, bilinear=True)])
def test_files_of_every_kind_have_the_views_of_the_cpu(size: Size, tmp_path: Path) -> None:
    exif = Image.Exif()
    sources: list[object] = [file_of(photo(40 + 9 * n, 64 - 5 * n, n), quality=90) for n in range(5)]
    for orientation in range(1, 9):
        exif[0x112] = orientation
        sources.append(file_of(photo(50, 30, orientation), exif=exif.tobytes()))
    sources += [
        file_of(photo(60, 40).convert("L")), file_of(photo(60, 40).convert("CMYK")),
        file_of(photo(60, 40), progressive=True), file_of(photo(60, 40), "PNG"),
        file_of(photo(60, 40), subsampling=0), file_of(photo(60, 40), subsampling=1), photo(60, 40),
    ]  # fmt: skip
    path = tmp_path / "a photo.jpg"
    path.write_bytes(file_of(photo(90, 60)))
    sources.append(path)
    views = device_views(sources, size, CPU, by_turbo)  # type: ignore[arg-type]
    expected = read_views(sources, size)  # type: ignore[arg-type]
    assert views.shape == expected.shape
    assert all(near(one, other) for one, other in zip(views, expected, strict=True))


def test_what_the_gpu_cannot_decode_or_decodes_to_another_size_comes_from_the_cpu() -> None:
    files = [file_of(photo(40, 30, seed)) for seed in range(4)]
    asked = []

    def decode(contents: Sequence[bytes]) -> list[torch.Tensor | None]:
        asked.extend(contents)
        decoded = dict(zip(contents, by_turbo(contents), strict=True))
        decoded |= {files[1]: None, files[2]: torch.zeros(2, 2, 3, dtype=torch.uint8)}
        return [decoded[content] for content in contents]

    views = device_views(files, 16, CPU, decode)
    assert sorted(asked) == sorted(files)
    assert near(views, read_views(files, 16))


def test_only_plain_files_are_given_to_the_gpu() -> None:
    plain = {"jpeg": file_of(photo(20, 20)), "gray": file_of(photo(20, 20).convert("L"))}
    cmyk = file_of(photo(20, 20).convert("CMYK"))
    others = {
        "cut": plain["jpeg"][:-20], "more behind it": plain["jpeg"] + b"more",
        "png": file_of(photo(9, 9), "PNG"),
        "progressive": file_of(photo(20, 20), progressive=True), "cmyk": cmyk,
        "sampled 4:1:1": simplejpeg.encode_jpeg(np.array(photo(64, 32)), colorsubsampling="411"),
        "RGB": file_of(photo(20, 20), keep_rgb=True),
    }  # fmt: skip
    assert {name for name, content in plain.items() if image_open.plain_jpeg(content)} == {"jpeg", "gray"}
    assert not {name for name, content in others.items() if image_open.plain_jpeg(content)}


@pytest.mark.parametrize("content", [b"", b"text", file_of(photo(20, 20))[:-300]])
def test_a_bad_file_is_named(content: bytes, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jpg", tmp_path / "bad.jpg"
    good.write_bytes(file_of(photo(20, 20)))
    bad.write_bytes(content)
    with pytest.raises(InputError, match=r"bad\.jpg"):
        device_views([good, bad], 8, CPU, by_turbo)


def test_files_that_come_slowly_are_read_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    files, readers, pause = [file_of(photo(20, 20, seed)) for seed in range(12)], set(), [0.0]

    def slowly(source: bytes) -> image_open.PlainJpeg | None:
        readers.add(threading.get_ident())
        time.sleep(pause[0])
        return image_open.plain_jpeg(source)

    monkeypatch.setattr("dear.images.gpu.plain_jpeg", slowly)
    monkeypatch.setattr("dear.utils.parallel.usable_cores", lambda: 4)
    assert near(device_views(files, 16, CPU, by_turbo), read_views(files, 16))
    assert len(readers) == 1
    pause[0] = 0.005
    assert near(device_views(files, 16, CPU, by_turbo), read_views(files, 16))
    assert len(readers) > 2


def test_large_images_are_decoded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    files, portions = [file_of(photo(60, 40, seed)) for seed in range(5)], []

    def decode(contents: Sequence[bytes]) -> list[torch.Tensor | None]:
        portions.append(len(contents))
        return by_turbo(contents)

    monkeypatch.setattr("dear.images.gpu._MOST_PIXELS", 2 * 60 * 60)
    assert near(device_views(files, 16, CPU, decode), read_views(files, 16))
    assert portions == [2, 2, 1]


def test_without_a_decoder_the_cpu_reads() -> None:
    if not torch.cuda.is_available():
        assert decoder_of(torch.device("cuda")) is None
