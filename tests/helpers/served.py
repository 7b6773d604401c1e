"""Services in processes, for tests that attack or restart them."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import torch
import uvicorn
from clients import QUICK, wait_for
from tiny import tiny_clip

from dear.serve.app import make_app
from dear.serve.connection import BoundedConnection
from dear.serve.keys import Keys
from dear.serve.service import Service
from dear.serve.settings import ServeSettings


@contextmanager
def serving(runs: Path, settings: ServeSettings = QUICK, keys: Keys | None = None):
    """A service behind a real port: its address and itself."""
    service = Service(runs, tiny_clip(dtype=torch.float32), settings, keys=keys)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = uvicorn.Config(
        make_app(service), port=port, http=BoundedConnection, ws="none", log_config=None,
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield f"http://127.0.0.1:{port}", service
    finally:
        server.should_exit = True
        thread.join()
