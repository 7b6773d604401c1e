"""The service behind Debian's nginx with the configuration of examples/serve, on the loopback."""

from __future__ import annotations

import shutil
import socket
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from clients import file, wait_for
from served import serving

EXAMPLES = Path(__file__).parents[2] / "examples" / "serve"
pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")


def free_port() -> int:
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return line.getsockname()[1]


@contextmanager
def proxied(address: str, folder: Path):
    """The address of nginx in front of a service."""
    port = free_port()
    text = (EXAMPLES / "nginx.conf").read_text()
    text = text.replace("DEAR;", f"{address.removeprefix('http://')};").replace("LISTEN", f"127.0.0.1:{port}")
    (folder / "nginx.conf").write_text(text.replace("/tmp/", f"{folder}/"))
    command = ["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder), "-g", "daemon off;"]
    process = subprocess.Popen(command)
    try:
        wait_for(lambda: _connects(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def _connects(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def exchange(address: str, *parts: bytes) -> bytes:
    """What comes back on one connection."""
    host, port = address.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=20) as line, suppress(OSError):
        for part in parts:
            line.sendall(part)
        line.settimeout(3)
        while data := line.recv(100_000):
            answer += data
    return answer


def test_answers_and_bounds_behind_the_proxy(runs, tmp_path):
    with serving(runs) as (address, _), proxied(address, tmp_path) as front:
        reply = httpx.post(f"{front}/v1/models/zero/classify", files=[file(1)], timeout=60)
        assert reply.status_code == 200, reply.text
        body = httpx.post(  # the service itself refuses chunks; the proxy collects them
            f"{front}/v1/embeddings",
            content=iter([b'{"input": ', b'"a cat"}']),
            headers={"content-type": "application/json"},
            timeout=60,
        )
        assert body.status_code == 200, body.text
        head = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
        smuggled = b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n"
        length = b"Content-Length: %d\r\n\r\n" % len(smuggled)
        assert b'"live"' not in exchange(front, head + length, smuggled)
        long = b"GET /health/live HTTP/1.1\r\nHost: a\r\nX-Long: " + b"a" * 70_000 + b"\r\n\r\n"
        assert b" 400 " in exchange(front, long)
        big = httpx.post(f"{front}/v1/embeddings", content=bytes(33 * 2**20), timeout=60)
        assert big.status_code == 413
        host, port = front.removeprefix("http://").split(":")
        silent = [socket.create_connection((host, int(port)), timeout=9) for _ in range(40)]
        try:
            assert httpx.get(f"{front}/health/live", timeout=20).status_code == 200
        finally:
            for line in silent:
                line.close()
