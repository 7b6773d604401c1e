"""A Hugging Face hub in one small server, with switches for everything that can go wrong on the way."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".bin", ".pt")


class FakeHub:
    """Serves the files of `folder` as the repository `name`.

    `corrupt` flips a byte of those files in transit; `cut` breaks the first transfer of a file after so many
    bytes; `down` answers everything with 503. `requests` lists (method, path, range).
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.corrupt: set[str] = set()
        self.cut: dict[str, int] = {}
        self.down = False
        self.requests: list[tuple[str, str, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

            def do_GET(self) -> None:
                hub._answer(self, body=True)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def transfers(self, file: str) -> list[str | None]:
        """The ranges asked for when `file` was downloaded."""
        return [part for method, path, part in self.requests if method == "GET" and path.endswith(f"/{file}")]

    def checksum(self, file: str) -> str:
        data = (self.folder / file).read_bytes()
        if file.endswith(LARGE):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def _answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = unquote(urlparse(request.path).path)
        self.requests.append((request.command, path, request.headers.get("Range")))
        files = sorted(file.name for file in self.folder.iterdir())
        api, known = f"/api/models/{self.name}", ("main", COMMIT)
        revision, _, file = path.removeprefix(f"/{self.name}/resolve/").partition("/")
        if self.down:
            self._send(request, 503, b"", {}, body)
        elif path in (api, *(f"{api}/revision/{name}" for name in known)):
            self._send(request, 200, json.dumps(self._listing(files)).encode(), {}, body)
        elif path in [f"{api}/tree/{name}" for name in known]:
            sizes = {file: (self.folder / file).stat().st_size for file in files}
            tree = [{"type": "file", "path": file, "size": n, "oid": "0" * 40} for file, n in sizes.items()]
            self._send(request, 200, json.dumps(tree).encode(), {}, body)
        elif revision in known and file in files:
            self._file(request, file, body)
        else:
            code = "EntryNotFound" if revision in known else "RepoNotFound"
            code = "RevisionNotFound" if path.startswith(f"{api}/revision/") else code
            self._send(request, 404, b"", {"X-Error-Code": code, "X-Repo-Commit": COMMIT}, body)

    def _listing(self, files: list[str]) -> dict:
        siblings = []
        for file in files:
            size = (self.folder / file).stat().st_size
            sibling = {"rfilename": file, "size": size, "blobId": self.checksum(file)[:40]}
            if file.endswith(LARGE):
                sibling["lfs"] = {"size": size, "sha256": self.checksum(file), "pointerSize": 134}
            siblings.append(sibling)
        return {"id": self.name, "modelId": self.name, "sha": COMMIT, "siblings": siblings, "tags": []}

    def _file(self, request: BaseHTTPRequestHandler, file: str, body: bool) -> None:
        data = (self.folder / file).read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{self.checksum(file)}"', "Accept-Ranges": "bytes"}
        headers |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{self.checksum(file)}"'}
        if file in self.corrupt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        status, start = 200, 0
        asked = request.headers.get("Range")
        if asked and body:
            start = int(asked.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            status = 206
        stop = self.cut.pop(file, None) if body else None
        self._send(request, status, data[start:], headers, body, stop)

    @staticmethod
    def _send(
        request: BaseHTTPRequestHandler,
        status: int,
        data: bytes,
        headers: dict,
        body: bool,
        stop: int | None = None,
    ) -> None:
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            request.send_header(key, value)
        request.end_headers()
        if body:
            request.wfile.write(data[:stop])
        if stop is not None:
            request.close_connection = True
