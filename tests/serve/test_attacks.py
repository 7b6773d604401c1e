"""Requests that once stopped the service, froze it, or destroyed a run; each must cost next to nothing."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
import torch
from clients import MANAGE, OPEN_ALL, OPEN_ONE, QUICK, alone, client_of, file, wait_for
from PIL import Image
from safetensors.torch import load_file, save_file
from served import serving
from serving import decoded, image_bytes, upload
from tiny import tiny_clip

from dear.images.headers import read_header
from dear.images.open import open_image
from dear.images.views import resize_crop
from dear.runs.folder import load_run
from dear.runs.model import Model
from dear.serve import class_lists
from dear.serve.batcher import TEXT_COST, Batcher
from dear.serve.connection import MOST_PIPELINED
from dear.serve.decoding import Cost, Decoder, Decoding, Upload
from dear.serve.decoding.decoder import Task
from dear.serve.errors import Refused
from dear.serve.keys import KeyEntry, KeyFile, Keys
from dear.serve.requests import RequestReader
from dear.serve.schemas import ClassifyOptions
from dear.serve.settings import Limits
from dear.serve.traffic import Traffic
from hostile import broken_zips, empty_webp, encoded, many_scans, packed

BOUNDLESS = Limits(pixels=10**10, request_pixels=10**10, decode_seconds=0.4)
MANAGER = {"Authorization": f"Bearer {MANAGE}"}
KEYS = Keys(KeyFile([KeyEntry(OPEN_ALL, ["*"], "shop"), KeyEntry(OPEN_ONE, ["probe"])], MANAGE))
USER = {"Authorization": f"Bearer {OPEN_ALL}"}


@pytest.fixture(scope="module")
def roomy(made_runs):
    """A client of a service that takes larger bodies."""
    settings = replace(QUICK, limits=replace(QUICK.limits, body_bytes=2**20), poll_seconds=60)
    with client_of(made_runs, settings) as client:
        yield client


@pytest.fixture
def decoder():
    made = Decoder(2, Decoding(24, Limits(pixels=10**6, decode_seconds=5.0)))
    yield made
    made.close()


def pid_of(decoder: Decoder) -> int:
    (worker,) = decoder._workers
    return worker.pid


# -- decoding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("WEBP", {}), ("WEBP", {"lossless": True}),
     ("WEBP", {"exif": b"Exif\0\0a"}), ("GIF", {}), ("BMP", {}), ("TIFF", {}), ("PPM", {}), ("AVIF", {})],
)  # fmt: skip
def test_the_header_says_what_the_decoder_finds(kind, options):
    content = encoded(Image.effect_noise((321, 123), 50).convert("RGB"), kind, **options)
    header = read_header(content)
    assert (header.width, header.height) == (321, 123)
    for cut in range(60):  # any beginning of a file is read without an error
        read_header(content[:cut])


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded(decoder):
    with pytest.raises(Refused, match=r"\b300\b.*900"):
        decoded(decoder, many_scans(900, 300), "a.jpg")
    usual = encoded(Image.linear_gradient("L").convert("RGB"), "JPEG", progressive=True)
    assert torch.equal(decoded(decoder, usual, "b.jpg"), resize_crop(open_image(usual), 24))


def test_a_decoder_that_takes_too_long_is_killed_and_the_next_image_decoded():
    decoder, slow = Decoder(1, Decoding(24, BOUNDLESS)), many_scans(5000, 60)
    try:
        decoded(decoder, image_bytes(1), "a")  # its process runs
        began = time.monotonic()
        with pytest.raises(Refused, match=r"slow\.jpg: .*0\.4"):
            decoded(decoder, slow, "slow.jpg")
        assert time.monotonic() - began < 8  # a start of a process on busy cores included
        assert decoded(decoder, image_bytes(1), "b").shape == (3, 24, 24)
    finally:
        decoder.close()


def test_an_image_whose_decoder_is_killed_by_others_is_decoded_all_the_same(decoder):
    content = image_bytes(1)
    decoded(decoder, content, "a")
    pid = pid_of(decoder)
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(decoded, decoder, content)
        wait_for(lambda: decoder._workers[0].tasks)
        os.kill(pid, signal.SIGKILL)
        assert torch.equal(waiting.result(20), resize_crop(open_image(content), 24))


def test_a_decoder_that_was_stopped_is_replaced():
    decoder = Decoder(1, Decoding(24, Limits(decode_seconds=0.5)))
    try:
        decoded(decoder, image_bytes(1), "a")
        os.kill(pid_of(decoder), signal.SIGSTOP)
        assert decoded(decoder, image_bytes(2), "b").shape == (3, 24, 24)
    finally:
        decoder.close()


def test_a_decoder_that_hardly_gets_processor_time_costs_no_image_its_answer():
    """Of one core, a busy neighbor takes nearly all; the deadline counts what the decoder itself used."""
    core = min(os.sched_getaffinity(0))
    pin = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    content = encoded(Image.effect_noise((2400, 1600), 60).convert("RGB"), "JPEG")
    decoder = Decoder(1, Decoding(24, Limits(decode_seconds=0.5, decode_wall_seconds=300)))
    neighbor = subprocess.Popen([sys.executable, "-c", pin])
    try:
        decoded(decoder, image_bytes(1), "a")
        pid = pid_of(decoder)
        os.sched_setaffinity(pid, {core})
        os.setpriority(os.PRIO_PROCESS, pid, 19)
        began = time.monotonic()
        assert torch.equal(decoded(decoder, content, "b"), resize_crop(content, 24))
        assert time.monotonic() - began > 0.5  # by the clock it was late
        assert pid_of(decoder) == pid
    finally:
        neighbor.kill()
        neighbor.wait()
        decoder.close()


def test_an_image_that_no_decoder_comes_to_is_refused_for_now(monkeypatch):
    """Not a 400 or 413, which would blame the image."""
    monkeypatch.setattr("dear.serve.decoding.worker._process_state", lambda pid: (0.0, False))
    decoder = Decoder(1, Decoding(24))
    content = encoded(Image.effect_noise((2500, 2500), 60).convert("RGB"), "JPEG")
    try:
        decoded(decoder, image_bytes(1))  # its process runs
        decoder.decoding = Decoding(24, Limits(decode_seconds=0.1, decode_wall_seconds=0.3))
        decoder._workers[0]._decoding = decoder.decoding

        async def go():
            pending = asyncio.create_task(decoder.decode([upload(decoder, content, "c")]))
            stopped = set()
            while not pending.done():
                for worker in decoder._workers:
                    if worker.tasks and worker.pid not in stopped:
                        os.kill(worker.pid, signal.SIGSTOP)
                        stopped.add(worker.pid)
                await asyncio.sleep(0)
            return (await pending)[0], len(stopped)

        refusal, tries = asyncio.run(asyncio.wait_for(go(), 30))
        assert (refusal.http_status, refusal.retry_after, tries) == (503, 1, 2)
    finally:
        decoder.close()


def test_more_pixels_than_the_header_said_and_too_much_memory_are_refused(monkeypatch):
    decoder = Decoder(1, Decoding(24, Limits(pixels=10**8, decode_bytes=100 * 2**20)))
    try:
        large = encoded(Image.new("RGB", (600, 600)), "PNG")
        monkeypatch.setattr(Decoding, "cost", lambda how, content: Cost(1000))
        with pytest.raises(Refused, match="a: "):
            decoded(decoder, large, "a")
        monkeypatch.undo()
        with pytest.raises(Refused, match="b: "):
            decoded(decoder, empty_webp(7000), "b")
        assert decoded(decoder, large, "c").shape == (3, 24, 24)
    finally:
        decoder.close()


def test_pixels_in_flight_are_a_budget_and_large_images_leave_a_place_for_small_ones():
    seen: list[str] = []

    class Worker:
        idle, tasks = True, ()

        def decode(self, tasks):
            self.idle, self.tasks = False, tasks
            seen.extend(task.upload.name for task in tasks)

    async def go(costs):
        seen.clear()
        decoder = Decoder(3, Decoding(24, Limits(pixels=40_000_000, decoding_pixels=50_000_000)))
        decoder._workers = [Worker() for _ in range(3)]
        for name, cost in costs.items():
            task = Task(Upload(name, b"", Cost(cost)), name, asyncio.get_running_loop().create_future())
            decoder._queue.put(name, cost, task)
        decoder.dispatch()
        return sorted(seen)

    large = {"a": 24_000_000, "b": 30_000_000, "c": 9_000_000, "small": 1_000_000}
    assert asyncio.run(go(large)) == ["a", "c", "small"]  # b would be beyond the budget
    three = {"a": 9_000_000, "b": 9_000_000, "c": 9_000_000, "small": 1_000_000}
    assert asyncio.run(go(three)) == ["a", "b", "small"]  # the last place is for small ones


def test_a_few_bytes_that_stand_for_gigabytes_are_refused_at_once(runs):
    settings = replace(QUICK, limits=replace(QUICK.limits, pixels=50_000_000, images=64))
    content = empty_webp(7000)
    assert len(content) < 2000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with client_of(runs, settings) as client:
        began = time.monotonic()
        reply = client.post("/v1/models/zero/classify", files=[("files", ("a.webp", content))] * 64)
        assert time.monotonic() - began < 3
        assert reply.status_code == 413
        assert "together" in reply.json()["error"]["message"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


def test_readiness_knows_when_nothing_moves(runs):
    settings = replace(QUICK, stall_seconds=0.3, limits=replace(QUICK.limits, decode_seconds=1.5))
    with client_of(runs, settings) as client:
        assert client.post("/v1/models/zero/classify", files=[file(1)]).status_code == 200
        os.kill(pid_of(client.app.state.service.decoder), signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.post, "/v1/models/zero/classify", files=[file(2)])
            wait_for(lambda: client.get("/health/ready").status_code == 503, 5)
            assert waiting.result(20).status_code == 200
        wait_for(lambda: client.get("/health/ready").status_code == 200, 5)
        free = threading.Event()
        blocked = client.portal.start_task_soon(client.app.state.service.batcher.call, free.wait)
        wait_for(lambda: client.get("/health/ready").status_code == 503, 5)
        free.set()
        blocked.result(5)
        wait_for(lambda: client.get("/health/ready").status_code == 200, 5)  # its thread may still be ending


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_service_within_the_drain_limit_whatever_hangs(number, tmp_path):
    (tmp_path / "runs").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    code = (
        "import sys, torch; sys.path[:0] = sys.argv[1].split(':'); from pathlib import Path; "
        "from tiny import tiny_clip; from dear.serve.server import run_server; "
        "from dear.serve.service import Service; from dear.serve.settings import ServeSettings; "
        "service = Service(Path(sys.argv[2]), tiny_clip(), ServeSettings(drain_seconds=0.5)); "
        "import threading; service.batcher._compute = lambda jobs: threading.Event().wait(); "
        "run_server(service, '127.0.0.1', int(sys.argv[3]))"
    )
    paths = ":".join(path for path in sys.path if path)
    process = subprocess.Popen([sys.executable, "-c", code, paths, str(tmp_path / "runs"), str(port)])
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(lambda: _answers(address), 60)
        files = [("files", ("a.png", image_bytes(1)))]
        with ThreadPoolExecutor(1) as pool:
            pool.submit(_ignore, lambda: httpx.post(f"{address}/v1/embeddings", files=files, timeout=20))
            time.sleep(0.5)
            process.send_signal(number)
            process.wait(6)
    finally:
        process.kill()
        process.wait()


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health/live").status_code == 200
    except httpx.TransportError:
        return False


def _ignore(function) -> None:
    with suppress(httpx.TransportError):
        function()


# -- bodies, headers and connections ------------------------------------------------------------------


def test_a_long_json_list_does_not_freeze_the_event_loop(runs):
    settings = replace(QUICK, limits=replace(QUICK.limits, body_bytes=32 * 2**20))
    body = b'{"images": [' + b'"",' * 1_000_000 + b'""]}'
    with serving(runs, settings) as (address, _):
        with ThreadPoolExecutor(1) as pool:
            kind = {"content-type": "application/json"}
            pending = pool.submit(
                httpx.post, f"{address}/v1/models/zero/classify", content=body, headers=kind, timeout=30
            )
            waits = []
            while not pending.done():
                began = time.monotonic()
                assert httpx.get(f"{address}/health/live", timeout=30).status_code == 200
                waits.append(time.monotonic() - began)
            assert pending.result().status_code == 413
        assert max(waits, default=0) < 1.5


def test_pipelined_requests_are_bounded(runs):
    with serving(runs) as (address, _):
        port = int(address.rpartition(":")[2])
        request = b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
            line.sendall(request * MOST_PIPELINED)
            answer = b""
            while answer.count(b" 200 ") < MOST_PIPELINED:
                answer += line.recv(100_000)
        with socket.create_connection(("127.0.0.1", port), timeout=20) as line, suppress(ConnectionError):
            line.sendall(request * 1000)
            answer = b""
            while data := line.recv(100_000):
                answer += data
            assert answer.count(b" 200 ") <= MOST_PIPELINED


def test_bodies_in_chunks_and_upgrades_are_refused(runs):
    """Chunks of one byte cost the parser much; what follows an Upgrade header would be a second request."""
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\n"
    upgrade = b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 43\r\n\r\n"
    smuggled = b"GET /health/live HTTP/1.1\r\nHost: smuggled\r\n\r\n"
    with serving(runs) as (address, _):
        port = int(address.rpartition(":")[2])
        chunked = b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 1000
        for rest, later, status in ((chunked, b"", b" 411 "), (upgrade, smuggled, b" 400 ")):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
                line.sendall(head + rest)
                answer = line.recv(10_000)
                with suppress(ConnectionError):
                    line.sendall(later)
                    while data := line.recv(10_000):
                        answer += data
                assert status in answer
                assert b" 200 " not in answer


def test_endless_headers_are_ended(runs):
    with serving(runs, replace(QUICK, limits=replace(QUICK.limits, header_bytes=4096))) as (address, _):
        port = int(address.rpartition(":")[2])
        sent = 0
        with socket.create_connection(("127.0.0.1", port), timeout=5) as line, suppress(OSError):
            line.sendall(b"GET /health/live HTTP/1.1\r\n")
            for _ in range(1000):
                sent += line.send(b"X-Long: " + b"a" * 65_000 + b"\r\n")
                time.sleep(0.001)
        assert sent < 20_000_000
        for headers in ({"X-Long": "a" * 5000}, {f"x-{n}": "a" for n in range(600)}):
            assert httpx.get(f"{address}/health/live", headers=headers).status_code == 431
        trailer = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
        with socket.create_connection(("127.0.0.1", port), timeout=5) as line, suppress(OSError):
            line.sendall(trailer)
            sent = 0
            for _ in range(1000):
                sent += line.send(b"X-Long: " + b"a" * 65_000 + b"\r\n")
                time.sleep(0.001)
        assert sent < 20_000_000
        assert httpx.get(f"{address}/health/live").status_code == 200


def test_a_body_that_does_not_arrive_is_ended(runs):
    limits = replace(QUICK.limits, body_seconds=0.5)
    with serving(runs, replace(QUICK, limits=limits)) as (address, _):
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
            line.sendall(b"POST /v1/models/zero/classify HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n")
            line.sendall(b"Content-Type: multipart/form-data; boundary=x\r\n\r\n--x")
            answer = line.recv(1000)
        assert b" 408 " in answer
        assert b"within 0.5 seconds" in answer
        assert httpx.get(f"{address}/health/live").status_code == 200


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (400, {"files": [file(1)], "data": {"top": "²"}}),
        (400, {"files": [file(1)], "data": {"top": "9" * 5000}}),
        (413, {"files": [file(1)], "data": {"classes": "a" * 600_000}}),
        (400, {"content": b"--x\r\n\r\n", "headers": {"content-type": "multipart/form-data; boundary=x"}}),
        (400, {"content": b"--x", "headers": {"content-type": "multipart/form-data"}}),
        (400, {"content": b"\xff{", "headers": {"content-type": "application/json"}}),
        (400, {"content": b"[" * 90_000, "headers": {"content-type": "application/json"}}),
        (413, {"json": {"images": [], "classes": ["a"] * 20_000}}),
        (400, {"json": {"classes": ["a\ud800"[:1], ""], "images": ["QQ=="]}}),
    ],
)
def test_odd_requests_are_refused_and_never_fail(roomy, status, request_):
    assert roomy.post("/v1/models/zero/classify", **request_).status_code == status


def test_headers_of_parts_with_many_parameters_are_refused_at_once(roomy):
    """Python's reader of such values takes seconds for one header of 4 KB."""
    part = b'--x\r\nContent-Disposition: form-data; name="files"; x="' + b";" * 4000 + b'"\r\n\r\na\r\n'
    kind = {"content-type": "multipart/form-data; boundary=x"}
    began = time.process_time()
    reply = roomy.post("/v1/models/zero/classify", content=part * 200 + b"--x--\r\n", headers=kind)
    assert (reply.status_code, time.process_time() - began < 2) == (400, True)


