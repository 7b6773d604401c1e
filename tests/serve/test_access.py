"""Who may do what, and what an answer may show: every route, every method, every kind of key."""

from __future__ import annotations

import asyncio
import io
import json
import random
import re
import stat
import sys
import tarfile
import time
import zipfile
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
import torch
from clients import MANAGE, OPEN_ALL, OPEN_ONE, client_of, file, gallery
from serving import image_bytes
from starlette.routing import Route
from tiny import tiny_clip

import dear
from dear.serve.galleries import Galleries
from dear.serve.keys import KeyEntry, KeyFile, Keys
from dear.serve.routes import serving_routes
from hostile import packed

KEYS = {"none": None, "wrong": "a-wrong-key-of-length", "one": OPEN_ONE, "all": OPEN_ALL, "manage": MANAGE}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
ANYBODY = dict.fromkeys(KEYS, True)
CALLERS = {"none": False, "wrong": False, "one": True, "all": True, "manage": False}
EVERY_ADAPTER = {**CALLERS, "one": False}
MANAGER = dict.fromkeys(KEYS, False) | {"manage": True}
#: which keys may use a route; the adapter of the path is `zero`, which the key "one" has no access to
ACCESS = {
    ("POST", "/v1/models/{name}/classify"): EVERY_ADAPTER,
    ("POST", "/v1/models/{name}/retrieve"): EVERY_ADAPTER,
    ("POST", "/v1/classify"): CALLERS,
    ("POST", "/v1/embeddings"): CALLERS,
    ("GET", "/v1/models"): CALLERS,
    ("GET", "/v1/models/{name}"): EVERY_ADAPTER,
    ("GET", "/v1/galleries"): CALLERS,
    ("POST", "/v1/models/{name}/load"): MANAGER,
    ("POST", "/v1/models/{name}/unload"): MANAGER,
    ("PUT", "/v1/models/{name}/upload"): MANAGER,
    ("GET", "/v1/management/problems"): MANAGER,
    ("GET", "/metrics"): {**CALLERS, "manage": True},
    ("GET", "/health/live"): ANYBODY,
    ("GET", "/health/ready"): ANYBODY,
    ("GET", "/docs"): ANYBODY,
    ("GET", "/openapi.json"): ANYBODY,
}
ACCESS |= {("HEAD", path): keys for (method, path), keys in ACCESS.items() if method == "GET"}


def keys() -> Keys:
    return Keys(KeyFile([KeyEntry(OPEN_ONE, ["probe"]), KeyEntry(OPEN_ALL, ["*"])], MANAGE))


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def client(made_runs):
    with client_of(made_runs, keys=keys()) as client:
        yield client


def test_every_route_has_a_row():
    routes = {
        (m, route.path) for route in serving_routes() if isinstance(route, Route) for m in route.methods or ()
    }
    assert routes == set(ACCESS)


@pytest.mark.parametrize("path", sorted({path for _, path in ACCESS}))
def test_every_method_and_key_of_a_route(client, path):
    for method in METHODS:
        for kind, key in KEYS.items():
            reply = client.request(method, path.format(name="zero"), headers=bearer(key))
            if (method, path) not in ACCESS:
                assert reply.status_code == 405, (method, kind)
            elif ACCESS[method, path][kind]:
                assert reply.status_code not in (401, 403, 405, 500), (method, kind, reply.text)
            else:
                assert reply.status_code in (401, 403), (method, kind, reply.text)
        client.post("/v1/models/zero/load", headers=bearer(MANAGE))


def test_metrics_show_a_key_its_adapters(client):
    for name in ("zero", "probe"):
        client.post(f"/v1/models/{name}/classify", files=[file(1)], headers=bearer(OPEN_ALL))
    text = {
        kind: client.get("/metrics", headers=bearer(KEYS[kind])).text for kind in ("one", "all", "manage")
    }
    assert 'model="probe"' in text["one"]
    assert 'model="zero"' not in text["one"]
    assert 'model="zero"' in text["all"]
    assert 'model="zero"' in text["manage"]


def test_addresses_with_a_slash_at_the_end_are_not_redirected(client):
    assert client.get("/v1/models/", follow_redirects=False).status_code == 404


def test_long_addresses_are_refused_without_being_repeated(client):
    reply = client.get(f"/v1/models/{'a' * 20_000}", headers=bearer(OPEN_ALL))
    assert (reply.status_code, len(reply.content) < 1000) == (431, True)


def test_the_rate_counts_every_route(made_runs):
    slow = Keys(KeyFile([KeyEntry(OPEN_ALL, ["*"], rate=0.001)]))
    for path in ("/v1/models", "/v1/models/zero", "/v1/galleries", "/metrics"):
        with client_of(made_runs, keys=slow) as client:
            statuses = [client.get(path, headers=bearer(OPEN_ALL)).status_code for _ in range(2)]
        assert statuses == [200, 429], path


# -- what errors show ---------------------------------------------------------------------------------

