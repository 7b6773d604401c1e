"""Clients that others wrote: OpenAI's package, one generated from /openapi.json, and CORS of a browser."""

from __future__ import annotations

import base64
import importlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from clients import alone, file
from fastapi.middleware.cors import CORSMiddleware
from fastapi.testclient import TestClient
from served import serving
from serving import QUICK, image_bytes
from tiny import tiny_clip
from typer.testing import CliRunner

from dear.cli import build_app
from dear.serve.app import make_app
from dear.serve.keys import KeyEntry, KeyFile, Keys
from dear.serve.service import Service

KEY = "a-key-of-a-client-01"
KEYS = Keys(KeyFile([KeyEntry(KEY, ["zero", "probe"])]))


def data_url(seed: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(image_bytes(seed)).decode()}"


def test_the_openai_package(runs):
    openai = pytest.importorskip("openai")
    clip = tiny_clip(dtype=torch.float32)
    with serving(runs, keys=KEYS) as (address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, timeout=60, max_retries=0)
        inputs = ["a cat", data_url(1), "a dog"]
        floats = client.embeddings.create(model=clip.name, input=inputs, encoding_format="float")
        default = client.embeddings.create(model=clip.name, input=inputs)  # base64 on the wire
        names = [model.id for model in client.models.list()]
        with pytest.raises(openai.NotFoundError) as refused:
            client.embeddings.create(model="other", input="a cat")
        assert "'other'" in str(refused.value)
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model=clip.name, input="http://127.0.0.1:9/a.png")
        assert "http://127.0.0.1:9/a.png" in str(refused.value)
    texts = torch.nn.functional.normalize(clip.encode_text(["a cat", "a dog"]), dim=-1)
    rows = [one.embedding for one in floats.data]
    assert [one.index for one in floats.data] == [0, 1, 2]
    assert rows[0] == pytest.approx(texts[0].tolist(), abs=1e-5)
    assert rows[2] == pytest.approx(texts[1].tolist(), abs=1e-5)
    assert np.linalg.norm(rows[1]) == pytest.approx(1, abs=1e-5)
    assert np.allclose([one.embedding for one in default.data], rows, atol=1e-6)
    assert floats.usage.total_tokens > 4
    assert names == ["probe", "zero"]


def test_a_client_generated_from_the_description(runs, tmp_path, monkeypatch):
    pytest.importorskip("openapi_python_client")
    with serving(runs, keys=KEYS) as (address, _):
        with TestClient(make_app(Service(runs, tiny_clip(dtype=torch.float32), QUICK))) as local:
            (tmp_path / "openapi.json").write_bytes(local.get("/openapi.json").content)
        command = [sys.executable, "-m", "openapi_python_client", "generate", "--path", "openapi.json"]
        command += ["--meta", "none", "--output-path", "generated"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        monkeypatch.syspath_prepend(str(tmp_path))
        generated = importlib.import_module("generated")
        client = generated.AuthenticatedClient(base_url=address, token=KEY)
        classify = importlib.import_module("generated.api.default.classify")
        models = importlib.import_module("generated.models")
        body = models.ClassifyOptions(images=[data_url(3)], top=3)
        reply = classify.sync(name="zero", client=client, body=body)
    best = reply.answers[0].classes[0]
    assert best.probability == pytest.approx(float(alone(runs / "zero", [3]).max()), abs=1e-5)


def test_ordinary_middleware_can_be_added(runs):
    app = make_app(Service(runs, tiny_clip(dtype=torch.float32), QUICK))
    app.add_middleware(CORSMiddleware, allow_origins=["https://shop.example"])
    with TestClient(app) as client:
        reply = client.get("/health/live", headers={"Origin": "https://shop.example"})
    assert reply.headers["access-control-allow-origin"] == "https://shop.example"


def test_one_image_for_several_adapters(shared, made_runs):
    data = {"models": "zero,probe", "top": "3"}
    reply = shared.post("/v1/classify", files=[file(3)], data=data).json()
    assert [one["model"] for one in reply["results"]] == ["zero", "probe"]
    for one in reply["results"]:
        best = one["answers"][0]["classes"][0]["probability"]
        assert best == pytest.approx(float(alone(made_runs / one["model"], [3]).max()), abs=1e-5)
    for models, status in (("", 400), ("zero,zero", 400), ("zero,nobody", 404)):
        refused = shared.post("/v1/classify", files=[file(3)], data={"models": models})
        assert refused.status_code == status, refused.text


@pytest.mark.parametrize(("most_bytes", "longest"), [(2**17, 4), (1, 1)])
def test_models_come_in_pages(shared, monkeypatch, most_bytes, longest):
    monkeypatch.setattr("dear.serve.routes._PAGE_BYTES", most_bytes)
    names, after = [], ""
    for _ in range(10):
        page = shared.get("/v1/models", params={"limit": 4, "after": after}).json()
        assert 1 <= len(page["data"]) <= longest
        names += [card["id"] for card in page["data"]]
        after = names[-1]
        if not page["has_more"]:
            break
    assert names == sorted(["probe", "zero", "coop", "vpt", "roles", "other-roles"])
    assert shared.get("/v1/models", params={"limit": 0}).status_code == 400


def test_settings_come_from_a_file(tmp_path, monkeypatch):
    seen: list[Service] = []
    (tmp_path / "runs").mkdir()
    (tmp_path / "serve.toml").write_text("port = 8123\nbatch = 3\n[limits]\nimages = 7\nrate = 2.5\n")
    monkeypatch.setattr("dear.cli.serve._show_log", lambda: None)
    monkeypatch.setattr(
        "dear.serve.server.run_server", lambda service, host, port, **options: seen.append((service, port))
    )
    command = ["serve", str(tmp_path / "runs"), "--device", "cpu", "--config", str(tmp_path / "serve.toml")]
    result = CliRunner().invoke(build_app(), [*command, "--batch", "5"])
    assert result.exit_code == 0, result.output
    (service, port), *_ = seen
    service.close(1.0)
    assert (port, service.settings.largest_batch) == (8123, 5)
    assert (service.settings.limits.images, service.settings.limits.rate) == (7, 2.5)
    wrong = {"ports = 1\n": "ports", "[limits]\nimagse = 1\n": "imagse", "port = \n": "serve.toml"}
    for text, name in wrong.items():
        (tmp_path / "serve.toml").write_text(text)
        result = CliRunner().invoke(build_app(), command)
        assert result.exit_code != 0
        assert name in f"{result.output}{result.exception}"