@pytest.mark.parametrize("charset", ["undefined", "punycode", "utf-16", "nonsense"])
def test_charsets_change_nothing(shared, charset):
    body = b'--x\r\nContent-Disposition: form-data; name="top"\r\n\r\n2\r\n'
    body += b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    body += image_bytes(1) + b"\r\n--x--\r\n"
    kind = {"content-type": f"multipart/form-data; charset={charset}; boundary=x"}
    reply = shared.post("/v1/models/zero/classify", content=body, headers=kind)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["answers"][0]["classes"]) == 2


def test_one_bad_file_of_three_does_not_refuse_the_others(shared, made_runs):
    files = [file(1), ("files", ("notes.txt", b"hello there, no image")), file(2)]
    reply = shared.post("/v1/models/zero/classify", files=files, data={"top": "3"})
    first, bad, last = reply.json()["answers"]
    assert reply.status_code == 200
    assert "text file" in bad["error"]
    for answer, row in zip((first, last), alone(made_runs / "zero", [1, 2]), strict=True):
        assert answer["classes"][0]["probability"] == pytest.approx(float(row.max()), abs=1e-5)
    assert shared.post("/v1/models/zero/classify", files=files[1:2]).status_code == 400


# -- uploads ------------------------------------------------------------------------------------------


def hidden(runs: Path) -> list[str]:
    return [path.name for path in runs.iterdir() if path.name.startswith(".")]


