"""What somebody who runs the service sees: log lines, refusals, figures, threads."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import socket
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from clients import alone, client_of, file, gallery, wait_for
from starlette.requests import ClientDisconnect
from tiny import mixed_roles, tiny_clip
from typer.testing import CliRunner

from dear.cli import build_app
from dear.cli.serve import _show_log
from dear.errors import RunError, UsageError
from dear.runs.folder import add_metrics
from dear.serve import galleries
from dear.serve.galleries import ByHeads, Galleries
from dear.serve.metrics import Metrics
from dear.serve.middleware import RequestMiddleware
from dear.serve.settings import Limits
from dear.serve.store import run_version
from dear.serve.task import serve
from dear.serve.traffic import Traffic


def test_a_client_that_goes_away_is_no_failure_of_the_service(caplog):
    metrics = Metrics()

    async def app(scope, receive, send):
        raise ClientDisconnect

    scope = {"type": "http", "path": "/", "method": "POST", "headers": []}
    with caplog.at_level("INFO", logger="dear.serve"):
        asyncio.run(RequestMiddleware(app, metrics, Traffic(Limits()), {})(scope, None, None))
    assert [json.loads(record.message)["status"] for record in caplog.records] == [499]
    assert all(record.exc_info is None for record in caplog.records)


def test_the_frameworks_own_refusals_are_sentences(shared):
    assert "'/nothing'" in shared.get("/nothing").json()["error"]["message"]
    reply = shared.get("/v1/models/probe/classify")
    assert (reply.status_code, "GET" in reply.json()["error"]["message"]) == (405, True)


def test_a_model_names_the_figures_of_its_evaluations(runs):
    add_metrics(runs / "probe", **{"evaluation of colors (test)": {"accuracy": {"default": 0.5}}})
    with client_of(runs) as client:
        figures = client.get("/v1/models/probe").json()["figures"]
    assert figures == {"evaluation of colors (test)": {"accuracy": {"default": 0.5}}}


def test_a_run_that_breaks_while_it_is_served_is_logged_once(runs, caplog):
    with caplog.at_level("WARNING", logger="dear.serve"), client_of(runs) as client:
        (runs / "probe" / "config.json").write_text("{broken", encoding="utf-8")
        wait_for(lambda: caplog.records)
        time.sleep(0.3)  # several looks at the folder
        assert client.post("/v1/models/probe/classify", files=[file(1)]).status_code in (200, 409)
    (line,) = [json.loads(record.message) for record in caplog.records]
    assert line["adapter"] == "probe"
    assert "config.json" in line["not served"]


def test_every_log_line_is_printed_once(capsys):
    """The command line prints the library's notes by a handler of its own, too."""
    loggers = [logging.getLogger(name) for name in ("dear", "dear.serve", "uvicorn")]
    before = [(log, list(log.handlers), log.propagate, log.level) for log in loggers]
    try:
        loggers[0].addHandler(logging.StreamHandler())
        _show_log()
        logging.getLogger("dear.serve").info("a line")
        logging.getLogger("uvicorn.error").info("not shown")
    finally:
        for log, handlers, propagate, level in before:
            log.handlers, log.propagate = handlers, propagate
            log.setLevel(level)
    assert capsys.readouterr().err == "a line\n"


def test_searches_by_different_role_maps_do_not_cancel_each_other(tmp_path):
    clip, images, calls = tiny_clip(dtype=torch.float32), gallery(tmp_path), []
    layers = mixed_roles().layers
    searches = [ByHeads(clip, mixed_roles(seed=seed)) for seed in (3, 4)]
    assert searches[0].key != searches[1].key

    async def compute(jobs, caller):
        calls.append(len(jobs))
        await asyncio.sleep(0.05)
        return [torch.rand(clip.config.embed_dim + len(layers) * clip.config.vision.width) for _ in jobs]

    async def go():
        galleries = Galleries({"stored": images}, clip.config.view, compute)
        for _ in range(2):
            result = await asyncio.gather(*(galleries.index("stored", search) for search in searches))
            assert len(result) == 2
            assert calls == [5, 5]  # both are cached

    asyncio.run(go())


def test_a_gallery_that_a_request_gave_up_is_continued_by_the_next_one(tmp_path, monkeypatch):
    clip, images, calls = tiny_clip(dtype=torch.float32), gallery(tmp_path), []
    monkeypatch.setattr(galleries, "_CHUNK", 2)
    search = ByHeads(clip, mixed_roles(seed=3))

    async def compute(jobs, caller):
        calls.append((caller, len(jobs)))
        await asyncio.sleep(60 if len(calls) == 2 else 0)
        width = clip.config.embed_dim + len(search.roles.layers) * clip.config.vision.width
        return [torch.rand(width) for _ in jobs]

    async def go():
        stored = Galleries({"stored": images}, clip.config.view, compute)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stored.index("stored", search, "first"), 2)
        await asyncio.gather(*(stored.index("stored", search, "second") for _ in range(3)))

    asyncio.run(go())
    assert calls == [("first", 2), ("first", 2), ("second", 2), ("second", 1)]  # five images


