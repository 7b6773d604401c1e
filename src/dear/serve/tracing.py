"""Where the time of a request goes, by stage: for its log line, the header `Server-Timing` and its trace.

A request is an OpenTelemetry span where that library is installed and set up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

try:
    from opentelemetry import propagate, trace
except ImportError:
    trace = None  # type: ignore[assignment]

_seconds: ContextVar[dict[str, float] | None] = ContextVar("dear_stages", default=None)


@contextmanager
def staged() -> Iterator[dict[str, float]]:
    """Collect the stages of one request: seconds by name, in their order."""
    found: dict[str, float] = {}
    before = _seconds.set(found)
    try:
        yield found
    finally:
        _seconds.reset(before)


def add_stage(name: str, seconds: float) -> None:
    """Note time of the current request; without one nothing happens."""
    found = _seconds.get()
    if found is not None:
        found[name] = found.get(name, 0.0) + seconds


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Note the time of a block."""
    began = time.perf_counter()
    try:
        yield
    finally:
        add_stage(name, time.perf_counter() - began)


def add_split(first: str, second: str, began: float, between: float | None) -> None:
    """Note two stages in a row, by `time.perf_counter`; the second ends now, or never began."""
    now = time.perf_counter()
    add_stage(first, (now if between is None else between) - began)
    if between is not None:
        add_stage(second, now - between)


def server_timing(seconds: dict[str, float]) -> bytes:
    """The header's value, in milliseconds.

    >>> server_timing({"read": 0.001, "decode": 0.02})
    b'read;dur=1.0, decode;dur=20.0'
    """
    return ", ".join(f"{name};dur={1000 * value:.1f}" for name, value in seconds.items()).encode()


@contextmanager
def span(scope: dict[str, Any], request_id: str) -> Iterator[Callable[[str, int, Mapping[str, float]], None]]:
    """A span of one request, child of the one that its `traceparent` header names.

    Yields a function to call with route, status and stages when the request is answered.
    """
    tracer = None if trace is None else trace.get_tracer("dear.serve")
    if tracer is None or isinstance(tracer, trace.ProxyTracer):  # the latter: nobody has set tracing up
        yield _untraced
        return
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    parent = propagate.extract(headers)
    with tracer.start_as_current_span(scope["method"], parent, trace.SpanKind.SERVER) as current:
        current.set_attribute("dear.request", request_id)

        def answered(route: str, status: int, stages: Mapping[str, float]) -> None:
            current.update_name(f"{scope['method']} {route}")
            current.set_attribute("http.route", route)
            current.set_attribute("http.response.status_code", status)
            current.set_attribute("dear.key", str(scope["state"].get("key")))
            for name, seconds in stages.items():
                current.set_attribute(f"dear.{name}.seconds", seconds)

        yield answered


def _untraced(route: str, status: int, stages: Mapping[str, float]) -> None:
    """Nothing is noted."""
