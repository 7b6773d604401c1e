"""The web server of a service: bounds on connections, and a stop that ends."""

from __future__ import annotations

import gc
import os
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn

from dear.serve.app import make_app
from dear.serve.connections import guarded_protocol
from dear.serve.service import Service

# Computing gives the interpreter up at every kernel, and waits this long for it where another thread has it.
_SWITCH_SECONDS = 0.0005
_GRACE = 3.0  # seconds after the drain limit in which the process ends by itself


class Server(uvicorn.Server):
    """uvicorn's server; once it was told to stop, the process ends within the drain limit, whatever hangs."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop taking requests; answer those in flight."""
        if not self.should_exit:
            seconds = float(self.config.timeout_graceful_shutdown or 0) + _GRACE
            timer = threading.Timer(seconds, os._exit, (128 + sig,))
            timer.daemon = True
            timer.start()
        super().handle_exit(sig, frame)


def run_server(service: Service, host: str, port: int, **options: Any) -> None:
    """Answer until the process is told to stop; further options are uvicorn's."""
    drain = service.settings.drain_seconds
    config = uvicorn.Config(
        make_app(service, start_decoders=True),
        host=host,
        port=port,
        http=guarded_protocol(service.settings.limits),
        ws="none",
        log_config=None,
        access_log=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=drain,  # type: ignore[arg-type]
        **options,
    )
    server = Server(config)
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.freeze()  # what is loaded stays: no collection looks at it again
    with suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it has stopped
        server.run()
    if not server.started:
        raise SystemExit(3)
