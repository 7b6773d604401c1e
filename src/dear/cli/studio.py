"""`dear studio`: the web page."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from dear.cli.common import Device, device_named, say


def studio(
    run: Annotated[
        str | None, typer.Argument(help="A run folder; without one the embedded backbone and examples.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 finds a free one.")] = 7860,
    max_upload_mb: Annotated[int, typer.Option("--max-upload-mb", help="Larger uploads are refused.")] = 20,
    backbone: Annotated[
        str | None, typer.Option("--backbone", "-b", help="A backbone, if not the run's own or mini.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", "-d", help="Images to look at: a folder, a table or world:NAME.")
    ] = None,
    service: Annotated[
        str | None,
        typer.Option("--service", help="Also ask a running service: http://HOST:PORT/v1/models/NAME."),
    ] = None,
    device: Device = "auto",
) -> None:
    """Open the studio: look at heads, classify, retrieve, train and compare in the browser.

    It listens on this computer only, unless --host says otherwise; then visitors cannot name folders.

    Example: `dear studio`, then open http://127.0.0.1:7860
    """
    from dear.errors import UsageError

    if port and find_spec("gradio") is not None:
        say(f"starting the studio at http://{host}:{port} …")  # the imports below take seconds
    try:
        from dear.studio.app import is_local, serving
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("gradio", "fastapi"):
            raise
        raise UsageError("the studio needs gradio: pip install '.[studio]' in your clone") from None
    import signal
    import time

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # closes as after Ctrl-C
    with serving(run, backbone, data, host, port, max_upload_mb, device_named(device), service) as url:
        say(f"The studio is at {url} (Ctrl-C ends it)")
        if not is_local(host):
            say("It is open to other computers; there is no password.")
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            say("\nThe studio is closed.")