def test_a_request_that_is_cut_off_by_the_drain_limit_is_told_so():
    statuses = []

    async def app(scope, receive, send):
        await asyncio.sleep(60)

    async def send(message):
        statuses.append(message.get("status"))

    async def go():
        scope = {"type": "http", "path": "/", "method": "GET", "headers": []}
        task = asyncio.create_task(
            RequestMiddleware(app, Metrics(), Traffic(Limits()), {})(scope, None, send)
        )
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    assert statuses[0] == 503


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tls_key": "key.pem"}, "tls_certificate"),
        ({"tls_certificate": "cert.pem", "engine": "ray"}, "tls_certificate"),
        ({"engine": "spark"}, "spark"),
        ({"replicas": 2}, "replicas"),
        ({"threads": 2, "engine": "ray"}, "threads"),
        ({"limits": {"imagse": 3}}, "imagse"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, options, name):
    with pytest.raises(UsageError, match=name):
        serve(tmp_path, **options)


def test_certificates_reach_the_server(tmp_path, monkeypatch):
    seen, made = {}, []
    files = {name: tmp_path / name for name in ("cert.pem", "key.pem")}
    for path in files.values():
        path.write_text("pem")
    monkeypatch.setattr("dear.serve.server.uvicorn.Config", lambda app, **options: seen.update(options))
    monkeypatch.setattr("dear.serve.server.make_app", lambda service, **options: made.append(service))
    monkeypatch.setattr("dear.serve.server.sys.setswitchinterval", lambda seconds: None)
    monkeypatch.setattr("dear.cli.serve._show_log", lambda: None)
    ended = SimpleNamespace(run=lambda: None, started=True)
    monkeypatch.setattr("dear.serve.server.Server", lambda config: ended)
    options = ["--tls-certificate", str(files["cert.pem"]), "--tls-key", str(files["key.pem"])]
    options += ["--drain-seconds", "7", "--device", "cpu"]
    result = CliRunner().invoke(build_app(), ["serve", str(tmp_path), *options])
    made[0].close(1.0)
    assert result.exit_code == 0, result.output
    assert "https://" in result.output
    assert (seen["ssl_certfile"], seen["ssl_keyfile"]) == (files["cert.pem"], files["key.pem"])
    assert seen["timeout_graceful_shutdown"] == 7


@pytest.fixture
def certificate(tmp_path) -> tuple[Path, Path]:
    """A certificate for this machine that signs itself, and its key."""
    files = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(files[0]), "-keyout", str(files[1])]
    subprocess.run(command, check=True, capture_output=True)
    return files


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_answers_over_https(runs, tmp_path, certificate):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = (
        "import sys, torch; sys.path[:0] = sys.argv[1].split(':'); from tiny import tiny_clip; "
        "import dear.clip.factory; dear.clip.factory.load = lambda *a, **b: tiny_clip(dtype=torch.float32); "
        "from dear.cli import build_app; build_app()(sys.argv[2:])"
    )
    options = ["serve", str(runs), "--port", str(port), "--device", "cpu"]
    options += ["--tls-certificate", str(certificate[0]), "--tls-key", str(certificate[1])]
    paths = ":".join(path for path in sys.path if path)
    process = subprocess.Popen([sys.executable, "-c", code, paths, *options])
    trusted = ssl.create_default_context(cafile=str(certificate[0]))
    try:
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusted, timeout=60) as client:

            def alive() -> bool:
                with suppress(httpx.TransportError):
                    return client.get("/health/live").json() == {"status": "live"}
                return False

            wait_for(alive, 60)
            reply = client.post("/v1/models/zero/classify", files=[file(1)], data={"top": "1"})
            assert reply.status_code == 200, reply.text
            best = reply.json()["answers"][0]["classes"][0]["probability"]
            assert best == pytest.approx(float(alone(runs / "zero", [1]).max()), abs=1e-5)
        with pytest.raises(httpx.TransportError):  # nobody is answered without it
            httpx.get(f"http://127.0.0.1:{port}/health/live")
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"https://127.0.0.1:{port}/health/live")
    finally:
        process.terminate()
        process.wait(40)


def test_a_service_imports_no_plots():
    code = "import sys, dear.serve.server, dear.cli.serve; print([m for m in sys.modules if m == 'plotly'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_folder_is_followed_whatever_fails(runs, tmp_path, monkeypatch, caplog):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="empty"):
        run_version(tmp_path / "empty")
    with client_of(runs) as client:
        store = client.app.state.service.store
        looks = []
        refresh = store.refresh

        def fail_once():
            looks.append(None)
            if len(looks) == 1:
                raise ValueError("anything")
            refresh()

        monkeypatch.setattr(store, "refresh", fail_once)
        wait_for(lambda: looks)
        (runs / "zero").rename(runs / "other")
        wait_for(lambda: client.get("/v1/models/other").status_code == 200)
        assert client.get("/v1/models/zero").status_code == 404
    assert "anything" in caplog.text


def test_a_port_in_use_is_an_error_before_the_backbone_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}"):
            serve(tmp_path, backbone="no such backbone", port=port)
