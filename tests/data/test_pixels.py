"""The one loop over images: sets, tensors and batches of them; damaged files; memory that runs out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny import tiny_clip
from torch import Tensor

from dear.clip.model import Clip
from dear.data.batches import count_images, over_pixels
from dear.data.images import unlabeled_images
from dear.errors import DataError, InputError, UsageError
from dear.images.names import find_images

SIZE = 24


@pytest.fixture(scope="module")
def clip() -> Clip:
    return tiny_clip(dtype=torch.float32)


def photos(folder: Path, count: int = 7, bad: int | None = None) -> list[Path]:
    folder.mkdir(exist_ok=True)
    files = [folder / f"{number}.png" for number in range(count)]
    for number, file in enumerate(files):
        Image.new("RGB", (40, 30), (30 * number, 0, 0)).save(file)
    if bad is not None:
        files[bad].write_bytes(b"no image")
    return files


def same(pixels: Tensor) -> Tensor:
    return pixels


def test_images_come_in_three_forms(clip: Clip, tmp_path: Path) -> None:
    images = unlabeled_images(photos(tmp_path))
    progress: list[tuple[str, int, int | None]] = []
    parts, problems = over_pixels(images, same, clip, batch=3, progress=lambda *step: progress.append(step))
    assert ([len(part) for part in parts], problems) == ([3, 3, 1], {})
    assert progress == [("images", done, 7) for done in (3, 6, 7)]
    pixels = torch.cat(parts)
    assert pixels.shape == (7, 3, SIZE, SIZE)
    assert torch.equal(torch.cat(over_pixels(pixels, same, clip, batch=5)[0]), pixels)
    batches, _ = over_pixels(iter(pixels.split(4)), same, clip, batch=3)
    assert [len(part) for part in batches] == [3, 1, 3]
    assert torch.equal(torch.cat(batches), pixels)
    assert (count_images(images), count_images(pixels), count_images(iter([]))) == (7, 7, None)


def test_a_damaged_file_is_named_or_left_out(clip: Clip, tmp_path: Path) -> None:
    images = unlabeled_images(photos(tmp_path, bad=4))
    with pytest.raises(DataError, match=r"4\.png"):
        over_pixels(images, same, clip, batch=3)
    for batch in (1, 3):
        parts, problems = over_pixels(images, same, clip, batch=batch, unreadable="skip")
        assert sum(map(len, parts)) == 6
        assert list(problems) == [4]
        assert "4.png" in problems[4]


def test_batches_are_halved_when_memory_runs_out(clip: Clip) -> None:
    def small(pixels: Tensor) -> int:
        if len(pixels) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return len(pixels)

    parts, _ = over_pixels(torch.zeros(7, 3, SIZE, SIZE), small, clip, batch=4)
    assert sum(parts) == 7
    assert max(parts) == 2


@pytest.mark.parametrize(
    ("images", "item"),
    [
        (["a.jpg"], "str"),
        (torch.zeros(1, 3, 5, 5), r"\[1, 3, 5, 5\]"),
        (torch.zeros(1, 3, SIZE, SIZE, dtype=torch.uint8), "uint8"),
        (torch.full((2, 3, SIZE, SIZE), float("nan")), "image 0"),
    ],
)
def test_wrong_pixels_are_refused(clip: Clip, images: Tensor, item: str) -> None:
    with pytest.raises(InputError, match=item):
        over_pixels(images, same, clip)


@pytest.mark.parametrize("batch", [0, -3])
def test_a_batch_of_no_image_is_refused(clip: Clip, tmp_path: Path, batch: int) -> None:
    for images in (unlabeled_images(photos(tmp_path)), torch.zeros(2, 3, SIZE, SIZE)):
        with pytest.raises(UsageError, match=str(batch)):
            over_pixels(images, same, clip, batch=batch)


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos(tmp_path / "photos")
    monkeypatch.setenv("HOME", str(tmp_path))
    files = [str(tmp_path / "photos" / "0.png")]
    assert find_images(["~/photos/0.png"]) == find_images(["~/photos/0*.png"]) == files
