"""The only module that knows Ray: tasks, shards and replicas on a cluster, or on a Ray started here."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dear.errors import UsageError
from dear.utils.extras import missing_extra


def _ray(*parts: str) -> Any:
    """The module `ray`, with parts of it imported."""
    try:
        for part in parts:
            importlib.import_module(f"ray.{part}")
        return importlib.import_module("ray")
    except ImportError:
        extras = "cluster,serve" if "serve" in parts else "cluster"
        raise missing_extra("the engine ray", extras) from None


def check_installed() -> None:
    """Raise a UsageError if Ray is missing."""
    _ray()


def connect(address: str | None = None) -> bool:
    """Connect to a cluster ("auto", "ray://host:10001"), or start Ray; False if the process is connected."""
    ray = _ray()
    if ray.is_initialized():
        return False
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **({} if address else {"include_dashboard": False}),
        )
    except ConnectionError as error:
        raise UsageError(f"{address}: cannot connect to a Ray cluster ({error}); check the address") from None
    return True


@contextmanager
def connection(address: str | None = None) -> Iterator[None]:
    """A connection within a block; an existing one is kept afterwards."""
    started = connect(address)
    try:
        yield
    finally:
        if started:
            _ray().shutdown()


def run_tasks(
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    cpus: float = 1,
    gpus: float = 0,
    retries: int = 3,
) -> Iterator[tuple[int, Any, str]]:
    """Call a function with each of the arguments; yields (index, result, error) in the order they finish.

    The function must be importable on every node. A call reserves `cpus` and `gpus` (fractions are allowed).
    If its worker dies, it is restarted up to `retries` times; then its error is not empty.
    """
    ray = _ray("exceptions")
    task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=retries, max_calls=0)(function)
    pending = {task.remote(*values): index for index, values in enumerate(arguments)}
    while pending:
        ready, _ = ray.wait(list(pending), num_returns=1)
        for reference in ready:
            index = pending.pop(reference)
            try:
                yield index, ray.get(reference), ""
            except ray.exceptions.RayError as error:
                yield index, None, f"its Ray worker was lost: {str(error).splitlines()[0]}"


def map_items(make: Callable[[], Callable[[int], int]], items: Sequence[int], workers: int) -> Iterator[int]:
    """Results of a function for all items, by Ray Data; every worker builds the function once."""
    ray = _ray("data")

    class Worker:
        def __init__(self) -> None:
            self.function = make()

        def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            return {"result": self.function(int(row["item"]))}

    if items:
        rows: Any = ray.data.from_items(list(items), override_num_blocks=len(items))
        for row in rows.map(Worker, concurrency=min(workers, len(items))).iter_rows():
            yield int(row["result"])


def serve_replicas(
    application: Callable[[], Any],
    name: str,
    route: str,
    host: str,
    port: int,
    *,
    replicas: int = 1,
    cpus: float = 1,
    gpus: float = 0,
    max_requests: int = 100,
    drain_seconds: float = 20,
    address: str | None = None,
) -> Any:
    """Start an application by Ray Serve; returns when its replicas answer.

    Args:
        application: returns the ASGI application of a replica.
        name: of the application.
        route: prefix of its addresses.
        host: address that every machine's proxy listens on.
        port: its port.
        replicas: their number; for each, Ray reserves `cpus` and `gpus`.
        cpus: per replica.
        gpus: per replica.
        max_requests: concurrent requests of a replica.
        drain_seconds: time for running requests when a replica shuts down.
        address: of a running cluster; None starts one here.
    """
    serve = _ray("serve").serve
    connect(address)
    serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port})

    def make() -> Any:  # Ray treats anything but a function, a partial too, as the application itself
        return application()

    replica: Any = serve.ingress(make)()
    deployment: Any = serve.deployment(
        replica,
        name="replica",
        num_replicas=replicas,
        max_ongoing_requests=max_requests,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        health_check_period_s=2,
        graceful_shutdown_timeout_s=drain_seconds,
    )
    return serve.run(deployment.bind(), name=name, route_prefix=route, blocking=False)
