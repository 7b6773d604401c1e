"""`dear studio`: the web page."""

from __future__ import annotations

import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from dear.cli import options as opt
from dear.cli.printing import say
from dear.utils.extras import missing_extra


def studio(
    run: Annotated[
        Path | None,
        Argument(
            help="Run folder, archive or hf://owner/name (default: the embedded backbone and examples).",
            **opt.RUN_OPTIONS,
        ),
    ] = None,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0 finds a free one.")] = 7860,
    max_upload_mb: Annotated[int, Option(help="Largest upload.")] = 20,
    backbone: Annotated[
        str | None, Option("--backbone", "-b", help="The backbone (default: that of the run, or mini).")
    ] = None,
    data: Annotated[
        str | None,
        Option("--data", "-d", help="Images to classify and train on: a folder, a table, or world:NAME."),
    ] = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Open the studio: classify, train, audit, inspect heads, retrieve, and compare in the browser.

    It listens on this computer only, unless --host names another address; then visitors cannot name folders.

    Example: `dear studio`, then open http://127.0.0.1:7860
    """
    if port and find_spec("gradio") is not None:
        say(f"starting the studio at http://{host}:{port} …")  # the imports below take seconds
    try:
        from dear.studio.app import is_local, serving
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("gradio", "fastapi"):
            raise
        raise missing_extra("the studio", "studio") from None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # closes as after Ctrl-C
    with serving(
        run,
        backbone=backbone,
        data=data,
        host=host,
        port=port,
        max_upload_mb=max_upload_mb,
        device=device,
    ) as url:
        say(f"The studio is at {url} (Ctrl-C ends it)")
        if not is_local(host):
            say("It is open to other computers; there is no password.")
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            say("\nThe studio is closed.")
