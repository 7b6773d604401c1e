"""The web server of a service: bounds on connections, and a shutdown that ends."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn

from dear.serve.app import make_app
from dear.serve.connection import BoundedConnection
from dear.serve.service import Service

try:
    from uvloop import Loop as _Loop
except ImportError:
    _Loop = asyncio.SelectorEventLoop  # type: ignore[assignment,misc]

# Computing releases the interpreter's lock at every kernel, and waits this long for another thread's.
SWITCH_SECONDS = 0.0005
_GRACE = 3.0  # seconds after the drain limit in which the process ends by itself
HANDSHAKE_SECONDS = 5.0  #: for the TLS handshake of a connection


class ServerLoop(_Loop):
    """An event loop whose servers close connections that do not finish the TLS handshake in time."""

    async def create_server(self, *args: Any, **options: Any) -> Any:
        """A server, as asyncio's."""
        if options.get("ssl") is not None:
            options.setdefault("ssl_handshake_timeout", HANDSHAKE_SECONDS)
        return await super().create_server(*args, **options)


class Server(uvicorn.Server):
    """uvicorn's server; after a signal to stop the process ends within the drain limit, whatever hangs."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Accept no further requests; answer those in flight."""
        if not self.should_exit:
            seconds = float(self.config.timeout_graceful_shutdown or 0) + _GRACE
            timer = threading.Timer(seconds, os._exit, (128 + sig,))
            timer.daemon = True
            timer.start()
        super().handle_exit(sig, frame)


def _raise_descriptor_limit() -> None:
    """Allow as many connections as the system does for this process."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_server(service: Service, host: str, port: int, **options: Any) -> None:
    """Answer until the process gets a signal to stop; further options are uvicorn's."""
    drain = service.settings.drain_seconds
    config = uvicorn.Config(
        make_app(service, start_decoders=True),
        host=host,
        port=port,
        http=BoundedConnection,
        loop=f"{__name__}:{ServerLoop.__name__}",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=drain,  # type: ignore[arg-type]
        **options,
    )
    server = Server(config)
    _raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()  # what is loaded stays: no collection visits it again
    with suppress(KeyboardInterrupt):  # uvicorn raises the signal again after it has stopped
        server.run()
    if not server.started:
        raise SystemExit(3)
