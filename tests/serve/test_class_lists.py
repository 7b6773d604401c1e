"""Requests that name classes: right answers when several of them prepare one list, and a bounded cache."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from clients import client_of, file
from fastapi.testclient import TestClient
from httpx import Response
from serving import QUICK
from tiny import tiny_clip

from dear.serve import class_lists
from dear.serve.cache import Cache
from dear.serve.class_lists import ClassLists
from dear.serve.keys import KeyEntry, KeyFile, Keys
from dear.serve.store import AdapterStore
from dear.serve.turns import FairQueue, Pace

SETTINGS = replace(QUICK, poll_seconds=60)
KEYS = [f"the-key-of-client-{number}" for number in range(3)]
ADAPTERS = ("coop", "roles")
Request = tuple[str, str, int]  # adapter, classes, image


def class_list(size: int, label: str = "thing") -> str:
    return ",".join(f"{label} {size}-{number}" for number in range(size))


def keys() -> Keys:
    return Keys(KeyFile([KeyEntry(key, ["*"], f"client {n}") for n, key in enumerate(KEYS)]))


def post(client: TestClient, request: Request, key: str = KEYS[0]) -> Response:
    adapter, classes, image = request
    return client.post(
        f"/v1/models/{adapter}/classify",
        files=[file(image)],
        data={"classes": classes, "top": "200"},
        headers={"Authorization": f"Bearer {key}"},
    )


def ask(client: TestClient, request: Request, key: str = KEYS[0]) -> dict[str, float]:
    """Probabilities by class."""
    reply = post(client, request, key)
    assert reply.status_code == 200, (request, reply.text)
    return {one["name"]: one["probability"] for one in reply.json()["answers"][0]["classes"]}


def test_under_load_every_answer_is_that_of_the_same_request_alone(made_runs):
    lists = [class_list(size) for size in (3, 17, 33, 101)]
    lists += ["+" + class_list(size, "other") for size in (3, 33)]
    distinct: list[Request] = [
        (adapter, names, n % 2) for adapter in ADAPTERS for n, names in enumerate(lists)
    ]
    # each new list arrives four times in a row, from two keys; then all of them in any order from a third
    load = [(one, KEYS[n // 2]) for one in distinct for n in range(4)]
    known = [(one, KEYS[2]) for one in distinct]
    random.Random(0).shuffle(known)
    with client_of(made_runs, SETTINGS, keys()) as client, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda one: ask(client, *one), load + known))
    with client_of(made_runs, SETTINGS, keys()) as fresh:
        alone = {one: ask(fresh, one) for one in distinct}
    for (request, _), answer in zip(load + known, answers, strict=True):
        assert answer == pytest.approx(alone[request], abs=1e-5), request


def test_a_list_longer_than_the_cache_is_answered_and_leaves_the_others_cached(made_runs):
    short, long = ("zero", class_list(5), 0), ("zero", "+" + class_list(500, "other"), 0)
    with client_of(made_runs, SETTINGS, keys()) as client:
        expected = [ask(client, short), ask(client, long)]
    with client_of(made_runs, SETTINGS, keys()) as client:
        service = client.app.state.service
        service.class_lists = ClassLists(service.batcher, most_bytes=2**17)
        assert [ask(client, short), ask(client, long)] == [pytest.approx(one, abs=1e-5) for one in expected]
        assert len(service.class_lists.lists) == 1
        key = (*_version(service, "zero"), tuple(short[1].split(",")))
        assert service.class_lists.lists.find(key) is not None
        assert len(service.class_lists.rows) < 100


def _version(service, name: str) -> tuple[str, str]:
    return name, service.store.card(name).version


def test_a_failed_list_is_prepared_again(made_runs, monkeypatch):
    request = ("zero", class_list(17), 0)
    with client_of(made_runs, SETTINGS, keys()) as client:
        batcher = client.app.state.service.batcher
        ask(client, ("zero", "red", 0))  # the adapter is loaded
        with monkeypatch.context() as patch:
            patch.setattr(batcher, "call", _fail)
            assert post(client, request).status_code == 500
        assert len(ask(client, request)) == 17


async def _fail(*_: object) -> None:
    raise ValueError("the device failed")


def test_rows_of_other_classes_are_refused(made_runs):
    store = AdapterStore(made_runs, tiny_clip(dtype=torch.float32))
    store.refresh()
    adapter = store.get("zero")
    method = adapter.on_classes(("one", "two")).method
    with torch.no_grad():
        rows = class_lists._encode_classes(method)
    with pytest.raises(RuntimeError, match="3 classes"):
        adapter.method.set_class_rows(rows)
    with pytest.raises(KeyError, match="three"):
        rows.select(("one", "three"))
    assert torch.equal(rows.select(("two", "one")).frozen, rows.frozen.flip(0))


def test_a_list_shares_what_was_learned_with_its_adapter(made_runs):
    store = AdapterStore(made_runs, tiny_clip(dtype=torch.float32))
    store.refresh()
    for name in ADAPTERS:
        adapter = store.get(name)
        method = adapter.on_classes(("one", "two")).method
        learned = {name: tensor.data_ptr() for name, tensor in adapter.method.state_dict().items()}
        assert {name: tensor.data_ptr() for name, tensor in method.state_dict().items()} == learned


# -- the cache by itself ------------------------------------------------------------------------------


def test_a_caller_with_many_values_evicts_its_own_least_recently_used_one():
    cache: Cache[int] = Cache(100)
    cache.put("quiet", "quiet", 0, 30)
    for number in range(3):
        cache.put(number, "loud", number, 20)
    assert cache.find(0) == 0  # used: 1 is the oldest
    cache.put(3, "loud", 3, 20)
    assert [cache.find(key) for key in ("quiet", 0, 1, 2, 3)] == [0, 0, None, 2, 3]
    cache.put("long", "quiet", 1, 101)  # does not fit: nothing is evicted for it
    assert cache.find("long") is None
    assert len(cache) == 4
    cache.put(0, "quiet", 10, 20)  # another caller pays from now on
    cache.put(4, "loud", 4, 20)
    assert [cache.find(key) for key in ("quiet", 0, 2, 3, 4)] == [0, 10, None, 3, 4]


# -- who waits for texts ------------------------------------------------------------------------------


def test_names_are_encoded_once_whatever_list_they_stand_in(made_runs, monkeypatch):
    encoded: list[tuple[str, ...]] = []
    rows = class_lists._encode_classes

    def counted(method):
        encoded.append(method.classes)
        return rows(method)

    monkeypatch.setattr(class_lists, "_encode_classes", counted)
    first, second = class_list(40).split(","), class_list(30, "other").split(",")
    mixed = [name for pair in zip(first, second, strict=False) for name in reversed(pair)]
    with client_of(made_runs, SETTINGS, keys()) as client:
        ask(client, ("coop", "+" + ",".join(first), 0))
        encoded.clear()
        with ThreadPoolExecutor(4) as pool:  # two keys at once: none waits for the other's turns
            requests = [("coop", ",".join(mixed), 0)] * 4
            answers = list(pool.map(ask, [client] * 4, requests, [KEYS[0], KEYS[1]] * 2))
        assert sorted(name for names in encoded for name in names) == sorted(second)
        encoded.clear()
        ask(client, ("coop", ",".join(reversed(mixed)), 1))
        assert not encoded
    with client_of(made_runs, SETTINGS, keys()) as fresh:
        alone = ask(fresh, ("coop", ",".join(mixed), 0))
    assert answers == [pytest.approx(alone, abs=1e-5)] * 4


def test_a_caller_with_little_use_goes_before_those_who_use_the_device_all_the_time():
    queue: FairQueue[str] = FairQueue(credit=40)
    for number in range(20):
        for name in ("a", "b"):
            queue.put(name, 16, f"{name}{number}")
    for _ in range(10):
        queue.take()
    for number in range(4):
        queue.put("new", 16, f"new{number}")
    served = [queue.take() for _ in range(8)]
    assert served[:3] == ["new0", "new1", "new2"]  # what it saved up
    assert {one[0] for one in served[3:6]} == {"a", "b", "n"}  # then all in turn


def test_a_slice_of_texts_grows_when_the_device_turns_out_to_be_fast():
    pace = Pace(turn_seconds=0.2, first=16)
    assert pace.pieces(64) == 16
    pace.record(16, 0.032)
    assert pace.pieces(64) == 64
    pace.record(64, 64.0)
    assert pace.pieces(64) == 1
