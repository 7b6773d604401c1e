"""Bounds on a connection that uvicorn does not have, for a service without a proxy in front.

A proxy does this better (`examples/serve`). `BoundedConnection` sits between a transport and uvicorn's
protocol and uses nothing but asyncio's protocol interface. It reads where a request's headers and body end,
changes no byte, and closes connections: slow or endless headers, more than a few requests at once
(pipelining), and clients that do not read their answers.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from dear.serve.settings import Limits

MOST_PIPELINED = 4  #: requests in one read
_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*(?:\r\n|$)", re.IGNORECASE)


def bounded_protocol(limits: Limits) -> Callable[..., asyncio.Protocol]:
    """A factory for uvicorn's setting `http`."""
    inner = cast(Callable[..., asyncio.Protocol], AutoHTTPProtocol)
    return lambda **options: BoundedConnection(inner(**options), limits)


class BoundedConnection(asyncio.Protocol):
    """One connection of uvicorn's protocol within bounds."""

    def __init__(self, protocol: asyncio.Protocol, limits: Limits) -> None:
        self._protocol, self._limits = protocol, limits
        self._head = b""  # what has arrived of a request's headers
        self._body = 0  # bytes of a request's body that are still to come
        self._requests = 0  # whose headers have arrived
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first request."""
        self._transport = cast(asyncio.Transport, transport)
        self._protocol.connection_made(transport)
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """End all timers."""
        self._header_timer = _cancel(self._header_timer)
        self._write_timer = _cancel(self._write_timer)
        self._protocol.connection_lost(exc)

    def eof_received(self) -> bool | None:
        """The client sends nothing more."""
        return self._protocol.eof_received()

    def data_received(self, data: bytes) -> None:
        """Hand data on if it is within bounds."""
        place, before = 0, self._requests
        while place < len(data):
            if self._body:
                step = min(self._body, len(data) - place)
                self._body -= step
                place += step
                continue
            head = self._head + data[place : place + self._limits.header_bytes + len(_END)]
            end = head.find(_END)
            if end < 0:
                if len(head) > self._limits.header_bytes:
                    most = self._limits.header_bytes
                    self._refuse(431, f"address and headers must have at most {most:,} bytes")
                    return
                self._head = head
                break
            place += end + len(_END) - len(self._head)
            length = _LENGTH.search(head, 0, end)
            self._head, self._body = b"", int(length[1]) if length else 0
            self._requests += 1
            if self._requests - before > MOST_PIPELINED:
                self._refuse(429, f"at most {MOST_PIPELINED} requests may be sent before an answer is read")
                return
        if not self._head:
            self._header_timer = _cancel(self._header_timer)
        elif self._header_timer is None:
            self._await_headers()
        self._protocol.data_received(data)

    def pause_writing(self) -> None:
        """The client does not read; the connection is closed unless it does so in time."""
        self._protocol.pause_writing()
        if self._write_timer is None:
            loop = asyncio.get_running_loop()
            self._write_timer = loop.call_later(self._limits.seconds, self._transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        self._protocol.resume_writing()
        self._write_timer = _cancel(self._write_timer)

    def _await_headers(self) -> None:
        seconds = self._limits.header_seconds
        late = (408, f"the headers must arrive within {seconds:g} seconds")
        self._header_timer = asyncio.get_running_loop().call_later(seconds, self._refuse, *late)

    def _refuse(self, status: int, sentence: str) -> None:
        """Close the connection, with a reason if no answer can be under way."""
        if self._transport.is_closing():
            return
        if self._requests:
            self._transport.abort()
            return
        body = json.dumps({"error": {"message": sentence}}).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self._transport.write(head.encode() + body)
        self._transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> Any:
    if timer is not None:
        timer.cancel()
    return None
