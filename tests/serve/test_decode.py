"""Files decoded in processes are those of the library's own reader, and a process that ends costs nobody."""

from __future__ import annotations

import asyncio
import io
import os
import signal

import pytest
import torch
from clients import wait_for
from PIL import Image
from serving import decoded, upload

from dear.images.open import open_image
from dear.images.views import View, resize_crop
from dear.serve.decoding import Decoder, Decoding
from dear.serve.decoding.worker import Template
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
    tensors = asyncio.run(decoder.decode([upload(decoder, one, str(n)) for n, one in enumerate(files)]))
    for one, content in zip(tensors, files, strict=True):
        assert torch.equal(one, resize_crop(open_image(content), 24))


def test_a_bad_file_is_refused_by_its_name_and_the_next_one_decoded() -> None:
    decoder = Decoder(1, Decoding(24, Limits(pixels=10**5)))
    try:
        for content, status, part in [
            (b"no image", 400, "a.jpg: "),
            (file(40, 30)[:200], 400, "a.jpg: "),
            (b"", 400, "a.jpg: "),
            (file(400, 300), 413, "a.jpg: an image may have at most 100,000 pixels, got 400 x 300"),
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


def test_of_many_waiting_files_a_process_gets_several_and_each_has_its_own_answer() -> None:
    decoder = Decoder(1, Decoding(24, Limits(pixels=10**5)))
    files, bad = [file(30 + n, 50 - n) for n in range(12)], file(40, 30)[:-40]
    files[2] = files[7] = bad
    files[5] = file(30, 20, "PNG")  # such a file may take long: nobody waits for it
    batches: list[list[str]] = []
    try:
        decoded(decoder, files[0])
        give = decoder._workers[0].decode

        def decode(tasks) -> None:
            batches.append([task.upload.name for task in tasks])
            give(tasks)

        decoder._workers[0].decode = decode
        tensors = asyncio.run(decoder.decode([upload(decoder, one, str(n)) for n, one in enumerate(files)]))
    finally:
        decoder.close()
    assert batches[:3] == [["0", "1", "2", "3"], ["4"], ["5"]]
    for number, (one, content) in enumerate(zip(tensors, files, strict=True)):
        if content == bad:
            assert str(one).startswith(f"{number}: ")
        else:
            assert torch.equal(one, resize_crop(content, 24))


def test_files_of_a_process_that_is_killed_are_decoded_one_by_one() -> None:
    decoder = Decoder(1, Decoding(24, Limits(pixels=10**5)))
    files = [file(30 + n, 40) for n in range(6)]
    batches: list[list[str]] = []
    try:
        decoded(decoder, files[0])
        first = decoder._workers[0]
        give = first.decode

        def decode(tasks) -> None:
            batches.append([task.upload.name for task in tasks])
            os.kill(first.pid, signal.SIGSTOP)
            give(tasks)
            os.kill(first.pid, signal.SIGKILL)

        first.decode = decode
        tensors = asyncio.run(decoder.decode([upload(decoder, one, str(n)) for n, one in enumerate(files)]))
    finally:
        decoder.close()
    assert [len(names) for names in batches] == [4]
    assert all(
        torch.equal(one, resize_crop(content, 24)) for one, content in zip(tensors, files, strict=True)
    )


@pytest.mark.parametrize(
    "content", [b"\xff\xd8" + b"\xff\xe0\x00\x02" * 5000, b"\xff\xd8\xff", b"a text", b"", b"\0\1\2\3" * 9]
)
def test_files_without_an_image_are_refused_before_a_process_sees_them(content: bytes) -> None:
    cost = Decoding(24).cost(content)
    assert cost.refusal is not None
    assert (cost.refusal.http_status, cost.pixels) == (400, 0)