def ask(client, name: str = "zero") -> float:
    reply = client.post(f"/v1/models/{name}/classify", files=[file(1)], headers=USER)
    assert reply.status_code == 200, reply.text
    return reply.json()["answers"][0]["classes"][0]["probability"]


def too_large(run: Path, folder: Path) -> bytes:
    """The run with finite values that no score survives."""
    tensors = load_file(run / "adapter.safetensors")
    save_file({n: torch.full_like(t, 3e38) for n, t in tensors.items()}, folder / "large.safetensors")
    return (folder / "large.safetensors").read_bytes()


def test_a_bad_upload_leaves_the_good_run_as_it_is(runs, tmp_path):
    before = {path.name: path.read_bytes() for path in (runs / "probe").iterdir()}
    bad = [packed(runs / "probe", metrics_json=b"not json"), packed(runs / "probe", config_json=b"{}"),
           packed(runs / "probe", adapter_safetensors=b"{}"),
           packed(runs / "probe", adapter_safetensors=too_large(runs / "probe", tmp_path)),
           *broken_zips(runs / "probe").values()]  # fmt: skip
    with client_of(runs, keys=KEYS) as client:
        was = ask(client, "probe")
        for content in bad:
            reply = client.put("/v1/models/probe/upload", content=content, headers=MANAGER)
            assert reply.status_code == 400, reply.text
            assert ask(client, "probe") == was
        assert {path.name: path.read_bytes() for path in (runs / "probe").iterdir()} == before
        assert not hidden(runs)
    with client_of(runs, keys=KEYS) as client:
        assert ask(client, "probe") == was


