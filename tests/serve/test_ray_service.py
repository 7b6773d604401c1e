"""The service on a local Ray cluster: a replica is killed under load. Slow: set DEAR_SLOW=1 to run it."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from serving import image_bytes

import dear
from dear.errors import UsageError
from dear.serve.ray_app import RayService, start
from dear.serve.settings import Limits, ServeSettings

CLIENTS = 4


def test_what_cannot_be_started_is_refused() -> None:
    with pytest.raises(UsageError, match=r"replicas.*0"):
        RayService("runs", "mini", replicas=0)
    for route in ("small", "/small/", "/a b"):
        with pytest.raises(UsageError, match=re.escape(route)):
            RayService("runs", "mini", route=route)
    one = RayService("runs", "mini")
    assert len({one.name, replace(one, route="/small").name, replace(one, route="/a/b").name}) == 3


@pytest.mark.slow
def test_a_replica_killed_under_load_loses_only_what_it_was_computing(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    httpx = pytest.importorskip("httpx")
    classifier = dear.Classifier(method="zeroshot", backbone="mini", device="cpu").fit("world:vehicles")
    classifier.save(tmp_path / "runs" / "zero")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    answers, failures, stop = [], [], threading.Event()
    began = time.monotonic()

    def replicas() -> list[str]:
        named = ray.util.list_named_actors(all_namespaces=True)
        return [one["name"] for one in named if "dear" in one["name"] and "replica" in one["name"]]

    def ask() -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            while not stop.is_set():
                files = [("files", ("a.png", image_bytes(1)))]
                try:
                    reply = client.post("/v1/models/zero/classify", files=files)
                except httpx.TransportError as error:
                    failures.append((time.monotonic() - began, repr(error)))
                    continue
                if reply.status_code == 200:
                    answers.append((time.monotonic() - began, reply.json()["answers"][0]["classes"][0]))
                else:
                    failures.append((time.monotonic() - began, reply.text[:200]))

    try:
        settings = ServeSettings(Limits(seconds=60), poll_seconds=5)
        start(RayService(str(tmp_path / "runs"), "mini", settings, replicas=2, cpus=1), "127.0.0.1", port)
        assert len(replicas()) == 2
        clients = [threading.Thread(target=ask) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        time.sleep(8)
        before = len(answers)
        killed = replicas()[0]
        ray.kill(ray.get_actor(killed, namespace="serve"))
        at = time.monotonic() - began
        time.sleep(15)
        after = len(answers) - before
        stop.set()
        for client in clients:
            client.join()
        until = time.monotonic() + 60
        while len([name for name in replicas() if name != killed]) < 2 and time.monotonic() < until:
            time.sleep(0.5)
        print(f"{before} answers before, {after} after, {len(failures)} lost: {failures[:5]}")
        assert before > 0
        assert after > 0
        assert len({one["name"] for _, one in answers}) == 1  # every replica gives the same answer
        assert len(failures) <= CLIENTS  # in flight on the killed replica at most
        assert all(abs(when - at) < 15 for when, _ in failures)
        assert len([name for name in replicas() if name != killed]) == 2  # another took its place
    finally:
        stop.set()
        ray.shutdown()


@pytest.fixture(autouse=True)
def _found_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's workers import this tree."""
    tree = str(Path(dear.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([tree, os.environ.get("PYTHONPATH", "")]))
