"""Runs with several labels per image or a tree of classes: the service answers as `Model` does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from clients import client_of, file
from fastapi.testclient import TestClient
from serving import image_bytes
from tiny import tiny_clip

from dear.calibration.calibration import Calibration, ModeCalibration
from dear.images.open import open_image
from dear.runs.folder import write_calibration
from dear.runs.model import Model

SEEDS = (3, 4, 5)
TREE = {"red": "warm", "green": "cold", "blue": "cold", "cold": "color", "warm": "color"}


def change(run: Path, calibration: ModeCalibration | None, **config: object) -> None:
    path = run / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    if calibration is not None:
        write_calibration(run, Calibration(images=40, modes={"default": calibration}))


@pytest.fixture(scope="module")
def labeled(made_runs, tmp_path_factory) -> Path:
    """Runs with several labels (`probe`, `zero`; `bare` is not calibrated) and one with a tree (`coop`)."""
    folder = tmp_path_factory.mktemp("labeled")
    for name, source in {"probe": "probe", "zero": "zero", "bare": "zero", "coop": "coop"}.items():
        shutil.copytree(made_runs / source, folder / name)
    for name in ("probe", "zero"):
        sigmoids = ModeCalibration(50.0, biases=(0.1, -0.2, 0.0), thresholds=(0.5, 0.45, 0.6))
        change(folder / name, sigmoids, task="several labels")
    change(folder / "bare", None, task="several labels")
    logits = torch.linspace(-1, 1, 40).tolist()
    change(folder / "coop", ModeCalibration(2.0, new_temperature=3.0, logits=tuple(logits)), tree=TREE)
    return folder


@pytest.fixture(scope="module")
def client(labeled):
    with client_of(labeled) as client:
        yield client


def post(client: TestClient, name: str, **options: str):
    return client.post(f"/v1/models/{name}/classify", files=[file(seed) for seed in SEEDS], data=options)


def assert_equal(answers: list[dict], expected: list) -> None:
    for answer, prediction in zip(answers, expected, strict=True):
        assert [one["name"] for one in answer["classes"]] == [name for name, _ in prediction.classes]
        values = [one["probability"] for one in answer["classes"]]
        assert values == pytest.approx([value for _, value in prediction.classes], abs=1e-5)
        assert answer.get("rejected") == prediction.rejected
        assert answer.get("labels") == (None if prediction.labels is None else list(prediction.labels))
        node = answer.get("node")
        assert (node and node["name"]) == (prediction.node and prediction.node[0])
        assert (node and node["probability"]) == pytest.approx(
            prediction.node and prediction.node[1], abs=1e-5
        )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("probe", {}),
        ("zero", {"top": 2}),
        ("zero", {"classes": ["one", "two", "three"]}),
        ("coop", {}),
        ("coop", {"certain": 0.5}),
        ("coop", {"certain": 1.0, "top": 1}),
        ("coop", {"reject": 0.05}),
        ("coop", {"reject": 0.05, "classes": ["red", "green", "blue", "grey"]}),
    ],
)
def test_the_service_answers_as_the_model(client, labeled, name, options):
    model = Model.load(labeled / name, tiny_clip(dtype=torch.float32))
    expected = model.answers([open_image(image_bytes(seed)) for seed in SEEDS], **options)
    words = {key: "true" if key == "reject" else str(value) for key, value in options.items()}
    if "classes" in options:
        words["classes"] = ",".join(options["classes"])
    reply = post(client, name, **words)
    assert reply.status_code == 200, reply.text
    assert_equal(reply.json()["answers"], expected)


def test_answers_differ_between_images(client, labeled):
    """The comparisons above would pass for a service that always answers the same."""
    nodes = {one["node"]["name"] for one in post(client, "coop", certain="0.5").json()["answers"]}
    labels = {tuple(one["labels"]) for one in post(client, "zero").json()["answers"]}
    assert nodes <= {*TREE, *TREE.values()}
    assert labels


@pytest.mark.parametrize(
    ("name", "options", "item"),
    [
        ("probe", {"certain": "0.9"}, "tree"),
        ("coop", {"certain": "0.2"}, "0.2"),
        ("coop", {"certain": "nan"}, "certain"),
        ("coop", {"certain": "much"}, "certain"),
        ("probe", {"reject": "true"}, "several labels"),
        ("bare", {}, "calibration"),
    ],
)
def test_options_that_a_run_does_not_have_are_refused(client, name, options, item):
    reply = post(client, name, **options)
    assert (reply.status_code, item in reply.json()["error"]["message"]) == (400, True), reply.text
    assert post(client, "coop").status_code == 200


def test_a_card_names_labels_and_tree(client):
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert {name: card["labels"] for name, card in cards.items()} == {
        "probe": "several", "zero": "several", "bare": "several", "coop": "one"
    }  # fmt: skip
    assert (cards["coop"]["tree"], cards["zero"]["tree"]) == (TREE, {})
    properties = client.get("/openapi.json").json()["components"]["schemas"]["ClassifiedImage"]["properties"]
    assert {"labels", "node", "rejected", "classes"} <= set(properties)
