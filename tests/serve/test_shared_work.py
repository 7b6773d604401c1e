"""What adapters share in the service: corrected backbones, recorded batches, and searches by heads."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from clients import QUICK, alone, client_of, file, gallery
from fastapi.testclient import TestClient
from serving import image_bytes
from tiny import Colors, mixed_roles, tiny_clip

from dear.clip.correction import Correction
from dear.clip.gpu import Recorder
from dear.clip.tower import Tower
from dear.images.open import open_image
from dear.methods import build_method
from dear.runs.recipe import Recipe
from dear.serve.app import make_app
from dear.serve.engine import Engine, ImageJob
from dear.serve.service import Service
from dear.serve.settings import ServeSettings
from dear.serve.store import AdapterStore
from dear.tasks.retrieve import retrieve
from dear.train.run import train

CORRECTED = {
    "dear-1": ("dear", 1),
    "dear-2": ("dear", 2),
    "zero-1": ("zeroshot", 1),
    "zero-3": ("zeroshot", 3),
}


def corrected_clip(seed: int):
    """A small CLIP with a correction of its own; the third leaves out a head, too."""
    clip = tiny_clip(dtype=torch.float32)
    width, generator = clip.config.embed_dim, torch.Generator().manual_seed(seed)
    matrix = torch.eye(width) - 0.3 * torch.rand(width, width, generator=generator)
    heads = ((clip.config.vision.layers, 0),) if seed == 3 else ()
    return clip.with_correction(
        Correction(matrix, torch.rand(width, generator=generator), heads, f"number {seed}")
    )


@pytest.fixture(scope="module")
def corrected_runs(tmp_path_factory, made_runs):
    folder = tmp_path_factory.mktemp("corrected")
    for name, (method, seed) in CORRECTED.items():
        roles = mixed_roles() if method == "dear" else None
        model = build_method(method, corrected_clip(seed), ("red", "green", "blue"), roles=roles, seed=seed)
        train(model, Colors(classes=3), Recipe.of(model, epochs=1, batch=6, seed=seed), folder / name)
    shutil.copytree(folder / "dear-1", folder / "dear-1-again")
    shutil.copytree(made_runs / "roles", folder / "roles")
    shutil.copytree(made_runs / "zero", folder / "zero")
    return folder


def test_corrected_runs_answer_as_alone_and_hold_no_weights_of_their_own(corrected_runs):
    clip = tiny_clip(dtype=torch.float32)
    store = AdapterStore(corrected_runs, clip)
    store.refresh()
    names = [card.name for card in store.cards()]
    answerers = {name: store.get(name).answerer for name in names}
    methods = {name: answerer.method for name, answerer in answerers.items()}
    weights = {p.data_ptr() for p in clip.parameters()}
    assert {p.data_ptr() for m in methods.values() for p in m.clip.parameters()} == weights
    assert methods["dear-1"].clip is methods["dear-1-again"].clip
    assert methods["dear-1"].clip is not methods["dear-2"].clip
    service = Service(corrected_runs, clip, ServeSettings(QUICK.limits, longest_wait=0.2))
    with TestClient(make_app(service)) as client:
        for name in names:
            reply = client.post(
                f"/v1/models/{name}/classify", files=[file(0), file(1)], data={"top": "3"}
            ).json()
            expected = alone(corrected_runs / name, [0, 1])
            for answer, row in zip(reply["answers"], expected, strict=True):
                got = {one["name"]: one["probability"] for one in answer["classes"]}
                assert got == pytest.approx(
                    dict(zip(("red", "green", "blue"), row.tolist(), strict=True)), abs=1e-5
                )
    together = [
        ImageJob(torch.randint(0, 256, (3, 24, 24), dtype=torch.uint8), answerers[name]) for name in names
    ]
    engine = Engine(clip)
    for job, mixed in zip(together, engine.compute(together), strict=True):
        torch.testing.assert_close(engine.compute([job])[0], mixed, rtol=1e-5, atol=1e-5)
    plain, changed = (alone(corrected_runs / name, [0]) for name in ("zero", "zero-1"))
    assert (plain - changed).abs().max() > 1e-3  # the corrections do change answers


def test_a_corrected_adapter_searches_with_its_correction(corrected_runs, tmp_path):
    service = Service(corrected_runs, tiny_clip(dtype=torch.float32), QUICK, {"stored": gallery(tmp_path)})
    with TestClient(make_app(service)) as client:
        reply = client.post("/v1/models/zero-1/retrieve", files=[file(3)], data={"top": "5"}).json()
    near = {one["key"][-5]: one["similarity"] for one in reply["answers"][0]["attributes"]["image"]}
    clip = corrected_clip(1)
    features = clip.encode_image(torch.stack([clip.preprocess(open_image(image_bytes(n))) for n in range(5)]))
    features = torch.nn.functional.normalize(features, dim=1)
    assert near == pytest.approx({str(n): float(features[n] @ features[3]) for n in range(5)}, abs=1e-5)


def test_ranks_of_a_mixed_batch_are_those_of_its_logits(made_runs, tmp_path):
    """Calibrated adapters beside others, lists of different lengths, and jobs that want logits."""
    shutil.copytree(made_runs, tmp_path / "runs")
    calibration = {"temperature": 2.0, "new_temperature": 3.0, "logits": [1.0] * 40}
    words = {"format": "dear calibration", "schema": 1, "images": 40, "modes": {"default": calibration}}
    (tmp_path / "runs" / "probe" / "calibration.json").write_text(json.dumps(words))
    clip = tiny_clip(dtype=torch.float32)
    store = AdapterStore(tmp_path / "runs", clip)
    store.refresh()
    answerers = [store.get(name).answerer for name in ("probe", "zero", "coop", "roles")]
    answerers.append(store.get("zero").on_classes(("one", "two", "three", "four", "five")))
    pixels = torch.randint(0, 256, (5, 3, 24, 24), dtype=torch.uint8)
    engine = Engine(clip)
    logits = [engine.compute([ImageJob(*one)])[0] for one in zip(pixels, answerers, strict=True)]
    tops = (2, 0, 9, 1, 4)
    rankings = [who.ranking(top) if top else None for who, top in zip(answerers, tops, strict=True)]
    jobs = [ImageJob(*one) for one in zip(pixels, answerers, rankings, strict=True)]
    scales = (2, 1, 1, 1, 1)  # of the calibrated adapter alone
    for answer, who, row, top, scale in zip(
        engine.compute(jobs), answerers, logits, tops, scales, strict=True
    ):
        if not top:
            torch.testing.assert_close(answer, row, rtol=1e-5, atol=1e-5)
            continue
        best = (row / scale).softmax(-1).topk(min(top, len(row)))
        assert [name for name, _ in answer.classes] == [who.model.classes[n] for n in best.indices.tolist()]
        assert [p for _, p in answer.classes] == pytest.approx(best.values.tolist(), abs=1e-5)


class Fake:
    """Records by remembering the function; counts recordings and replays."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.replayed = 0

    def __call__(self, function, inputs):
        self.made.append(len(inputs[0]))

        def replay(inputs):
            self.replayed += 1
            return function(*inputs)

        return replay


