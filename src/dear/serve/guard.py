"""Middleware of the service: request ids, log lines, limits on bodies, and errors as one sentence."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import time
from collections.abc import MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from dear.errors import DearError
from dear.serve.errors import Refused, stopping
from dear.serve.metrics import Metrics
from dear.serve.tracing import server_timing, span, staged
from dear.serve.traffic import Traffic

LOG = logging.getLogger("dear.serve")
GONE = 499  #: in logs and counters: the client went away before its request had arrived
_CLOSE = {"connection": "close"}
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Guard:
    """ASGI middleware around the router; neither image content nor keys are ever logged."""

    def __init__(self, app: Any, metrics: Metrics, traffic: Traffic) -> None:
        self.app, self.metrics, self.traffic = app, metrics, traffic

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Handle one connection's event."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, most = time.perf_counter(), self.traffic.limits.header_bytes
        sent = dict(scope["headers"])
        given = sent.get(b"x-request-id", b"").decode("latin-1")
        number = given if _ID.fullmatch(given) else f"{random.getrandbits(128):032x}"
        state = scope.setdefault("state", {})
        state["request_id"] = number
        answered: dict[str, Any] = {"status": 0}

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                answered["status"] = message["status"]
                headers = message.setdefault("headers", [])
                headers.append((b"x-request-id", number.encode()))
                if spent:
                    headers.append((b"server-timing", server_timing(spent)))
            await send(message)

        async def refuse(error: Refused, **headers: str) -> None:
            if not answered["status"]:
                await response_of(error, **headers)(scope, receive, answer)

        body = _Body(scope, sent.get(b"content-length", b""), receive, self.traffic)
        with staged() as spent, span(scope, number) as traced:
            try:
                if sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > most:
                    await refuse(Refused(431, f"the headers have more than {most:,} bytes"), **_CLOSE)
                else:
                    await self.app(scope, body.receive, answer)
            except DearError as error:
                await refuse(error if isinstance(error, Refused) else Refused(400, str(error)))
            except HTTPException as error:  # of the framework
                await refuse(_sentence(error, scope), **(error.headers or {}))
            except asyncio.CancelledError:  # the drain limit is over
                await refuse(stopping(), **_CLOSE)
                raise
            except ClientDisconnect:
                answered["status"] = answered["status"] or GONE
            except Exception:
                LOG.exception(json.dumps({"request": number, "failed": True}))
                await refuse(Refused(500, f"the service failed; its log names request {number}"), **_CLOSE)
            finally:
                body.release()
                seconds = time.perf_counter() - began
                traced(_route(scope), answered["status"], spent)
                self._count(scope, answered["status"], seconds, number, spent)

    def _count(
        self, scope: dict[str, Any], status: int, seconds: float, number: str, spent: dict[str, float]
    ) -> None:
        route = _route(scope)
        self.metrics.observe_request(route, status, seconds, spent)
        client = scope.get("client")
        line = {
            "request": number,
            "client": client[0] if client else None,
            "key": scope["state"].get("key"),
            "method": scope["method"],
            "route": route,
            "model": scope.get("path_params", {}).get("name"),
            "status": status,
            "seconds": round(seconds, 4),
        }
        if spent:
            line["stages"] = {name: round(part, 4) for name, part in spent.items()}
        LOG.info(json.dumps(line))


def _route(scope: dict[str, Any]) -> str:
    return getattr(scope.get("route"), "path", "none")


def _sentence(error: HTTPException, scope: dict[str, Any]) -> Refused:
    """What the framework refuses, in the form of the service."""
    path, status = scope["path"], error.status_code
    sentences = {
        404: f"nothing is at {path}; /docs describes the addresses",
        405: f"{path} does not take {scope['method']}; /docs describes the addresses",
    }
    return Refused(status, sentences.get(status, str(error.detail)))


class _Body:
    """`receive` with limits on the bytes of the body and on what all bodies hold."""

    def __init__(self, scope: dict[str, Any], length: bytes, receive: Any, traffic: Traffic) -> None:
        self._receive, self._traffic, self._state = receive, traffic, scope["state"]
        limits = traffic.limits
        self._most = limits.upload_bytes if scope["path"].endswith("/upload") else limits.body_bytes
        self._announced = int(length) if length.isdigit() and len(length) < 20 else 0
        self._seen, self._caller = 0, ""

    async def receive(self) -> Any:
        """The next event."""
        if self._announced > self._most:
            raise Refused(413, f"the request has {self._announced:,} bytes; {self._most:,} are allowed")
        message = await self._receive()
        if message["type"] == "http.request":
            count = len(message.get("body", b""))
            if self._seen + count > self._most:
                raise Refused(413, f"the request has more than {self._most:,} bytes")
            self._caller = self._caller or self._state.get("caller") or ""
            self._traffic.hold(self._caller, count)
            self._seen += count
        return message

    def release(self) -> None:
        """The request is answered; its bytes are no longer held."""
        if self._seen:
            self._traffic.hold(self._caller, -self._seen)


def response_of(error: Refused, **headers: str) -> JSONResponse:
    """A refusal as a response: its status and one sentence."""
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return JSONResponse({"error": str(error)}, error.http_status, headers)
