"""`dear serve`: an HTTP service for all runs of a folder."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path
from typing import Annotated

from typer import Argument, CallbackParam, Context, Option

from dear.cli import options as opt
from dear.cli.printing import say
from dear.errors import UsageError

_LIMITS = "dear.serve.limits"  # of the settings file, in the context of the command


def _read_settings(context: Context, parameter: CallbackParam, path: Path | None) -> Path | None:
    """Use the values of a TOML file for options that the command line does not set."""
    if path is None or context.resilient_parsing:
        return path
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: the settings cannot be read ({error})") from error
    limits = values.pop("limits", {})
    if not isinstance(limits, dict):
        raise UsageError(f"{path}: limits must be a table, [limits], got {limits!r}")
    context.meta[_LIMITS] = limits
    options = {name.replace("-", "_"): value for name, value in values.items()}
    known = {one.name or "" for one in context.command.params} - {parameter.name, "help"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise UsageError(f"{path}: unknown setting {unknown[0]!r}; known are {', '.join(sorted(known))}")
    context.default_map = {**(context.default_map or {}), **options}
    return path


def serve(
    context: Context,
    runs: Annotated[Path, Argument(help="Folder of run folders; each is served under its name.")],
    config: Annotated[
        Path | None,
        Option(
            is_eager=True,
            callback=_read_settings,
            help="TOML file of these options, and of limits in a table [limits].",
        ),
    ] = None,
    backbone: opt.Backbone = "mini",
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 for every network.")] = "127.0.0.1",
    port: Annotated[int, Option("--port", "-p", min=1, max=65535, help="Port to listen on.")] = 8000,
    keys: Annotated[
        Path | None, Option(help="JSON file of keys: the adapters of each, and the management key.")
    ] = None,
    batch: Annotated[
        int | None, Option(min=1, help="Largest batch of images (default: 64 on a GPU, 8 on a CPU).")
    ] = None,
    wait_ms: Annotated[
        float | None,
        Option(
            min=0,
            help="Milliseconds that an image waits for others while the device is busy "
            "(default: 4 on a GPU, 0 on a CPU).",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        Option(min=1, help="CPU threads (default: OMP_NUM_THREADS or all cores; 1 when a GPU is used)."),
    ] = None,
    adapters: Annotated[
        int, Option(min=1, help="Adapters kept loaded; others are loaded at their next request.")
    ] = 1000,
    queue: Annotated[
        int | None, Option(min=1, help="Images that may wait (default: 1024); more get status 429.")
    ] = None,
    precision: Annotated[
        str, Option(help="Precision of the backbone: auto, float32, bfloat16, float16.")
    ] = "auto",
    drain_seconds: Annotated[
        float, Option(min=0.1, help="Seconds for requests in flight when the service shuts down.")
    ] = 30.0,
    rate: Annotated[
        float | None, Option(min=0.001, help="Requests per second of each key; more get status 429.")
    ] = None,
    open_metrics: Annotated[bool, Option("--open-metrics", help="Show all /metrics without a key.")] = False,
    tls_certificate: Annotated[
        Path | None, Option(exists=True, dir_okay=False, help="PEM file of a certificate: serve HTTPS.")
    ] = None,
    tls_key: Annotated[
        Path | None, Option(exists=True, dir_okay=False, help="PEM file of the certificate's key.")
    ] = None,
    gallery: Annotated[
        list[str] | None, Option(help="NAME=FOLDER: images to search by /retrieve; repeatable.")
    ] = None,
    engine: Annotated[str, Option(help="local: this process; ray: replicas on a Ray cluster.")] = "local",
    replicas: Annotated[int, Option(min=1, help="Copies of the service, with --engine ray.")] = 1,
    route: Annotated[str, Option(help="Prefix of the addresses, with --engine ray; one per backbone.")] = "/",
    ray_address: Annotated[
        str | None, Option(help="Address of a running cluster, with --engine ray (default: start one here).")
    ] = None,
    device: opt.Device = "auto",
) -> None:
    """Serve all runs of a folder over HTTP: one backbone, any number of adapters, mixed batches.

    A run that is put into the folder is served without a restart; a changed one replaces the old between
    two batches. /docs describes the API. Without a key file everything but management is open: keep the
    address local. For strangers, put a proxy in front (examples/serve).

    Examples:

    `dear serve runs/ --backbone mini`

    `dear serve runs/ --config serve.toml`

    `dear serve runs/ --backbone mini --engine ray --replicas 4`

    `curl -F files=@photo.jpg -F top=3 http://127.0.0.1:8000/v1/models/pets/classify`
    """
    from dear.serve.task import serve as run_service

    _show_log()
    run_service(
        runs,
        backbone=backbone,
        host=host,
        port=port,
        keys=keys,
        batch=batch,
        wait_ms=wait_ms,
        threads=threads,
        adapters=adapters,
        queue=queue,
        precision=precision,
        drain_seconds=drain_seconds,
        rate=rate,
        open_metrics=open_metrics,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        gallery=_parse_galleries(gallery or []),
        engine=engine,
        replicas=replicas,
        route=route,
        ray_address=ray_address,
        device=device,
        limits=context.meta.get(_LIMITS, {}),
        report=say,
    )


def _show_log() -> None:
    """Print the service's log lines and the server's warnings on standard error, each once."""
    handler = logging.StreamHandler()
    for name, level in (("dear.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        log = logging.getLogger(name)
        log.handlers, log.propagate = [handler], False
        log.setLevel(level)


def _parse_galleries(texts: list[str]) -> dict[str, str]:
    """Folders by name, of texts NAME=FOLDER."""
    folders: dict[str, str] = {}
    for text in texts:
        name, _, folder = text.partition("=")
        if not name or not folder or name in folders:
            raise UsageError(f"--gallery must be NAME=FOLDER, each name once, got {text!r}")
        folders[name] = folder
    return folders
