"""Middleware around all routes: request ids, log lines, counters, and limits on headers and bodies."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import time
from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dear.serve.errors import Refused, shutting_down
from dear.serve.metrics import Metrics
from dear.serve.traffic import Traffic

LOG = logging.getLogger("dear.serve")
CLIENT_LEFT = 499  #: in logs and counters: the client disconnected before its request had arrived
_CLOSE = {"connection": "close"}
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestMiddleware:
    """ASGI middleware; neither image content nor keys are ever logged.

    `paths` are those of the routes by their endpoint, for log lines and counters.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, traffic: Traffic, paths: Mapping[Any, str]) -> None:
        self.app, self.metrics, self.traffic, self.paths = app, metrics, traffic, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        headers = dict(scope["headers"])
        sent_id = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = sent_id if _ID.fullmatch(sent_id) else f"{random.getrandbits(128):032x}"
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def respond(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((b"x-request-id", request_id.encode()))
            await send(message)

        async def refuse(error: Refused) -> None:
            if not status:
                await error_response(error, **_CLOSE)(scope, receive, respond)

        length, held = headers.get(b"content-length", b"0"), 0

        async def receive_body() -> Message:
            """The next part of the body, all of whose bytes count as held until the request is answered."""
            nonlocal held
            if not held:
                self.traffic.hold(scope["state"].setdefault("caller", ""), int(length))
                held = int(length)
            return await receive()

        try:
            refusal = self._refusal_by_headers(scope, headers)
            if refusal is not None:
                await refuse(refusal)
            else:
                await self.app(scope, receive_body, respond)
        except asyncio.CancelledError:  # the drain limit is over
            await refuse(shutting_down())
            raise
        except ClientDisconnect:
            status = status or CLIENT_LEFT
        except Exception:
            LOG.exception(json.dumps({"request": request_id, "failed": True}))
            await refuse(Refused(500, f"the service failed; its log names request {request_id}"))
        finally:
            if held:
                self.traffic.hold(scope["state"]["caller"], -held)
            self._record(scope, status, time.perf_counter() - began)

    def _refusal_by_headers(self, scope: Scope, headers: dict[bytes, bytes]) -> Refused | None:
        """Why a request is refused by its headers alone; None if it is not."""
        most = self.traffic.limits.header_bytes
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size + len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"") > most:
            return Refused(431, f"address and headers must have at most {most:,} bytes")
        if b"upgrade" in headers:  # the parser takes what follows for another protocol
            return Refused(400, "send the request without the header Upgrade; only HTTP/1.1 is served")
        if b"transfer-encoding" in headers:  # one byte per chunk costs a thousand times its size
            return Refused(411, "send the body with Content-Length, not in chunks")
        length = headers.get(b"content-length", b"0")
        limits = self.traffic.limits
        most = limits.upload_bytes if scope["path"].endswith("/upload") else limits.body_bytes
        if not length.isdigit() or len(length) > 15 or int(length) > most:
            sent = length[:20].decode("latin-1")
            return Refused(413, f"the body must have at most {most:,} bytes, got Content-Length: {sent}")
        return None

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = self.paths.get(scope.get("endpoint"), "none")
        self.metrics.observe_request(route, status, seconds)
        client, state = scope.get("client"), scope["state"]
        line = {
            "request": state["request_id"],
            "client": client[0] if client else None,
            "key": state.get("key"),
            "method": scope["method"],
            "route": route,
            "model": scope.get("path_params", {}).get("name"),
            "status": status,
            "seconds": round(seconds, 4),
        }
        LOG.info(msgspec.json.encode(line).decode())


def error_response(error: Refused, **headers: str) -> JSONResponse:
    """A refusal as a response: its status and one sentence, in OpenAI's form."""
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return JSONResponse({"error": {"message": str(error)}}, error.http_status, headers)