def test_a_folder_that_is_no_run_is_never_replaced(runs):
    (runs / "photos" / "album").mkdir(parents=True)
    (runs / "photos" / "album" / "precious.txt").write_text("precious")
    (runs / "link").symlink_to(runs / "photos")
    with client_of(runs, keys=KEYS) as client:
        for name in ("photos", "link"):
            reply = client.put(f"/v1/models/{name}/upload", content=packed(runs / "zero"), headers=MANAGER)
            assert reply.status_code == 409, reply.text
    assert (runs / "photos" / "album" / "precious.txt").read_text() == "precious"
    assert not hidden(runs)


def test_parallel_uploads_to_one_name_all_succeed(runs):
    contents = [packed(runs / name) for name in ("zero", "coop")]
    with client_of(runs, keys=KEYS) as client, ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(
            lambda n: client.put("/v1/models/new/upload", content=contents[n % 2], headers=MANAGER), range(8)
        ))  # fmt: skip
        assert [reply.status_code for reply in replies] == [200] * 8
        assert ask(client, "new") > 0
    assert not hidden(runs)


def test_an_upload_replaces_the_run_and_a_kill_in_between_loses_nothing(runs):
    with client_of(runs, keys=KEYS) as client:
        was = ask(client, "zero")
        other = client.put("/v1/models/zero/upload", content=packed(runs / "coop"), headers=MANAGER)
        assert other.json()["method"] == "coop"
        assert ask(client, "zero") != was
        assert ask(client, "zero") == ask(client, "coop")
        assert not hidden(runs)
    # what a service leaves that was killed after the first of two renames
    number = "0123456789abcdef" * 2
    (runs / "zero").rename(runs / f".zero.{number}.old")
    shutil.copytree(runs / "coop", runs / f".zero.{number}")
    shutil.copytree(runs / "coop", runs / f".coop.{number}.old")
    with client_of(runs, keys=KEYS) as client:
        assert ask(client, "zero") == ask(client, "coop")
    assert not hidden(runs)


