"""`?explain=roles`: bars beside the answers; they sum to the logarithm of how much likelier the answer is."""

from __future__ import annotations

import math

import pytest
import torch
from fastapi.testclient import TestClient
from tiny import tiny_clip

from conftest import RUNS, image_bytes
from dear.serve.app import make_app
from dear.serve.service import Service
from dear.serve.settings import Limits, ServeSettings

QUICK = ServeSettings(Limits(images=6, body_bytes=200_000, pixels=1_000_000), poll_seconds=0.05, decoders=1)


@pytest.fixture
def client(runs):
    with TestClient(make_app(Service(runs, tiny_clip(dtype=torch.float32), QUICK))) as client:
        yield client


def test_bars_sum_to_the_lead_of_the_answer(client) -> None:
    files = [("files", ("a.png", image_bytes(1))), ("files", ("b.png", image_bytes(2)))]
    for name in RUNS:
        address = f"/v1/models/{name}/classify"
        plain = client.post(address, files=files).json()["answers"]
        assert not any("explanation" in answer for answer in plain)
        for answer in client.post(f"{address}?explain=roles", files=files).json()["answers"]:
            sure = {one["name"]: one["probability"] for one in answer["classes"]}
            why = answer["explanation"]
            assert why["answer"] == answer["classes"][0]["name"]
            lead = sum(bar["answer"] - bar["against"] for bar in why["bars"])
            assert lead == pytest.approx(math.log(sure[why["answer"]] / sure[why["against"]]), abs=1e-3)


def test_other_explanations_are_refused_and_broken_images_keep_their_place(client) -> None:
    files = [("files", ("a.png", b"no image")), ("files", ("b.png", image_bytes(2)))]
    address = "/v1/models/probe/classify"
    assert client.post(f"{address}?explain=maps", files=files).status_code == 400
    first, second = client.post(f"{address}?explain=roles", files=files).json()["answers"]
    assert "error" in first
    assert "explanation" not in first
    assert second["explanation"]["bars"]
