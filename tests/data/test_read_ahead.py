"""Reading ahead changes when files are read, never what is read."""

from __future__ import annotations

import threading
from inspect import getattr_static
from pathlib import Path

import pytest
import torch
from PIL import Image

from dear.data.images import ImageSet, ListedImages
from dear.data.read_ahead import read_ahead
from dear.errors import InputError
from dear.images import views as image_file


@pytest.fixture
def images(tmp_path: Path) -> ListedImages:
    paths = [tmp_path / f"{number}.png" for number in range(7)]
    for number, path in enumerate(paths):
        Image.new("RGB", (8, 8), (10 * number, 0, 0)).save(path)
    return ListedImages(tuple(paths), torch.zeros(7).long(), ("a",))


def test_batches_in_any_order_are_the_sets_own(images: ListedImages) -> None:
    with read_ahead(images) as ahead:
        assert len(ahead) == 7
        for rows in ([0, 1, 2], [3, 4, 5], [6], [2, 3], [4], [4, 5], [6], []):
            assert torch.equal(ahead.pixels(rows, 4), images.pixels(rows, 4))
        assert torch.equal(ahead.pixels([0, 1], 4), images.pixels([0, 1], 4))
        assert torch.equal(ahead.pixels([2, 3], 5), images.pixels([2, 3], 5))  # another size than expected


def test_the_next_batch_is_read_while_nobody_asks(
    images: ListedImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, before, done = [], image_file.open_pixels, threading.Event()

    def counted(source: Path, scratch: bool) -> object:
        read.append(source)
        if len(read) == 4:
            done.set()
        return before(source, scratch)

    monkeypatch.setattr(image_file, "open_pixels", counted)
    with read_ahead(images) as ahead:
        ahead.pixels([0, 1], 4)
        assert done.wait(20)
        ahead.pixels([2, 3], 4)
    assert [read.count(path) for path in images.items[:4]] == [1, 1, 1, 1]


def test_a_bad_file_is_named_when_it_is_asked_for(images: ListedImages) -> None:
    Path(images.items[3]).write_bytes(b"")
    with read_ahead(images) as ahead:
        ahead.pixels([0, 1], 4)
        with pytest.raises(InputError, match="3"):
            ahead.pixels([2, 3], 4)
        assert torch.equal(ahead.pixels([4, 5], 4), images.pixels([4, 5], 4))


def test_it_is_an_image_set_on_every_version_of_python(images: ListedImages) -> None:
    """Since 3.12 `isinstance` asks what an object has, not what its `__getattr__` finds."""
    with read_ahead(images) as ahead:
        for name in [*(name for name in vars(ImageSet) if not name.startswith("_")), "__len__"]:
            assert getattr_static(ahead, name, None) is not None, name