def test_a_full_disk_is_told(runs, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    with client_of(runs, keys=KEYS) as client:
        monkeypatch.setattr(Path, "write_bytes", full)
        reply = client.put("/v1/models/zero/upload", content=packed(runs / "coop"), headers=MANAGER)
        monkeypatch.undo()
        assert (reply.status_code, "full" in reply.json()["error"]["message"]) == (507, True)
        assert client.get("/v1/models/zero", headers=USER).json()["method"] == "zeroshot"
    assert not hidden(runs)


def test_scores_that_are_no_numbers_are_never_answered(runs, tmp_path):
    (runs / "probe" / "adapter.safetensors").write_bytes(too_large(runs / "probe", tmp_path))
    with client_of(runs) as client:
        reply = client.post("/v1/models/probe/classify", files=[file(1)])
        assert (reply.status_code, "not finite" in reply.json()["error"]["message"]) == (409, True)
        assert client.post("/v1/models/zero/classify", files=[file(1)]).status_code == 200


# -- fairness -----------------------------------------------------------------------------------------


def test_a_caller_with_much_to_do_does_not_delay_another():
    order, free = [], threading.Event()

    def compute(jobs):
        free.wait(5)
        order.extend(jobs)
        return jobs

    batcher = Batcher(compute, largest=4, longest_wait=0, most_queued=200, most_per_caller=100)

    async def ask():
        flood = asyncio.create_task(batcher.compute([f"flood {n}" for n in range(80)], "flood"))
        await asyncio.sleep(0.1)  # the first batch is being computed
        heavy = asyncio.create_task(batcher.call(lambda: order.append("texts"), "heavy", 16))
        victim = asyncio.create_task(batcher.compute(["victim 1", "victim 2"], "victim"))
        await asyncio.sleep(0.01)
        with pytest.raises(Refused):
            await batcher.compute(["more"] * 30, "flood")
        free.set()
        await asyncio.gather(flood, heavy, victim)

    asyncio.run(asyncio.wait_for(ask(), 10))
    assert order.index("victim 2") < 4 + 4 + 1  # in the next batch
    assert order.index("texts") < 4 + 4 + 4
    batcher.close()


def test_a_slow_device_takes_smaller_turns_and_a_full_queue_leaves_room_for_those_with_little():
    sizes, free = [], threading.Event()

    def compute(jobs):
        free.wait(5)
        sizes.append(len(jobs))
        until = time.thread_time() + 0.06 * len(jobs)
        while time.thread_time() < until:
            pass
        return jobs

    batcher = Batcher(compute, largest=8, longest_wait=0, most_queued=12, most_per_caller=12)

    async def ask():
        flood = asyncio.create_task(batcher.compute(list(range(12)), "flood"))
        await asyncio.sleep(0.05)
        with pytest.raises(Refused, match=r"\b12\b"):
            await batcher.compute([1], "flood")
        little = asyncio.create_task(batcher.compute([1, 2], "little"))
        with pytest.raises(Refused, match=r"\b12\b"):
            await batcher.compute(list(range(7)), "much")
        free.set()
        assert await little == [1, 2]
        await flood

    asyncio.run(asyncio.wait_for(ask(), 20))
    assert sizes[0] == 8
    assert max(sizes[1:]) <= 3  # 0.2 seconds of 0.06 each
    batcher.close()


@pytest.mark.parametrize("name", ["zero", "coop", "roles", "vpt"])
def test_texts_encoded_in_slices_give_the_same_answers(shared, made_runs, name, monkeypatch):
    names, costs = [f"thing number {n}" for n in range(40)], []
    batcher = shared.app.state.service.batcher
    call = batcher.call

    async def noted(function, caller="", cost=1.0):
        costs.append(cost)
        return await call(function, caller, cost)

    monkeypatch.setattr(batcher, "call", noted)
    monkeypatch.setattr(class_lists, "LARGEST_SLICE", 16)
    body = {"top": "43", "classes": "+" + ",".join(names)}
    reply = shared.post(f"/v1/models/{name}/classify", files=[file(3)], data=body)
    assert reply.status_code == 200, reply.text
    texts = [
        round(cost / TEXT_COST) for cost in costs if cost != 1.0
    ]  # 1: the adapter's own, where it is loaded
    assert max(texts) <= 16
    assert sum(texts) == 40  # the new names; the adapter keeps the texts of its classes
    got = {one["name"]: one["probability"] for one in reply.json()["answers"][0]["classes"]}
    method = load_run(made_runs / name, tiny_clip(dtype=torch.float32))
    method = method.with_classes([*method.classes, *names])
    pixels = method.clip.preprocess(open_image(image_bytes(3)))[None]
    want = dict(zip(method.classes, method.logits(pixels)[0].softmax(-1).tolist(), strict=True))
    assert got == pytest.approx(want, abs=1e-5)


def test_requests_at_once_and_per_second_are_limited_per_key(runs):
    entries = [KeyEntry(OPEN_ALL, ["*"], requests=1), KeyEntry(OPEN_ONE, ["zero"], rate=0.5)]
    with client_of(runs, keys=Keys(KeyFile(entries))) as client:
        free = threading.Event()
        client.portal.start_task_soon(client.app.state.service.batcher.call, free.wait)
        url, slow = "/v1/models/zero/classify", {"Authorization": f"Bearer {OPEN_ONE}"}
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(client.post, url, files=[file(1)], headers=USER)
            wait_for(lambda: client.app.state.service.traffic._requests, 30)
            second = client.post(url, files=[file(1)], headers=USER)
            assert second.status_code == 429
            assert second.headers["retry-after"] == "1"
            free.set()
            assert first.result().status_code == 200
        assert [client.post(url, files=[file(1)], headers=slow).status_code for _ in range(2)] == [200, 429]


# -- what is shown to whom ----------------------------------------------------------------------------


def test_what_is_open_tells_nothing_and_the_page_needs_nothing_from_elsewhere(runs):
    with client_of(runs, keys=KEYS) as client:
        assert client.get("/health/ready").json() == {"status": "ready"}
        assert client.get("/health/ready", headers=USER).json()["adapters"] == 6
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers=USER).status_code == 200
        assert client.get("/metrics", headers=MANAGER).status_code == 200
        page = client.get("/docs")
        assert "/v1/models/{name}/classify" in page.text
        assert "//" not in page.text.replace("http://HOST", "")
        assert "<script" not in page.text
        assert client.get("/redoc").status_code == 404
    with client_of(runs, replace(QUICK, open_metrics=True), KEYS) as client:
        assert client.get("/metrics").status_code == 200


