"""The HTTP service: answers, mixed batches, keys, limits, and a folder that changes while it is served."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import shutil
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch
from clients import MANAGE, OPEN_ALL, OPEN_ONE, alone, client_of, file, gallery, wait_for
from fastapi.testclient import TestClient
from PIL import Image
from serving import QUICK, RUNS, image_bytes, make_run
from tiny import tiny_clip

from dear.calibration.calibration import Calibration
from dear.errors import DearError
from dear.runs.folder import load_run, write_calibration
from dear.serve.app import make_app
from dear.serve.batcher import Batcher
from dear.serve.dear_stack import stack_key
from dear.serve.errors import Refused
from dear.serve.keys import KeyEntry, KeyFile, Keys
from dear.serve.requests import options_of_fields
from dear.serve.schemas import ClassifyOptions
from dear.serve.service import Service
from dear.serve.settings import ServeSettings
from dear.serve.store import AdapterStore
from dear.serve.turns import Pace
from dear.tasks.retrieve import retrieve


def flat(size: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (size, size)).save(content, "PNG")
    return content.getvalue()


def test_every_adapter_answers_as_it_does_alone(shared, made_runs):
    assert shared.get("/health/live").json() == {"status": "live"}
    assert shared.get("/health/ready").json()["adapters"] == len(RUNS)
    for name in RUNS:
        reply = shared.post(f"/v1/models/{name}/classify", files=[file(3), file(4)], data={"top": "3"})
        assert reply.status_code == 200, reply.text
        expected = alone(made_runs / name, [3, 4])
        for answer, row in zip(reply.json()["answers"], expected, strict=True):
            got = {entry["name"]: entry["probability"] for entry in answer["classes"]}
            want = dict(zip(("red", "green", "blue"), row.tolist(), strict=True))
            assert got == pytest.approx(want, abs=1e-5)
            assert list(got.values()) == sorted(got.values(), reverse=True)


def test_a_mixed_batch_gives_every_image_the_answer_of_its_own_adapter(runs):
    """All requests wait for one batch while the device is busy; neighbors of any kind change nothing."""
    with client_of(runs, ServeSettings(QUICK.limits, largest_batch=64, decoders=1)) as client:
        for name in RUNS:
            client.post(f"/v1/models/{name}/classify", files=[file(0)])  # loaded
        answers: dict[tuple[str, int], dict] = {}

        def ask(name: str, seed: int) -> None:
            reply = client.post(f"/v1/models/{name}/classify", files=[file(seed)], data={"top": "3"})
            answers[name, seed] = reply.json()["answers"][0]

        batcher, free = client.app.state.service.batcher, threading.Event()
        batcher._pace = Pace(turn_seconds=1e9)  # on a busy machine batches would be smaller
        blocked = client.portal.start_task_soon(batcher.call, free.wait)
        wait_for(lambda: batcher.queued == 1)
        threads = [threading.Thread(target=ask, args=(n, s)) for s in range(4) for n in RUNS]
        for thread in threads:
            thread.start()
        wait_for(lambda: batcher.queued == 4 * len(RUNS) + 1, 90)  # decoders may start slowly
        free.set()
        blocked.result(60)
        for thread in threads:
            thread.join()
        counted = client.get("/metrics").text
    assert 'dear_batch_images_bucket{le="1.0"} 6.0' in counted  # the first six came alone
    assert "dear_batch_images_count 7.0" in counted  # the rest together
    for name in RUNS:
        expected = alone(runs / name, [0, 1, 2, 3])
        for seed in range(4):
            got = {e["name"]: e["probability"] for e in answers[name, seed]["classes"]}
            want = dict(zip(("red", "green", "blue"), expected[seed].tolist(), strict=True))
            assert got == pytest.approx(want, abs=1e-5)


def test_json_other_classes_and_embeddings(shared):
    clip = tiny_clip(dtype=torch.float32)
    body = {"images": [base64.b64encode(image_bytes(1)).decode()], "classes": ["cat", "dog"], "top": 9}
    answer = shared.post("/v1/models/zero/classify", json=body).json()["answers"][0]
    assert {entry["name"] for entry in answer["classes"]} == {"cat", "dog"}
    assert sum(entry["probability"] for entry in answer["classes"]) == pytest.approx(1)
    refused = shared.post("/v1/models/probe/classify", json=body)
    assert refused.status_code == 400
    assert "linear-probe" in refused.json()["error"]["message"]
    inputs = ["a cat", f"data:image/png;base64,{body['images'][0]}"]
    result = shared.post("/v1/embeddings", json={"input": inputs, "model": clip.name}).json()
    text = torch.nn.functional.normalize(clip.encode_text(["a cat"]), dim=-1)[0]
    assert result["data"][0]["embedding"] == pytest.approx(text.tolist(), abs=1e-5)
    assert sum(v * v for v in result["data"][1]["embedding"]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("status", "sentence", "request_"),
    [
        (404, "'nobody'", {"path": "nobody", "files": [file(1)]}),
        (400, "no image", {"json": {"top": 1}}),
        (400, "x.txt: is a text file", {"files": [("files", ("x.txt", b"hello there, no image"))]}),
        (400, "cut.png:", {"files": [("files", ("cut.png", image_bytes(1)[:200]))]}),
        (413, "1,000,000", {"files": [("files", ("wide.png", flat(1100)))]}),
        (413, "is 6", {"files": [file(s) for s in range(7)]}),
        (413, "bytes", {"files": [("files", ("big.png", bytes(300_000)))]}),
        (400, "'photo'", {"files": [("photo", ("a.png", image_bytes(1)))]}),
        (400, "top:", {"files": [file(1)], "data": {"top": "many"}}),
        (400, "top:", {"files": [file(1)], "data": {"top": "0"}}),
        (400, "'colour'", {"files": [file(1)], "data": {"colour": "red"}}),
        (400, "named twice", {"files": [file(1)], "data": {"classes": "cat, cat"}}),
        (400, "'red'", {"files": [file(1)], "data": {"classes": "cat, +Red"}}),
        (400, "after the +", {"files": [file(1)], "data": {"classes": "cat, +"}}),
        (400, "reject:", {"files": [file(1)], "data": {"reject": "maybe"}}),
        (400, "reject:", {"files": [file(1)], "data": {"reject": "0.5"}}),
        (415, "multipart/form-data", {"content": b"abc"}),
        (400, "not valid base64", {"json": {"images": ["%%%"]}}),
        (400, "JSON", {"content": b'{"top": NaN}', "headers": {"content-type": "application/json"}}),
        (400, "unknown", {"json": {"immages": []}}),
    ],
)
def test_wrong_requests_get_a_sentence(shared, status, sentence, request_):
    reply = shared.post(f"/v1/models/{request_.pop('path', 'zero')}/classify", **request_)
    assert reply.status_code == status, reply.text
    assert sentence in reply.json()["error"]["message"]
    assert shared.post("/v1/models/zero/classify", files=[file(1)]).status_code == 200


@pytest.mark.parametrize("text", ["", " \n", "word " * 80, "<|endoftext|>"])
def test_texts_that_have_no_features_are_refused(shared, text):
    reply = shared.post("/v1/embeddings", json={"input": ["a cat", text]})
    assert (reply.status_code, repr(text)[:9] in reply.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("classes", ["+red, cat", "cat, +red", "cat,+ red,"])
def test_classes_are_added_as_on_the_command_line(shared, classes):
    fields = {"classes": classes, "top": "9"}
    answer = shared.post("/v1/models/zero/classify", files=[file(1)], data=fields).json()["answers"][0]
    assert {entry["name"] for entry in answer["classes"]} == {"red", "green", "blue", "cat"}


@pytest.mark.parametrize(("word", "refuses"), [("ON", True), ("1", True), ("no", False), ("False", False)])
def test_reject_is_a_boolean(word, refuses):
    assert options_of_fields({"reject": [word]}, ClassifyOptions).reject is refuses


def test_a_key_opens_what_it_is_for_and_nothing_else(runs):
    entries = [KeyEntry(OPEN_ONE, ["probe"]), KeyEntry(OPEN_ALL, ["*"])]
    keys = Keys(KeyFile(entries, MANAGE))
    with client_of(runs, keys=keys) as client:

        def ask(name: str, key: str | None):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return client.post(f"/v1/models/{name}/classify", files=[file(1)], headers=headers)

        assert ask("probe", None).status_code == 401
        assert ask("probe", "another-key-entirely").status_code == 401
        assert ask("probe", OPEN_ONE).status_code == 200
        assert ask("zero", OPEN_ONE).status_code == 403
        assert ask("zero", OPEN_ALL).status_code == 200
        assert ask("zero", MANAGE).status_code == 401
        listed = client.get("/v1/models", headers={"Authorization": f"Bearer {OPEN_ONE}"}).json()["data"]
        assert [card["id"] for card in listed] == ["probe"]
        assert listed[0]["classes"] == ["red", "green", "blue"]
        assert client.post("/v1/models/zero/unload").status_code == 401
        as_user = {"Authorization": f"Bearer {OPEN_ALL}"}
        assert client.post("/v1/models/zero/unload", headers=as_user).status_code == 401


def test_management_is_off_unless_asked_for(shared):
    reply = shared.put("/v1/models/new/upload", content=b"x")
    assert reply.status_code == 403
    assert "management key" in reply.json()["error"]["message"]


def packed(run: Path) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for path in run.iterdir():
            if path.is_file() and not path.name.startswith("."):
                archive.write(path, f"{run.name}/{path.name}")
    return file.getvalue()


def test_runs_are_uploaded_unloaded_and_loaded(runs, made_runs, tmp_path):
    headers = {"Authorization": f"Bearer {MANAGE}"}
    open_key = {"Authorization": f"Bearer {OPEN_ALL}"}
    with client_of(runs, keys=Keys(KeyFile([KeyEntry(OPEN_ALL, ["*"])], MANAGE))) as client:
        shutil.copytree(made_runs / "coop", tmp_path / "calibrated")
        write_calibration(tmp_path / "calibrated", Calibration(images=4, folds=2))
        fresh = client.put(
            "/v1/models/fresh/upload", content=packed(tmp_path / "calibrated"), headers=headers
        )
        assert fresh.json()["method"] == "coop"
        reply = client.post("/v1/models/fresh/classify", files=[file(1)], headers=open_key)
        assert reply.status_code == 200
        client.post("/v1/models/fresh/unload", headers=headers)
        assert client.get("/v1/models/fresh", headers=open_key).status_code == 404
        assert client.post("/v1/models/fresh/load", headers=headers).status_code == 200

        broken = io.BytesIO()
        with zipfile.ZipFile(broken, "w") as archive:
            archive.writestr("../evil.py", "x")
        for content, sentence in (
            (b"no archive", "not a zip"),
            (broken.getvalue(), "adapter.safetensors"),
            (packed(made_runs / "coop")[:-400], "not a zip"),
        ):
            reply = client.put("/v1/models/fresh/upload", content=content, headers=headers)
            assert reply.status_code == 400
            assert sentence in reply.json()["error"]["message"]
        assert client.put("/v1/models/.hidden/upload", content=b"x", headers=headers).status_code == 400
        assert client.get("/v1/models/fresh", headers=open_key).status_code == 200  # the old one stays
    assert not [path.name for path in runs.iterdir() if path.name.startswith(".")]
    assert not (tmp_path / "evil.py").exists()


def test_the_folder_changes_while_it_is_served(runs, tmp_path):
    with client_of(runs) as client:

        def version(name: str) -> str | None:
            reply = client.get(f"/v1/models/{name}")
            return reply.json()["version"] if reply.status_code == 200 else None

        def red(name: str) -> float:
            result = client.post(f"/v1/models/{name}/classify", files=[file(5)], data={"top": "3"}).json()
            return {e["name"]: e["probability"] for e in result["answers"][0]["classes"]}["red"]

        before, first = version("probe"), red("probe")
        make_run(tmp_path / "another", "linear-probe", C=0.01)
        shutil.copytree(tmp_path / "another", runs / ".coming")
        (runs / ".coming").rename(runs / "late")  # a new run
        wait_for(lambda: version("late") is not None)
        assert red("late") == pytest.approx(float(alone(runs / "late", [5])[0, 0]), abs=1e-5)

        shutil.copy(tmp_path / "another/adapter.safetensors", runs / "probe/adapter.safetensors")
        wait_for(lambda: version("probe") != before)
        assert red("probe") == pytest.approx(red("late"), abs=1e-6)
        assert red("probe") != pytest.approx(first, abs=1e-6)

        good = version("probe")
        data = (runs / "probe/adapter.safetensors").read_bytes()
        (runs / "probe/adapter.safetensors").write_bytes(data[:100])  # broken: the old one stays
        service = client.app.state.service
        wait_for(lambda: "probe" in service.store.problems())
        assert version("probe") == good
        assert red("probe") == pytest.approx(red("late"), abs=1e-6)
        shutil.rmtree(runs / "late")
        wait_for(lambda: version("late") is None)


def test_least_recently_used_adapters_make_room(runs):
    with client_of(runs, ServeSettings(QUICK.limits, loaded_adapters=2)) as client:
        for name in ("zero", "probe", "coop", "zero"):
            assert client.post(f"/v1/models/{name}/classify", files=[file(1)]).status_code == 200
        assert client.app.state.service.store.loaded == 2


def test_logs_name_the_request_and_no_content(runs, caplog):
    with caplog.at_level(logging.INFO, "dear.serve"), client_of(runs) as client:
        reply = client.post("/v1/models/zero/classify", files=[file(1)], headers={"X-Request-ID": "abc-1"})
    assert reply.headers["x-request-id"] == "abc-1"
    line = next(json.loads(r.message) for r in caplog.records if "abc-1" in r.message)
    assert line == {
        "request": "abc-1", "client": "testclient", "key": None, "method": "POST",
        "route": "/v1/models/{name}/classify", "model": "zero", "status": 200, "seconds": line["seconds"],
    }  # fmt: skip


def test_openapi_names_every_route(shared):
    description = shared.get("/openapi.json").json()
    paths, schemas = description["paths"], description["components"]["schemas"]
    assert {"/v1/models/{name}/classify", "/v1/embeddings", "/metrics", "/health/ready"} <= set(paths)
    body = paths["/v1/models/{name}/classify"]["post"]["requestBody"]["content"]
    names = {way: one["schema"]["$ref"].rpartition("/")[2] for way, one in body.items()}
    fields = {way: list(schemas[name]["properties"]) for way, name in names.items()}
    options = ["top", "classes", "reject", "certain"]
    assert fields == {"multipart/form-data": ["files", *options], "application/json": ["images", *options]}
    schema = paths["/v1/models/{name}/classify"]["post"]["responses"]["200"]["content"]["application/json"]
    assert schema["schema"]["$ref"].endswith("/Classified")


# -- the queue ----------------------------------------------------------------------------------------


def test_jobs_wait_for_each_other_and_a_full_queue_refuses():
    sizes, gate = [], threading.Event()

    def compute(jobs):
        gate.wait(5)
        sizes.append(len(jobs))
        return [job * 2 for job in jobs]

    batcher = Batcher(compute, largest=3, longest_wait=0.05, most_queued=5)

    async def ask():
        pending = asyncio.create_task(batcher.compute([1, 2, 3, 4, 5]))
        await asyncio.sleep(0.01)
        with pytest.raises(Refused, match=r"\b5\b") as refused:
            await batcher.compute([6])
        assert refused.value.http_status == 429
        assert refused.value.retry_after == 1
        gate.set()
        assert await pending == [2, 4, 6, 8, 10]
        assert sizes == [3, 2]
        batcher.close()
        with pytest.raises(Refused) as refused:
            await batcher.compute([1])
        assert refused.value.http_status == 503

    asyncio.run(asyncio.wait_for(ask(), 10))


def test_an_idle_device_starts_at_once_and_a_busy_one_collects():
    sizes, gate, started = [], threading.Event(), threading.Event()

    def compute(jobs):
        sizes.append(len(jobs))
        started.set()
        gate.wait(5)
        return jobs

    batcher = Batcher(compute, largest=8, longest_wait=3.0, most_queued=99)

    async def ask():
        first = asyncio.create_task(batcher.compute(["first"]))
        await asyncio.to_thread(started.wait, 5)  # long before the longest wait is over
        others = [asyncio.create_task(batcher.compute([n])) for n in range(8)]
        await asyncio.sleep(0.01)
        gate.set()
        await asyncio.gather(first, *others)

    began = time.monotonic()
    asyncio.run(asyncio.wait_for(ask(), 10))
    assert time.monotonic() - began < 2.5
    assert sizes == [1, 8]
    batcher.close()


def test_a_failed_batch_fails_alone_and_closing_answers_what_waits():
    def compute(jobs):
        if "bad" in jobs:
            raise ValueError("bad job")
        return jobs

    batcher = Batcher(compute, largest=1, longest_wait=0, most_queued=9)

    async def ask():
        bad, good = (asyncio.create_task(batcher.compute([job])) for job in ("bad", "good"))
        await asyncio.sleep(0)
        await asyncio.to_thread(batcher.close)
        with pytest.raises(ValueError, match="bad job"):
            await bad
        assert await good == ["good"]

    asyncio.run(asyncio.wait_for(ask(), 10))
    assert batcher.queued == 0


def test_a_full_batch_begins_while_the_device_computes_the_one_before():
    events, free = [], threading.Event()

    def begin(jobs):
        free.wait(5)
        if "bad" in jobs:
            raise ValueError("bad job")
        events.append(("begin", *jobs))

        def finish():
            events.append(("finish", *jobs))
            if "late" in jobs:
                raise ValueError("late job")
            return [2 * job for job in jobs]

        return finish

    batcher = Batcher(begin, largest=3, longest_wait=0, most_queued=99)

    async def ask():
        jobs = asyncio.create_task(batcher.compute([1, 2, 3, 4, 5, 6, 7]))
        await asyncio.sleep(0.05)
        texts = asyncio.create_task(batcher.call(lambda: events.append(("texts",)), cost=0.5))
        free.set()
        assert await jobs == [2, 4, 6, 8, 10, 12, 14]
        await texts
        for wrong in ("bad", "late"):
            with pytest.raises(ValueError, match=f"{wrong} job"):
                await batcher.compute([wrong])
        last = asyncio.create_task(batcher.compute(list(range(8))))
        await asyncio.sleep(0)
        await asyncio.to_thread(batcher.close)
        assert await last == list(range(0, 16, 2))

    asyncio.run(asyncio.wait_for(ask(), 10))
    first = [("begin", 1, 2, 3), ("begin", 4, 5, 6), ("finish", 1, 2, 3), ("finish", 4, 5, 6)]
    assert events[:4] == first  # the second one was full
    assert events[4:7] == [("begin", 7), ("finish", 7), ("texts",)]  # one image alone waits for the device
    assert events[7:9] == [("begin", "late"), ("finish", "late")]
    assert batcher.queued == 0


@pytest.mark.parametrize(
    "text",
    [
        '{"keys": [{"key": "short", "models": []}]}',
        '{"key": []}',
        "[]",
        '{"keys": [], "keys": []}',
        "nonsense",
    ],
)
def test_key_files_that_are_none(tmp_path, text):
    (tmp_path / "keys.json").write_text(text)
    with pytest.raises(DearError):
        Keys.load(tmp_path / "keys.json")


def test_retrieval_is_that_of_the_command(runs, tmp_path):
    images = gallery(tmp_path)
    service = Service(runs, tiny_clip(dtype=torch.float32), QUICK, {"stored": images})
    with TestClient(make_app(service)) as client:
        assert client.get("/v1/galleries").json() == {"galleries": ["stored"]}
        reply = client.post("/v1/models/roles/retrieve", files=[file(3)], data={"top": "2"})
        assert reply.status_code == 200, reply.text
        got = reply.json()["answers"][0]["attributes"]
        one = client.post(
            "/v1/models/roles/retrieve", files=[file(3)], data={"attribute": "color", "top": "1"}
        )
        plain = client.post(
            "/v1/models/probe/retrieve", files=[file(3)], data={"gallery": "stored", "top": "1"}
        )
        for data, sentence in (
            ({"gallery": "nothing"}, "'nothing'"),
            ({"attribute": "smell"}, "smell"),
        ):
            refused = client.post("/v1/models/roles/retrieve", files=[file(3)], data=data)
            assert sentence in refused.json()["error"]["message"]
        refused = client.post("/v1/models/probe/retrieve", files=[file(3)], data={"attribute": "color"})
        assert refused.status_code == 400
    method = load_run(runs / "roles", tiny_clip(dtype=torch.float32))
    for result in retrieve(method, query=tmp_path / "3.png", gallery=images, by="features", top=2):
        assert [match["key"] for match in got[result.attribute]] == list(result.keys)
        assert [match["similarity"] for match in got[result.attribute]] == pytest.approx(
            list(result.similarity), abs=1e-5
        )
    assert list(one.json()["answers"][0]["attributes"]) == ["Color"]
    assert plain.json()["answers"][0]["attributes"]["image"][0]["key"].endswith("3.png")


def test_reject_without_a_threshold_is_refused(shared):
    reply = shared.post("/v1/models/probe/classify", files=[file(1)], data={"reject": "true"})
    assert reply.status_code == 400
    assert "reject" in reply.json()["error"]["message"]


def test_reject_with_a_calibration(runs):
    """Scores are largest logits over the temperature; the threshold lies between those of two images."""
    method = load_run(runs / "probe", tiny_clip(dtype=torch.float32))
    pixels = torch.stack([method.clip.preprocess(Image.open(io.BytesIO(image_bytes(s)))) for s in (1, 2)])
    best = (method.logits(pixels) / 2).amax(dim=1).tolist()
    middle = sum(best) / 2
    calibration = {"temperature": 2.0, "new_temperature": 2.0, "logits": [middle] * 40}
    words = {"format": "dear calibration", "schema": 1, "images": 40, "modes": {"default": calibration}}
    (runs / "probe" / "calibration.json").write_text(json.dumps(words))
    with client_of(runs) as client:
        reply = client.post("/v1/models/probe/classify", files=[file(1), file(2)], data={"reject": "true"})
    assert reply.status_code == 200, reply.text
    answers = reply.json()["answers"]
    assert [a["rejected"] for a in answers] == [score < middle for score in best]
    expected = (method.logits(pixels) / 2).softmax(dim=-1).amax(dim=1).tolist()
    assert [a["classes"][0]["probability"] for a in answers] == pytest.approx(expected, rel=1e-4)


def test_adapters_of_a_folder_are_on_one_backbone_object(runs):
    """Otherwise a batch would compute the shared layers once per adapter, and a GPU hold a copy for each."""
    clip = tiny_clip(dtype=torch.float32)
    store = AdapterStore(runs, clip)
    store.refresh()
    methods = [store.get(name).method for name in RUNS]
    assert all(method.clip is clip for method in methods)
    one, other = (store.get(name).method for name in ("roles", "other-roles"))
    assert stack_key(one) == stack_key(other)
