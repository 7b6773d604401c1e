"""`?explain=roles`: bars beside the answers; they sum to the logarithm of how much likelier the answer is."""

from __future__ import annotations

import math

import pytest
from serving import RUNS, image_bytes


def test_bars_sum_to_the_lead_of_the_answer(shared) -> None:
    files = [("files", ("a.png", image_bytes(1))), ("files", ("b.png", image_bytes(2)))]
    for name in RUNS:
        address = f"/v1/models/{name}/classify"
        plain = shared.post(address, files=files).json()["answers"]
        assert not any("explanation" in answer for answer in plain)
        for answer in shared.post(f"{address}?explain=roles", files=files).json()["answers"]:
            sure = {one["name"]: one["probability"] for one in answer["classes"]}
            why = answer["explanation"]
            assert why["answer"] == answer["classes"][0]["name"]
            lead = sum(bar["answer"] - bar["against"] for bar in why["bars"])
            assert lead == pytest.approx(math.log(sure[why["answer"]] / sure[why["against"]]), abs=1e-3)


def test_other_explanations_are_refused_and_broken_images_keep_their_place(shared) -> None:
    files = [("files", ("a.png", b"no image")), ("files", ("b.png", image_bytes(2)))]
    address = "/v1/models/probe/classify"
    assert shared.post(f"{address}?explain=maps", files=files).status_code == 400
    first, second = shared.post(f"{address}?explain=roles", files=files).json()["answers"]
    assert "error" in first
    assert "explanation" not in first
    assert second["explanation"]["bars"]