def test_figures_are_bounded_and_answers_are_counted(runs):
    metrics = json.loads((runs / "zero" / "metrics.json").read_text())
    metrics |= {f"evaluation of {n}": "x" * 5000 for n in range(50)}
    (runs / "zero" / "metrics.json").write_text(json.dumps(metrics))
    with client_of(runs) as client:
        assert len(client.get("/v1/models/zero").content) < 30_000
        reply = client.post("/v1/models/zero/classify", files=[file(1)], data={"top": "1"}).json()
        client.post("/v1/models/zero/classify", files=[file(1)], data={"classes": "a,b"})
        text = client.get("/metrics").text
    name = reply["answers"][0]["classes"][0]["name"]
    assert f'dear_answers_total{{class="{name}",model="zero"}} 1.0' in text
    assert 'dear_answers_total{class="(other)",model="zero"} 1.0' in text
    assert 'dear_confidence_count{model="zero"} 2.0' in text


def test_keys_are_read_again_and_log_lines_name_client_and_key(runs, tmp_path, caplog):
    path = tmp_path / "keys.json"

    def write(key: str) -> None:
        path.write_text(json.dumps({"keys": [{"key": key, "models": ["*"], "name": "shop"}]}))

    write(OPEN_ALL)
    other = {"Authorization": f"Bearer {OPEN_ONE}"}
    with caplog.at_level("INFO", "dear.serve"), client_of(runs, keys=Keys.load(path)) as client:
        assert client.get("/v1/models", headers=USER).status_code == 200
        write(OPEN_ONE)
        wait_for(lambda: client.get("/v1/models", headers=other).status_code == 200)
        assert client.get("/v1/models", headers=USER).status_code == 401
        path.write_text("{broken")
        wait_for(lambda: "kept as they were" in caplog.text)
        assert client.get("/v1/models", headers=other).status_code == 200
    lines = [json.loads(record.message) for record in caplog.records]
    assert any(line.get("key") == "shop" and line.get("client") == "testclient" for line in lines)
    assert OPEN_ALL not in caplog.text
    assert OPEN_ONE not in caplog.text