NAMES = ["..%2fprobe", "%252e%252e", "a%00b", "．．", "-", "a" * 5000, "x/../../etc/passwd", "%7Bname%7D"]
BODIES = {
    "json": [
        {"images": ["http://127.0.0.1:9/a.png"]},
        {"images": ["file:///etc/passwd"]},
        {"images": [f"data:video/jpeg;base64,{','.join(['QUFB'] * 5000)}"]},
        {"images": [f"data:image/jpeg;base64,{','.join(['QUFB'] * 5000)}"]},
        {"images": ["data:text/plain,hello"]},
        {"input": "http://127.0.0.1:9/a.png"},
        {"input": ["ftp://127.0.0.1:9/a.png"] * 3},
        {"input": [[1, 2, 3]]},
        {"input": ["", "word " * 80, "<|endoftext|>"]},
        {"input": ["word " * 80]},
        {"images": ["QQ=="], "classes": ["\u0000", ""]},
        {"images": ["QQ=="], "gallery": "/etc", "by": "heads"},
        {"models": ["../zero"], "images": ["QQ=="]},
    ],
    "content": [b"", b"\xff", b"{", b"&".join([b"a=b"] * 200_000)[:150_000]],
}
FIELDS = ["top", "classes", "reject", "certain", "models", "gallery", "by", "attribute", "input"]
VALUES = ["", "-1", "nan", "1e400", "9" * 40, "½", "\x00", "\u202e", ",,", "++a", "../x", "<|endoftext|>"]
TYPES = ["application/json", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "text/x"]
SOURCE = re.escape(str(Path(dear.__file__).parents[1]))
LEAKS = re.compile(
    rf"{SOURCE}|0x[0-9a-f]{{6,}}|/home|/tmp|/usr|site-packages|dear\.[a-z]+\.|\.py\b|Traceback"
)


def hostile_requests():
    for name in NAMES:
        yield "GET", f"/v1/models/{name}", {}
        yield "POST", f"/v1/models/{name}/classify", {"files": [file(1)]}
        yield "PUT", f"/v1/models/{name}/upload", {"content": b"x"}
    for path in ("/v1/models/zero/classify", "/v1/classify", "/v1/embeddings", "/v1/models/roles/retrieve"):
        for body in BODIES["json"]:
            yield "POST", path, {"json": body}
        for content in BODIES["content"]:
            for kind in TYPES:
                yield "POST", path, {"content": content, "headers": {"content-type": kind}}
        for field, value in random.Random(path).sample(list(product(FIELDS, VALUES)), 40):
            yield "POST", path, {"files": [file(1)], "data": {"models": "zero", field: value}}
        yield "POST", path, {"files": [("files", ("../../etc/passwd", image_bytes(1, size=1)))]}
        yield (
            "POST",
            path,
            {"files": [("files", ("a.svg", b"<svg><image href='http://127.0.0.1:9/'/></svg>"))]},
        )


def test_hostile_requests_show_nothing_of_the_server_and_open_nothing(client):
    connects: list[str] = []
    armed = [True]

    def audit(event: str, values: tuple) -> None:
        if not armed[0]:
            return
        if event == "socket.connect" and ":9" in str(values) + ":" and "'127.0.0.1', 9" in str(values):
            connects.append(str(values))
        if event == "open" and "passwd" in str(values[0]):
            connects.append(str(values))

    sys.addaudithook(audit)
    try:
        for method, path, options in hostile_requests():
            for key in (OPEN_ALL, MANAGE) if "data" not in options else (OPEN_ALL,):
                headers = {**options.get("headers", {}), **bearer(key)}
                with suppress(ValueError):  # the client itself refuses an address
                    reply = client.request(method, path, **{**options, "headers": headers})
                    if reply.status_code >= 400:
                        assert reply.status_code != 500, (method, path, options, reply.text)
                        assert not LEAKS.search(reply.text), (path, reply.text)
                        assert len(reply.content) < 2000
    finally:
        armed[0] = False
    assert connects == []


def test_a_broken_run_is_refused_without_the_place_of_its_files(runs):
    (runs / "zero" / "config.json").write_text("{broken")
    with client_of(runs, keys=keys()) as client:
        reply = client.get("/v1/models/zero", headers=bearer(OPEN_ALL))
        problems = client.get("/v1/management/problems", headers=bearer(MANAGE))
    assert reply.status_code == 409
    assert str(runs) not in reply.text + problems.text
    assert "zero/config.json" in problems.text


# -- uploads and galleries ----------------------------------------------------------------------------


def test_an_upload_deletes_nothing_that_it_did_not_write(runs):
    (runs / "zero" / "photos").mkdir()
    (runs / "zero" / "photos" / "precious.txt").write_text("precious")
    with client_of(runs, keys=keys()) as client:
        reply = client.put("/v1/models/zero/upload", content=packed(runs / "coop"), headers=bearer(MANAGE))
    assert (reply.status_code, "photos" in reply.text) == (409, True)
    assert (runs / "zero" / "photos" / "precious.txt").read_text() == "precious"


def config_of(run, **changes):
    """The configuration of a run with changed entries, as bytes."""
    return json.dumps({**json.loads((run / "config.json").read_text()), **changes}).encode()


