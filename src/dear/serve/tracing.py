"""OpenTelemetry spans of requests, where the library is installed and set up; else nothing happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

try:
    from opentelemetry import propagate, trace
except ImportError:
    trace = None  # type: ignore[assignment]


@contextmanager
def span(scope: dict[str, Any], request_id: str) -> Iterator[Callable[[str, int, Mapping[str, float]], None]]:
    """A span of one request, child of the one that its `traceparent` header names.

    Yields a function to call with route, status and stages when the request is answered.
    """
    if trace is None:
        yield lambda route, status, stages: None
        return
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    parent = propagate.extract(headers)
    tracer = trace.get_tracer("dear.serve")
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