def test_a_run_that_is_exchanged_under_load_is_never_refused(runs, tmp_path):
    """No 409 while files change, and never an old adapter under a new run's card."""
    kinds = [runs / "zero", runs / "coop"]
    expected = [float(alone(run, [1]).max()) for run in kinds]
    copies = [shutil.copytree(run, tmp_path / run.name) for run in kinds]
    with client_of(runs, replace(QUICK, loaded_adapters=1)) as client:
        for number in range(12):
            fresh = runs / ".fresh"
            shutil.copytree(copies[number % 2], fresh)
            for path in fresh.iterdir():
                path.touch()
            shutil.rmtree(runs / "zero")
            fresh.rename(runs / "zero")
            client.post("/v1/models/probe/classify", files=[file(1)])  # takes the only place
            reply = client.post("/v1/models/zero/classify", files=[file(1)])
            assert reply.status_code == 200, reply.text
            best = reply.json()["answers"][0]["classes"][0]["probability"]
            assert any(best == pytest.approx(one, abs=1e-5) for one in expected)
        wait_for(lambda: client.get("/v1/models/zero").json()["method"] == "coop")
        assert ask(client, "zero") == pytest.approx(expected[1], abs=1e-5)


def test_long_bodies_of_one_caller_leave_a_thread_for_another(monkeypatch):
    """The first has at most two of four threads."""
    reader, release = RequestReader(Decoding(32)), threading.Event()

    def read(body, header, options):
        if body[:1] == b"a":
            assert release.wait(30)
        return body[:1]

    monkeypatch.setattr(reader, "_read_json", read)

    class Post:
        headers: ClassVar = {"content-type": "application/json"}

        def __init__(self, letter: bytes) -> None:
            self.letter = letter

        async def stream(self):
            yield self.letter * 100_000

    async def go():
        first = [asyncio.create_task(reader.read(Post(b"a"), ClassifyOptions, "one")) for _ in range(6)]
        await asyncio.sleep(0.05)
        assert await asyncio.wait_for(reader.read(Post(b"b"), ClassifyOptions, "two"), 20) == b"b"
        release.set()
        assert await asyncio.gather(*first) == [b"a"] * 6

    asyncio.run(go())
    reader.close()


