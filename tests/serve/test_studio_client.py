"""The studio asks a running service."""

from __future__ import annotations

import io
import socket
import threading
import time

import pytest
import torch
import uvicorn
from PIL import Image
from serving import image_bytes
from tiny import tiny_clip

from dear.errors import InputError, UsageError
from dear.runs.folder import load_run
from dear.runs.model import Model
from dear.serve.app import make_app
from dear.serve.keys import KeyEntry, KeyFile, Keys
from dear.serve.service import Service
from dear.studio.service_client import ask_service, check_service

KEY = "key-for-the-studio-1"


@pytest.fixture
def address(made_runs):
    keys = Keys(KeyFile([KeyEntry(KEY, ["probe", "zero"])]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = make_app(Service(made_runs, tiny_clip(dtype=torch.float32), keys=keys))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}/v1/models/"
    server.should_exit = True
    thread.join()


def test_answers_and_refusals(address, made_runs, monkeypatch):
    image = Image.open(io.BytesIO(image_bytes(3)))
    classes = ("red", "green", "blue")
    with pytest.raises(InputError, match="unknown key"):
        ask_service(address + "zero", [image], classes, 3)
    monkeypatch.setenv("DEAR_KEY", KEY)
    (answer,) = ask_service(address + "probe", [image], classes, 3)
    method = load_run(made_runs / "probe", tiny_clip(dtype=torch.float32))
    want = dict(zip(classes, Model(method).probabilities([image])[0].tolist(), strict=True))
    assert dict(answer) == pytest.approx(want, abs=1e-5)
    with pytest.raises(InputError, match="cannot name others"):
        ask_service(address + "probe", [image], ("cat", "dog"), 3)


def test_addresses():
    assert check_service("http://a:1/v1/models/pets/") == "http://a:1/v1/models/pets"
    for wrong in ("ftp://a/v1/models/pets", "a:8000", "http://a:8000/pets"):
        with pytest.raises(UsageError, match="address of an adapter"):
            check_service(wrong)
    with pytest.raises(InputError, match="does not answer"):
        ask_service("http://127.0.0.1:9/v1/models/pets", [Image.new("RGB", (8, 8))], ("a",), 1)