def repeated_class(run):
    first, _, *others = json.loads((run / "config.json").read_text())["classes"]
    return packed(run, config_json=config_of(run, classes=[first, first, *others]))


def long_directory(run):
    good = packed(run)
    end = good.rindex(b"PK\x05\x06")
    return good[: end + 12] + (2**20).to_bytes(4, "little") + good[end + 16 :]


def long_safetensors_header(run):
    length = 99 * 2**20
    return packed(run, adapter_safetensors=length.to_bytes(8, "little") + b"{" + b" " * (length - 2) + b"}")


def config_names_code(run):
    return packed(
        run, config_json=config_of(run, auto_map={"AutoModel": "evil.Model"}, trust_remote_code=True)
    )


def tokenizer_names_code(run):
    return with_member(
        run, zipfile.ZipInfo("tokenizer_config.json"), b'{"auto_map": {"AutoTokenizer": "evil.T"}}'
    )


def module_of_code(run):
    return with_member(run, zipfile.ZipInfo("evil.py"), b"raise SystemExit")


def symbolic_link(run):
    link = zipfile.ZipInfo("config.json")
    link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    return with_member(run, link, b"/etc/passwd", without="config.json")


def hard_link(run):
    """Zip archives have none; tar archives are not accepted."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(run / "config.json", "config.json")
        link = tarfile.TarInfo("adapter.safetensors")
        link.type, link.linkname = tarfile.LNKTYPE, "/etc/passwd"
        archive.addfile(link)
    return file.getvalue()


def with_member(run, info, content, without=""):
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(packed(run))) as good, zipfile.ZipFile(file, "w") as archive:
        for name in good.namelist():
            if name != without:
                archive.writestr(name, good.read(name))
        archive.writestr(info, content)
    return file.getvalue()


@pytest.mark.parametrize(
    "archive",
    [
        repeated_class,
        long_directory,
        long_safetensors_header,
        config_names_code,
        tokenizer_names_code,
        module_of_code,
        symbolic_link,
        hard_link,
    ],
)
def test_uploads_that_cannot_be_runs(runs, archive):
    modules = set(sys.modules)
    with client_of(runs, keys=keys()) as client:
        reply = client.put("/v1/models/new/upload", content=archive(runs / "coop"), headers=bearer(MANAGE))
    assert reply.status_code == 400, reply.text
    assert not LEAKS.search(reply.text), reply.text
    assert not [path for path in runs.iterdir() if "new" in path.name or path.is_symlink()]
    assert "evil" not in set(sys.modules) - modules


def test_an_image_of_one_pixel_is_answered(client):
    dot = [("files", ("dot.png", image_bytes(1, size=1)))]
    reply = client.post("/v1/models/zero/classify", files=dot, headers=bearer(OPEN_ALL))
    assert reply.status_code == 200, reply.text
    assert [one["image"] for one in reply.json()["answers"]] == ["dot.png"]


@pytest.mark.parametrize(("fields", "status"), [(1_000_000, 413), (30_000, 415)])
def test_a_url_encoded_body_of_many_fields_is_refused_unread(client, fields, status):
    kind = {"content-type": "application/x-www-form-urlencoded", **bearer(OPEN_ALL)}
    began = time.process_time()
    reply = client.post("/v1/models/zero/classify", content=b"a=b&" * fields, headers=kind)
    assert reply.status_code == status
    assert time.process_time() - began < 2


def test_two_unreadable_files_are_refused_alone(client, made_runs):
    files = [file(1), *[("files", (f"{n}.jpg", b"these are words, no image at all " * 9)) for n in range(3)]]
    reply = client.post("/v1/models/zero/classify", files=files, headers=bearer(OPEN_ALL))
    assert reply.status_code == 200, reply.text
    answers = reply.json()["answers"]
    assert "classes" in answers[0]
    assert all("text" in one["error"] for one in answers[1:])


def test_a_gallery_that_requests_wait_for_is_never_canceled(tmp_path):
    """Neither when the adapter's version changes nor when others fill the cache; the caller pays."""
    clip, images, callers = tiny_clip(dtype=torch.float32), gallery(tmp_path), []

    class Search:
        def __init__(self, number: int, version: int) -> None:
            self.key, self.version = ("features", number), version

        def job(self, pixels):
            return pixels

        def index(self, features):
            return lambda name, query: features

    async def compute(jobs, caller):
        callers.append(caller)
        await asyncio.sleep(0.2)
        return [torch.zeros(2) for _ in jobs]

    async def go():
        galleries = Galleries({"stored": images}, clip.config.view, compute)
        first = asyncio.create_task(galleries.index("stored", Search(0, 1), "victim"))
        await asyncio.sleep(0.05)
        others = [galleries.index("stored", Search(n, 2), "other") for n in range(40)]
        await asyncio.gather(first, *others)
        assert len(galleries._indexes) <= 32

    asyncio.run(asyncio.wait_for(go(), 60))
    assert callers[0] == "victim"
    assert set(callers[1:]) == {"other"}