def test_limits_bound_the_bytes_that_requests_hold(runs):
    settings = replace(QUICK, limits=Limits(held_bytes=1000, upload_bytes=900))
    with client_of(runs, settings) as client:
        reply = client.post("/v1/models/zero/classify", files=[file(1)])
        assert (reply.status_code, "held" in reply.json()["error"]["message"]) == (429, True)
        assert client.app.state.service.traffic._bytes == {}


def test_callers_that_hold_much_leave_room_for_one_that_holds_little():
    traffic = Traffic(Limits(held_bytes=1000, upload_bytes=100))
    traffic.hold("a", 500)
    traffic.hold("b", 500)
    traffic.hold("c", 100)
    for caller, count in (("a", 1), ("c", 100)):
        with pytest.raises(Refused):
            traffic.hold(caller, count)
    traffic.hold("a", -500)
    traffic.hold("c", 100)


def test_decode_gives_errors_per_file_and_a_limit_for_all(decoder):
    contents = {"a": image_bytes(1), "b": b"no image", "c": image_bytes(2)}
    mixed = [upload(decoder, content, name) for name, content in contents.items()]
    answers = asyncio.run(decoder.decode(mixed))
    assert [isinstance(one, Refused) for one in answers] == [False, True, False]
    with pytest.raises(Refused, match="2,000"):
        asyncio.run(Decoder(1, Decoding(24, Limits(request_pixels=2000))).decode(mixed))


def test_new_classes_are_calibrated_as_by_the_model_itself(runs):
    calibration = {"temperature": 2.0, "new_temperature": 3.0, "logits": [0.5] * 40}
    words = {"format": "dear calibration", "schema": 1, "images": 40, "modes": {"default": calibration}}
    (runs / "coop" / "calibration.json").write_text(json.dumps(words))
    names = [f"thing number {n}" for n in range(20)]
    with client_of(runs) as client:
        body = {"top": "23", "classes": "+" + ",".join(names)}
        reply = client.post("/v1/models/coop/classify", files=[file(3)], data=body)
    got = {one["name"]: one["probability"] for one in reply.json()["answers"][0]["classes"]}
    model = Model.load(runs / "coop", tiny_clip(dtype=torch.float32)).with_classes(names, add=True)
    row = model.probabilities([open_image(image_bytes(3))])[0]
    assert got == pytest.approx(dict(zip(model.classes, row.tolist(), strict=True)), abs=1e-5)


def test_texts_that_a_request_has_begun_are_gone_on_with(runs, monkeypatch):
    names, encoded = [f"thing number {n}" for n in range(60)], []
    settings = replace(QUICK, limits=replace(QUICK.limits, seconds=0.5))
    rows = class_lists._encode_classes

    def slow(method):
        encoded.extend(method.classes)
        time.sleep(0.2)
        return rows(method)

    with client_of(runs, settings) as client:
        wait_for(lambda: client.post("/v1/models/coop/classify", files=[file(1)]).status_code == 200)
        monkeypatch.setattr(class_lists, "LARGEST_SLICE", 16)
        monkeypatch.setattr(class_lists, "_encode_classes", slow)
        statuses = []
        while 200 not in statuses and len(statuses) < 8:
            data = {"classes": "+" + ",".join(names)}
            statuses.append(client.post("/v1/models/coop/classify", files=[file(1)], data=data).status_code)
    assert statuses[0] == 503
    assert statuses[-1] == 200
    assert sorted(encoded) == sorted(names)  # each once
