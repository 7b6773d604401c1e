"""The labeling page: a small web server for one person, or a few, who label the same images.

It listens on this computer unless another address is given, and every request needs the token of the address
that it prints.
"""

from __future__ import annotations

import hmac
import io
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

from dear.errors import DearError, InputError, UsageError
from dear.report.page import render
from dear.tasks.labeling.session import LabelingSession

LARGEST = 1 << 20  #: bytes of a request
SIDES = (224, 640)  #: of the images that the page shows, in pixels
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src 'self' data:"
    ),
}


class LabelingServer(ThreadingHTTPServer):
    """Serves the page of a session.

    Args:
        session: what is labeled.
        host: address to listen on.
        port: 0 finds a free one.

    Raises:
        UsageError: the address cannot be used.
    """

    daemon_threads = True

    def __init__(self, session: LabelingSession, host: str = "127.0.0.1", port: int = 0) -> None:
        if not 0 <= port <= 65535:
            raise UsageError(f"port must be 0 (a free one) to 65535, got {port}")
        self.session, self.token = session, secrets.token_urlsafe(16)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise UsageError(
                f"the labeling page cannot listen on {host}:{port} ({error.strerror or error}); "
                "choose another port"
            ) from error

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/?token={self.token}"

    @lru_cache(maxsize=2048)  # noqa: B019 - the server lives as long as the process
    def thumbnail(self, place: int, side: int) -> bytes:
        """An image as JPEG, its longer side at most `side`."""
        image = self.session.images.image(place)
        image.thumbnail((side, side))
        file = io.BytesIO()
        image.convert("RGB").save(file, "JPEG", quality=88)
        return file.getvalue()


class _Handler(BaseHTTPRequestHandler):
    server: LabelingServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: the token is in them."""

    def _answer(self, handle: Any) -> None:
        address = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(address.query).items()}
        try:
            if not hmac.compare_digest(query.get("token", "").encode(), self.server.token.encode()):
                self._send(
                    HTTPStatus.FORBIDDEN, {"error": "the address needs its token; open the one printed"}
                )
                return
            handle(address.path, query)
        except DearError as error:
            self._send(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except (KeyError, TypeError, ValueError) as error:
            self._send(HTTPStatus.BAD_REQUEST, {"error": f"request is malformed: {error}"})
        except BrokenPipeError:
            pass

    def _get(self, path: str, query: dict[str, str]) -> None:
        session = self.server.session
        if path == "/":
            page = render("label.html", title=f"Labels of {session.images.name}")
            self._send(HTTPStatus.OK, page.encode(), "text/html; charset=utf-8")
        elif path == "/state":
            place = int(query["place"]) if "place" in query else None
            self._send(HTTPStatus.OK, session.state(query.get("tab", ""), query.get("mode", "one"), place))
        elif path == "/image":
            place, side = int(query["place"]), int(query.get("side", SIDES[0]))
            if not 0 <= place < len(session.paths) or side not in SIDES:
                raise InputError(f"image {place} at {side} pixels does not exist")
            self._send(HTTPStatus.OK, self.server.thumbnail(place, side), "image/jpeg")
        else:
            self._send(HTTPStatus.NOT_FOUND, {"error": f"{path}: no such page"})

    def _post(self, path: str, query: dict[str, str]) -> None:
        session, body = self.server.session, self._body()
        tab, mode, place = str(body.get("tab", "")), str(body.get("mode", "one")), None
        if path == "/answer":
            places = [int(value) for value in body["places"]]
            session.answer(places, body["kind"], str(body.get("label", "")), tab)
        elif path == "/undo":
            place = session.undo(tab)
        elif path == "/class":
            session.add_class(str(body["name"]))
            place = body.get("place")
        else:
            self._send(HTTPStatus.NOT_FOUND, {"error": f"{path}: no such page"})
            return
        self._send(HTTPStatus.OK, session.state(tab, "one" if place is not None else mode, place))

    def _body(self) -> dict[str, Any]:
        length = int(self.headers.get("Content-Length", 0))
        if not 0 < length <= LARGEST:
            self.close_connection = True
            raise InputError(f"a request has from 1 to {LARGEST} bytes, got {length}")
        body = json.loads(self.rfile.read(length))
        if not isinstance(body, dict):
            raise InputError("a request must be a JSON object")
        return body

    def _send(
        self, status: HTTPStatus, content: bytes | dict[str, Any], kind: str = "application/json"
    ) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in _HEADERS.items():
            if name != "Cache-Control" or kind != "image/jpeg":
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(session: LabelingSession, host: str = "127.0.0.1", port: int = 0) -> Iterator[LabelingServer]:
    """Serve the page of a session until the context ends."""
    server = LabelingServer(session, host, port)
    thread = Thread(target=server.serve_forever, name="labeling page", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        session.close()
