"""Middleware of the service: request ids, log lines, limits on bodies, and errors as one sentence."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from typing import Any

from starlette.requests import ClientDisconnect

from dear.serve.errors import Refused
from dear.serve.metrics import Metrics
from dear.serve.settings import Limits

LOG = logging.getLogger("dear.serve")
GONE = 499  #: in logs and counters: the client went away before its request had arrived
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Guard:
    """ASGI middleware; no image content is ever logged.

    Args:
        app: the service.
        limits: on the body and its time.
        metrics: that count the request.
    """

    def __init__(self, app: Any, limits: Limits, metrics: Metrics) -> None:
        self.app, self.limits, self.metrics = app, limits, metrics

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Handle one connection's event."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        number = given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = number
        answered: dict[str, Any] = {"status": 0}

        async def told(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                answered["status"] = message["status"]
                message.setdefault("headers", []).append((b"x-request-id", number.encode()))
            await send(message)

        try:
            await self.app(scope, self._measured(scope, receive), told)
        except Refused as error:
            if not answered["status"]:
                await _refuse(error, told)
        except ClientDisconnect:
            answered["status"] = answered["status"] or GONE
        except Exception:
            LOG.exception(json.dumps({"request": number, "failed": True}))
            if not answered["status"]:
                await _refuse(Refused(500, f"the service failed; its log names request {number}"), told)
        finally:
            self._count(scope, answered["status"], time.perf_counter() - began, number)

    def _measured(self, scope: dict[str, Any], receive: Any) -> Any:
        """`receive` with a limit on the bytes of the body and the time they take to arrive."""
        most = self.limits.upload_bytes if scope["path"].endswith("/upload") else self.limits.body_bytes
        length = dict(scope["headers"]).get(b"content-length", b"0")
        announced = int(length) if length.isdigit() else 0
        until = time.monotonic() + self.limits.body_seconds
        seen, whole = 0, False

        async def measured() -> Any:
            nonlocal seen, whole
            if announced > most:
                raise Refused(413, f"the request has {announced:,} bytes; {most:,} are allowed")
            if whole:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.001, until - time.monotonic()))
            except asyncio.TimeoutError:
                raise Refused(
                    408, f"the request did not arrive within {self.limits.body_seconds:g} seconds"
                ) from None
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                whole = not message.get("more_body", False)
                if seen > most:
                    raise Refused(413, f"the request has more than {most:,} bytes")
            return message

        return measured

    def _count(self, scope: dict[str, Any], status: int, seconds: float, number: str) -> None:
        route = getattr(scope.get("route"), "path", "none")
        self.metrics.requests.labels(route, status).inc()
        self.metrics.seconds.labels(route).observe(seconds)
        LOG.info(
            json.dumps(
                {
                    "request": number,
                    "method": scope["method"],
                    "route": route,
                    "model": scope.get("path_params", {}).get("name"),
                    "status": status,
                    "seconds": round(seconds, 4),
                }
            )
        )


def body_of(error: Refused) -> dict[str, Any]:
    """The JSON of a refusal."""
    return {"error": str(error)}


async def _refuse(error: Refused, send: Any) -> None:
    """Answer with the refusal's status and sentence."""
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body_of(error)).encode()})
