"""Files decoded in processes are those of the library's own reader, and a process that ends costs nobody."""

from __future__ import annotations

import asyncio
import io
import os
import signal

import pytest
import torch
from PIL import Image
from test_service import wait_for

from conftest import decoded
from dear._io.image_file import View, open_image, resize_crop
from dear.serve.decode import Decoder, Decoding, Upload
from dear.serve.decode_process import Template
from dear.serve.errors import Refused
from dear.serve.settings import Limits


def file(width: int, height: int, kind: str = "JPEG") -> bytes:
    content = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(content, kind)
    return content.getvalue()


@pytest.fixture
def decoder():
    made = Decoder(2, Decoding(View(24), Limits(pixels=10**5)))
    yield made
    made.close()


def test_processes_give_the_pixels_of_the_librarys_own_reader(decoder) -> None:
    files = [file(40, 30), file(30, 50, "PNG"), file(24, 24, "GIF"), file(70, 31)]
    found = asyncio.run(decoder.decode([Upload(str(n), one) for n, one in enumerate(files)]))
    for one, content in zip(found, files, strict=True):
        assert torch.equal(one, resize_crop(open_image(content), 24))


def test_a_bad_file_is_refused_by_its_name_and_the_next_one_decoded() -> None:
    decoder = Decoder(1, Decoding(24, Limits(pixels=10**5)))
    try:
        for content, status, part in [
            (b"no image", 400, "a.jpg: "),
            (file(40, 30)[:200], 400, "a.jpg: "),
            (b"", 400, "a.jpg: "),
            (file(400, 300), 413, "a.jpg: 400 x 300 pixels are more than 100,000"),
        ]:
            with pytest.raises(Refused) as error:
                decoded(decoder, content, "a.jpg")
            assert error.value.http_status == status
            assert str(error.value).startswith(part)
            assert decoded(decoder, file(40, 30), "b.jpg").shape == (3, 24, 24)
    finally:
        decoder.close()


def test_a_process_that_ended_is_replaced(decoder) -> None:
    content = file(40, 30)
    decoded(decoder, content, "a")
    os.kill(decoder._workers[0].pid, signal.SIGKILL)
    assert torch.equal(decoded(decoder, content, "b"), resize_crop(open_image(content), 24))


def test_processes_end_with_the_decoder_and_with_their_template(decoder) -> None:
    for end in (Template.running().process.kill, decoder.close):
        decoded(decoder, file(40, 30))
        pids = [worker.pid for worker in decoder._workers if worker.pid]  # one may still be starting
        assert pids
        assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
        end()
        wait_for(lambda pids=pids: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
