"""Bounds on a connection that uvicorn does not have, for a service without a proxy in front.

A proxy does this better (`examples/serve`). `BoundedConnection` sits between a transport and uvicorn's
protocol and uses nothing but asyncio's protocol interface. It reads where a request's headers and body end,
changes no byte, and closes connections with endless headers or more than a few requests at once (pipelining).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

MOST_PIPELINED = 4  #: requests in one read
MOST_HEADER = 64 * 2**10  #: bytes of a request's headers; `Limits.header_bytes` refuses with a sentence
_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*(?:\r\n|$)", re.IGNORECASE)


class BoundedConnection(asyncio.Protocol):
    """One connection of uvicorn's protocol within bounds; its arguments are uvicorn's."""

    def __init__(self, **options: object) -> None:
        self._protocol = cast(Callable[..., asyncio.Protocol], AutoHTTPProtocol)(**options)
        self._head = b""  # what has arrived of a request's headers
        self._body = 0  # bytes of a request's body that are still to come

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._transport = cast(asyncio.Transport, transport)
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Hand data on if it is within bounds."""
        position = requests = 0
        while position < len(data):
            if self._body:
                step = min(self._body, len(data) - position)
                self._body -= step
                position += step
                continue
            head = self._head + data[position : position + MOST_HEADER]
            end = head.find(_END)
            requests += end >= 0
            if requests > MOST_PIPELINED or (end < 0 and len(head) >= MOST_HEADER):
                self._transport.abort()
                return
            if end < 0:
                self._head = head
                break
            length = _LENGTH.search(head, 0, end)
            position += end + len(_END) - len(self._head)
            self._head, self._body = b"", int(length[1]) if length else 0
        self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        """The client sends nothing more."""
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """The client reads again."""
        self._protocol.resume_writing()
