"""Connections that cannot be used up: bounds on headers, on silence, and on how many there are.

uvicorn bounds neither the size of a request's headers nor the time they take, and accepts connections until
the process has no descriptor left. Its protocol is extended by these bounds. When all connections are taken,
a new one takes the place of the one that has waited longest for a request, so that silent connections shut
nobody out.
"""

from __future__ import annotations

import asyncio
import http
import json
from collections import OrderedDict
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dear.serve.settings import Limits

_CHUNK = 256 * 2**10  # bytes that the event loop reads at once


def guarded_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """The protocol class for uvicorn's `http` setting."""
    descriptors = _descriptors()
    most = limits.connections if descriptors is None else max(8, min(limits.connections, descriptors - 128))
    idle: OrderedDict[Guarded, None] = OrderedDict()
    return type("GuardedProtocol", (Guarded,), {"limits": limits, "most": most, "idle": idle})


def _descriptors() -> int | None:
    """Files and connections that this process may have open."""
    try:
        import resource

        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except (ImportError, OSError):
        return None


class Guarded(HttpToolsProtocol):
    """uvicorn's protocol within bounds; `guarded_protocol` sets them."""

    limits: Limits
    most: int  #: connections
    idle: OrderedDict[Guarded, None]  #: connections that wait for a request, the longest waiting first

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._unread = 0  # bytes since the last part of a body: of headers, or beside the body
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    @property
    def _waits(self) -> bool:
        """Whether no request is being answered or received."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, in the place of an idle one if need be."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            if not self.idle:
                self._refuse(503, "too many connections; try again")
                return
            self.idle.popitem(last=False)[0].transport.abort()
        self.idle[self] = None
        self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.idle.pop(self, None)
        self._stop("_header_timer")
        self._stop("_write_timer")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, within bounds."""
        waited = self._waits
        if waited and self._header_timer is None:  # the next request of an open connection begins
            self._await_header()
        self._unread += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if waited and not self._waits:
            self._stop("_header_timer")
            self.idle.pop(self, None)
            self._unread = 0
        elif self._unread > self.limits.header_bytes + (0 if waited else _CHUNK):
            self._refuse(431, f"the headers have more than {self.limits.header_bytes:,} bytes")

    def on_body(self, body: bytes) -> None:
        """A part of the body arrived."""
        self._unread = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        """The connection waits for its next request."""
        super().on_response_complete()
        self._unread = 0
        if not self.transport.is_closing() and self._waits:
            self.idle[self] = None

    def pause_writing(self) -> None:
        """The client does not read; it has some time to."""
        super().pause_writing()
        self._stop("_write_timer")
        self._write_timer = self.loop.call_later(self.limits.seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads on."""
        super().resume_writing()
        self._stop("_write_timer")

    def _await_header(self) -> None:
        self._stop("_header_timer")
        self._header_timer = self.loop.call_later(self.limits.header_seconds, self._header_late)

    def _header_late(self) -> None:
        self._header_timer = None
        if self._waits and not self.transport.is_closing():
            seconds = self.limits.header_seconds
            self._refuse(408, f"the request's headers did not arrive within {seconds:g} seconds")

    def _stop(self, timer: str) -> None:
        handle: asyncio.TimerHandle | None = getattr(self, timer)
        if handle is not None:
            handle.cancel()
            setattr(self, timer, None)

    def _refuse(self, status: int, sentence: str) -> None:
        """Answer with a status and one sentence, and close."""
        body = json.dumps({"error": sentence}).encode()
        head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.idle.pop(self, None)
        if self._waits:  # else an answer may have begun
            self.transport.write(head.encode() + body)
            self.transport.close()
        else:
            self.transport.abort()
