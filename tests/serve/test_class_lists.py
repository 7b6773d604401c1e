"""Requests that name classes: right answers when several of them prepare one list, and a bounded cache."""

from __future__ import annotations

import asyncio
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

from dear.methods.class_rows import ClassRows
from dear.serve.engine import Answerer
from dear.serve.keys import KeyEntry, KeyFile, Keys
from dear.serve.shared_cache import MOST_ABANDONED, SharedCache, Sized
from dear.serve.store import AdapterStore
from dear.serve.texts import prepare_texts
from dear.serve.turns import Pace

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
    short, long = ("zero", class_list(17), 0), ("zero", "+" + class_list(33), 0)
    with client_of(made_runs, SETTINGS, keys()) as client:
        service = client.app.state.service
        expected = [ask(client, short), ask(client, long)]
        service.class_lists = SharedCache(256, 30, 2**28)
        assert [ask(client, short), ask(client, long)] == [pytest.approx(one, abs=1e-5) for one in expected]
        assert len(service.class_lists) == 1
        assert service.class_lists.find((*_version(service, "zero"), tuple(short[1].split(",")))) is not None


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
    answerer = store.get("zero").on_classes(tuple(class_list(33).split(",")))
    first: list[ClassRows] = []

    async def repeat_first(function, cost):
        first.append(first[0] if first else function())
        return first[0] if len(first) == 2 else function()

    with pytest.raises(RuntimeError, match="33 classes"):
        asyncio.run(prepare_texts(answerer, repeat_first, Pace()))


def test_a_list_shares_what_was_learned_with_its_adapter(made_runs):
    store = AdapterStore(made_runs, tiny_clip(dtype=torch.float32))
    store.refresh()
    for name in ADAPTERS:
        adapter = store.get(name)
        method = adapter.on_classes(("one", "two")).method
        learned = {name: tensor.data_ptr() for name, tensor in adapter.method.state_dict().items()}
        assert {name: tensor.data_ptr() for name, tensor in method.state_dict().items()} == learned


# -- the cache by itself ------------------------------------------------------------------------------


def key(name: str, classes: int = 1) -> tuple[str, str, tuple[str, ...]]:
    return "adapter", "1", tuple(f"{name} {number}" for number in range(classes))


class Preparer:
    """Prepares a list when it is released; counts how often it was called."""

    def __init__(self, size: tuple[int, ...] = (1, 1, 1), error: Exception | None = None) -> None:
        self.size, self.error, self.calls, self.cancelled = size, error, 0, False
        self.released = asyncio.Event()
        self.answerer = Answerer.__new__(Answerer)

    async def __call__(self) -> Sized[Answerer]:
        self.calls += 1
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error is not None:
            raise self.error
        return Sized(self.answerer, self.size)


async def put(lists: SharedCache, name: str, classes: int = 1, size: int = 1) -> None:
    prepare = Preparer((1, classes, size))
    prepare.released.set()
    assert await lists.get(key(name, classes), "a", prepare) is prepare.answerer


@pytest.mark.parametrize(
    "bounds", [(2, 99, 999), (9, 20, 999), (9, 99, 200)], ids=["lists", "classes", "bytes"]
)
def test_the_cache_is_bounded_by_lists_classes_and_bytes(bounds):
    async def run() -> None:
        lists = SharedCache(*bounds)
        await put(lists, "first", 10, 100)
        await put(lists, "second", 10, 100)
        assert lists.find(key("first", 10)) is not None  # used last
        await put(lists, "third", 10, 100)
        assert [lists.find(key(name, 10)) is not None for name in ("first", "second", "third")] == [
            True, False, True,
        ]  # fmt: skip
        if bounds[0] > 2:
            await put(lists, "too long", 21, 201)
            assert len(lists) == 2

    asyncio.run(run())


def test_requests_of_a_caller_share_one_task_that_outlives_them():
    async def run() -> None:
        lists, prepare, other = SharedCache(9, 99, 999), Preparer(), Preparer()
        first, second = (asyncio.create_task(lists.get(key("x"), "a", prepare)) for _ in range(2))
        third = asyncio.create_task(lists.get(key("x"), "b", other))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (prepare.calls, other.calls, lists.computing) == (1, 1, 2)
        first.cancel()
        await asyncio.wait([first])
        assert first.cancelled()
        assert not prepare.cancelled
        second.cancel()
        await asyncio.wait([second])
        assert lists.computing == 2  # nobody waits, and it goes on
        again = asyncio.create_task(lists.get(key("x"), "a", prepare))
        await asyncio.sleep(0)
        prepare.released.set()
        assert await again is prepare.answerer
        assert prepare.calls == 1
        other.released.set()
        assert await third is other.answerer
        await asyncio.sleep(0)
        assert lists.computing == 0

    asyncio.run(run())


def test_failures_reach_every_request_and_are_not_cached():
    async def run() -> None:
        lists, broken = SharedCache(9, 99, 999), Preparer(error=ValueError("broken"))
        broken.released.set()
        results = await asyncio.gather(
            *(lists.get(key("x"), "a", broken) for _ in range(2)), return_exceptions=True
        )
        assert [type(one) for one in results] == [ValueError, ValueError]
        assert broken.calls == 1
        await asyncio.sleep(0)
        assert (len(lists), lists.computing) == (0, 0)
        await put(lists, "x")
        assert len(lists) == 1

    asyncio.run(run())


def test_only_tasks_without_waiters_are_cancelled_oldest_first():
    async def run() -> None:
        lists, count = SharedCache(9, 99, 999), MOST_ABANDONED + 3
        prepares = [Preparer() for _ in range(count)]
        tasks = [asyncio.create_task(lists.get(key(str(n)), "a", one)) for n, one in enumerate(prepares)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task in tasks[1:]:  # the first one still waits
            task.cancel()
        await asyncio.wait(tasks[1:])
        await asyncio.sleep(0)
        cancelled = [number for number, one in enumerate(prepares) if one.cancelled]
        assert cancelled == [1, 2]
        prepares[0].released.set()
        assert await tasks[0] is prepares[0].answerer

    asyncio.run(run())