def test_batches_are_recorded_before_the_first_request(corrected_runs):
    fake = Fake()
    settings = ServeSettings(QUICK.limits, largest_batch=6)
    recorder = Recorder(record=fake)
    service = Service(corrected_runs, tiny_clip(dtype=torch.float32), settings, recorder=recorder)
    assert service.recorded == len(fake.made) > 0
    assert set(fake.made) == {1, 2, 4, 8}  # batches of up to six images
    before = list(fake.made)
    replayed = fake.replayed
    with TestClient(make_app(service)) as client:
        for name in ("dear-1", "dear-1-again", "dear-2", "roles", "zero", "zero-1", "zero-3"):
            for count in (1, 3, 6):
                files = [file(seed) for seed in range(count)]
                reply = client.post(f"/v1/models/{name}/classify", files=files, data={"top": "3"})
                assert reply.status_code == 200, reply.text
        assert client.post("/v1/embeddings", files=[file(0)]).status_code == 200
    assert fake.made == before  # no request paid for a recording
    assert fake.replayed > replayed


def test_nothing_is_recorded_on_a_cpu(corrected_runs):
    service = Service(corrected_runs, tiny_clip(dtype=torch.float32), QUICK)
    assert (service.recorded, service.store.loaded) == (0, 0)
    service.close()


def test_sizes_cover_every_batch():
    run = Recorder((1, 2, 4, 8))
    assert [run.sizes(n) for n in (1, 2, 3, 4, 5, 8)] == [
        (1,), (1, 2), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8),
    ]  # fmt: skip


def test_search_by_heads_is_that_of_the_command(corrected_runs, tmp_path):
    images, clip = gallery(tmp_path, 9), tiny_clip(dtype=torch.float32)
    service = Service(corrected_runs, clip, QUICK, {"stored": images})
    with TestClient(make_app(service)) as client:

        def ask(name: str, **data: str):
            return client.post(f"/v1/models/{name}/retrieve", files=[file(3)], data={"by": "heads", **data})

        got = ask("roles", top="4").json()["answers"][0]["attributes"]
        corrected = ask("dear-2", top="4").json()["answers"][0]["attributes"]
        one = ask("roles", attribute="shape").json()["answers"][0]["attributes"]
        wrong = ask("roles", attribute="smell")
        none = ask("zero")
        way = ask("roles", by="magic")
    expected = retrieve(query=tmp_path / "3.png", gallery=images, backbone=clip, roles=mixed_roles(), top=4)
    assert list(got) == [one.attribute for one in expected]
    for matches in expected:
        assert [match["key"] for match in got[matches.attribute]] == list(matches.keys)
        near = [match["similarity"] for match in got[matches.attribute]]
        assert near == pytest.approx(list(matches.similarity), abs=1e-4)
        assert not any(match["key"].endswith("3.png") for match in got[matches.attribute])
    assert corrected == got  # heads are those of the plain backbone
    assert list(one) == ["Shape"]
    for refused, words in ((wrong, "smell"), (none, "role map"), (way, "features or heads")):
        assert refused.status_code == 400
        assert words in refused.json()["error"]["message"]


def test_a_class_list_is_encoded_in_the_queue_alone(runs, monkeypatch):
    """A thread that builds the list beside the queue computes nothing: it would hold up everybody."""
    names = tuple(f"thing number {n}" for n in range(40))
    with client_of(runs) as client:
        service = client.app.state.service
        for adapter in map(service.store.get, ("zero", "coop", "roles")):
            with monkeypatch.context() as patch:
                patch.delattr(Tower, "run")
                assert adapter.on_classes(names).model.classes == names
