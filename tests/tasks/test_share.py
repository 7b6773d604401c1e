"""Runs are shared through a hub and as archives; what comes from others is checked like any file."""

from __future__ import annotations

import base64
import json
import re
import warnings
import zipfile
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
import torch
from fake_hub import COMMIT, FakeHub
from huggingface_hub import constants

import dear
from dear.clip.checkpoint import save_hf
from dear.errors import RunError, UsageError
from dear.runs.evaluation import share_interval
from dear.runs.folder import FILES, load_run
from dear.tasks.adapt import adapt
from dear.tasks.share.task import bundle, local_run, pull, push

NAME = "someone/vehicles"


class PushHub(FakeHub):
    """A hub that also takes commits of small files."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self.made: list[dict] = []
        hub = self
        handler = self._server.RequestHandlerClass

        def do_POST(request: BaseHTTPRequestHandler) -> None:
            body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
            path = unquote(urlparse(request.path).path)
            if path == "/api/repos/create":
                hub.made.append(json.loads(body))
                answer = {"url": f"{hub.endpoint}/{hub.name}"}
            elif "/preupload/" in path:
                files = json.loads(body)["files"]
                answer = {
                    "files": [
                        {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                        for f in files
                    ]
                }
            elif "/commit/" in path:
                for line in body.decode().splitlines():
                    entry = json.loads(line)
                    if entry["key"] == "file":
                        content = base64.b64decode(entry["value"]["content"])
                        (hub.folder / entry["value"]["path"]).write_bytes(content)
                answer = {
                    "commitUrl": f"{hub.endpoint}/{hub.name}/commit/{COMMIT}",
                    "commitOid": COMMIT,
                    "pullRequestUrl": None,
                }
            else:
                answer = {"errors": [], "warnings": []}
            FakeHub._send(request, 200, json.dumps(answer).encode(), {}, True)

        handler.do_POST = do_POST

    def _answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        """Also by commit: `resolve/COMMIT/` and `/revision/COMMIT`."""
        request.path = request.path.replace(f"/resolve/{COMMIT}/", "/resolve/main/")
        request.path = request.path.replace(f"/revision/{COMMIT}", "").replace("/revision/main", "")
        if "/tree/" in request.path:
            entries = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": self.checksum(f.name)}
                for f in sorted(self.folder.iterdir())
            ]
            self._send(request, 200, json.dumps(entries).encode(), {}, body)
            return
        super()._answer(request, body)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("share") / "run"
    adapt("world:vehicles", folder, method="linear-probe", shots=2, calibrate=False, check=False)
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    (tmp_path / "repo").mkdir()
    server = PushHub(NAME, tmp_path / "repo")
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield server
    server.close()


def logits(folder: Path, **options) -> torch.Tensor:
    method = load_run(folder, **options)
    pixels = torch.rand(2, 3, *[method.clip.config.vision.image_size] * 2)
    torch.manual_seed(0)
    return method.logits(torch.zeros_like(pixels))


def test_a_pushed_run_is_pulled_and_answers_the_same(run, hub, tmp_path):
    assert push(run, NAME, endpoint=hub.endpoint) == f"{hub.endpoint}/{NAME}/commit/{COMMIT}"
    card = (hub.folder / "README.md").read_text()
    assert f"hf://{NAME}" in card
    assert "linear-probe" in card
    assert {path.name for path in hub.folder.iterdir()} == {
        "README.md",
        *(file for file in FILES if (run / file).is_file()),
    }
    found = pull(f"hf://{NAME}", tmp_path / "pulled", endpoint=hub.endpoint)
    assert torch.equal(logits(found), logits(run))
    with pytest.raises(RunError, match="pulled"):
        pull(NAME, tmp_path / "pulled", endpoint=hub.endpoint)


def test_what_is_no_run_is_not_taken(hub, tmp_path):
    (hub.folder / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(RunError):
        pull(NAME, tmp_path / "pulled", endpoint=hub.endpoint)
    assert not (tmp_path / "pulled").exists()


def test_a_hub_that_is_down_gives_one_sentence(hub, tmp_path):
    hub.down = True
    with pytest.raises(RunError, match=NAME):
        pull(NAME, tmp_path / "pulled", endpoint=hub.endpoint)


@pytest.mark.parametrize("name", ["vehicles", "../x/y", "a/b@", "a/b c"])
def test_other_names_are_refused(run, name):
    with pytest.raises(UsageError):
        push(run, name)


def test_a_bundle_holds_the_backbone(tmp_path, monkeypatch):
    monkeypatch.setenv("DEAR_CACHE", str(tmp_path / "cache"))
    weights = tmp_path / "weights"
    save_hf(dear.load("mini"), weights)
    run = tmp_path / "run"
    options = {"method": "linear-probe", "shots": 1, "calibrate": False, "check": False}
    adapt("world:vehicles", run, backbone=weights, **options)
    expected = logits(run)
    archive = bundle(run, tmp_path / "all.zip")
    weights.rename(tmp_path / "moved")
    folder = local_run(archive)
    assert torch.equal(logits(folder), expected)
    assert local_run(archive) == folder
    with zipfile.ZipFile(archive) as opened:
        assert "torch==" in opened.read("versions.txt").decode()


def test_an_embedded_backbone_is_not_put_in(run, tmp_path):
    archive = bundle(run, tmp_path / "run.zip")
    with zipfile.ZipFile(archive) as opened:
        assert not [name for name in opened.namelist() if name.startswith("backbone/")]


@pytest.mark.parametrize(
    "member", ["../config.json", "backbone/../../x.json", "evil.py", "backbone/a/b.json"]
)
def test_an_archive_with_other_files_is_refused(run, tmp_path, monkeypatch, member):
    monkeypatch.setenv("DEAR_CACHE", str(tmp_path / "cache"))
    archive = bundle(run, tmp_path / "run.zip")
    with zipfile.ZipFile(archive, "a") as opened:
        opened.writestr(member, "x")
    with pytest.raises(RunError, match=re.escape(repr(member))):
        local_run(archive)
    assert not list((tmp_path / "cache" / "bundles").iterdir())


def test_a_cut_archive_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setenv("DEAR_CACHE", str(tmp_path / "cache"))
    archive = bundle(run, tmp_path / "run.zip")
    archive.write_bytes(archive.read_bytes()[:-200])
    with pytest.raises(RunError):
        local_run(archive)


def test_the_interval_is_exact():
    low, high = share_interval(8, 10, 0.95)  # published: Clopper and Pearson for 8 of 10
    assert (round(low, 4), round(high, 4)) == (0.4439, 0.9748)


@pytest.mark.parametrize("kind", ["together", "many", "twice", "long"])
def test_bundles_beyond_their_limits_are_refused_and_leave_nothing(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("dear.tasks.share.task.cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr("dear.tasks.share.task.MOST_BACKBONE_BYTES", 3_000_000)
    names = {
        "together": [f"backbone/{n}.bin" for n in range(4)],
        "many": [f"backbone/{n}.bin" for n in range(101)],
        "twice": ["backbone/a.bin", "backbone/a.bin"],
        "long": [f"backbone/{'a' * 300}.bin"],
    }[kind]
    content = bytes(1_000_000 if kind == "together" else 10)
    with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")
        for name in names:
            archive.writestr(name, content)
    with pytest.raises(RunError, match=r"a\.zip"):
        local_run(tmp_path / "a.zip")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
