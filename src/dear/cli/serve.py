"""`dear serve`: an HTTP service for all runs of a folder."""

from __future__ import annotations

import logging
import os
import threading
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, CallbackParam, Context, Option

from dear.cli.options import Backbone, Device
from dear.cli.printing import say
from dear.errors import UsageError
from dear.utils.extras import missing_extra
from dear.utils.parallel import usable_cores

if TYPE_CHECKING:
    from dear.data.images import ImageSet
    from dear.serve.settings import Limits

_LIMITS = "dear.serve.limits"  # of the settings file, in the context of the command


def _read_settings(context: Context, parameter: CallbackParam, path: Path | None) -> Path | None:
    """Use the values of a TOML file for options that the command line does not set."""
    if path is None or context.resilient_parsing:
        return path
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: the settings cannot be read ({error})") from error
    context.meta[_LIMITS] = values.pop("limits", {})
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
    backbone: Backbone = "mini",
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
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
        list[str] | None, Option(help="NAME=FOLDER: images to search by /retrieve; may be repeated.")
    ] = None,
    engine: Annotated[str, Option(help="local: this process; ray: replicas on a Ray cluster.")] = "local",
    replicas: Annotated[int, Option(min=1, help="Copies of the service, with --engine ray.")] = 1,
    route: Annotated[str, Option(help="Prefix of the addresses, with --engine ray; one per backbone.")] = "/",
    ray_address: Annotated[
        str | None, Option(help="Address of a running cluster, with --engine ray (default: start one here).")
    ] = None,
    device: Device = "auto",
) -> None:
    """Serve all runs of a folder over HTTP: one backbone, any number of adapters, mixed batches.

    A run that is put into the folder is served without a restart; a changed one replaces the old between
    two batches. /docs describes the API. Without a key file everything but management is open: keep the
    address local. For strangers, put a proxy in front (examples/serve).

    Examples: `dear serve runs/ --backbone mini`

    `dear serve runs/ --config serve.toml`

    `dear serve runs/ --backbone mini --engine ray --replicas 4`

    `curl -F files=@photo.jpg -F top=3 http://127.0.0.1:8000/v1/models/pets/classify`
    """
    _demand_extra()
    import torch

    from dear.clip.factory import load, pick_device
    from dear.serve.keys import Keys
    from dear.serve.server import run_server
    from dear.serve.service import Service
    from dear.serve.settings import Limits, ServeSettings

    known = Keys.load(keys) if keys is not None else Keys()
    settings = ServeSettings(
        _limits(Limits, context.meta.get(_LIMITS, {}), queued_images=queue, rate=rate),
        batch,
        None if wait_ms is None else wait_ms / 1000,
        adapters,
        precision=precision,
        drain_seconds=drain_seconds,
        open_metrics=open_metrics,
    )
    _check_tls(engine, tls_certificate, tls_key)
    galleries = _galleries(gallery or [])
    _check_engine(engine, replicas > 1 or route != "/" or ray_address is not None, threads)
    if engine == "ray":
        from dear.serve.ray_app import RayService, start

        where = pick_device(device)
        start(
            RayService(
                str(runs.resolve()), backbone, settings, None if keys is None else str(keys.resolve()),
                galleries, where, replicas, gpus=float(where.startswith("cuda")), route=route,
            ),
            host, port, ray_address,
        )  # fmt: skip
        say(f"{replicas} replicas; http://{host}:{port}{route}; stop with Ctrl-C")
        threading.Event().wait()
        return
    _show_log()
    clip = load(backbone, device=pick_device(device))
    on_gpu = clip.device.type != "cpu"  # then the CPU only copies
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = 1 if on_gpu else usable_cores()
    if threads is not None:
        torch.set_num_threads(threads)
    service = Service(runs, clip, settings, galleries, keys=known)
    for name, reason in service.store.problems().items():
        say(f"not served: {name}: {reason}")
    if service.recorded:
        say(f"{service.recorded} batch runs recorded")
    scheme = "http" if tls_certificate is None else "https"
    say(
        f"adapters: {len(service.store.cards())} on {service.clip.name}; {scheme}://{host}:{port}/docs; "
        "stop with Ctrl-C"
    )
    run_server(service, host, port, ssl_certfile=tls_certificate, ssl_keyfile=tls_key)


def _limits(kind: type[Limits], values: dict[str, Any], **options: float | None) -> Limits:
    """Limits of the settings file and of options, which go before."""
    try:
        return kind(**{**values, **{name: value for name, value in options.items() if value is not None}})
    except TypeError:
        known = {one.name for one in fields(kind)}
        unknown = sorted(set(values) - known) or list(values)
        raise UsageError(f"unknown limit {unknown[0]!r}; limits are {', '.join(sorted(known))}") from None


def _check_engine(engine: str, of_ray: bool, threads: int | None) -> None:
    """Refuse options that the engine does not have; `of_ray`: whether any of Ray's own was given."""
    if engine not in ("local", "ray"):
        raise UsageError(f"--engine {engine}: choose local or ray")
    if engine == "local" and of_ray:
        raise UsageError("--replicas, --route and --ray-address are for --engine ray")
    if engine == "ray" and threads is not None:
        raise UsageError("--threads is for --engine local; Ray gives every replica its threads")


def _check_tls(engine: str, certificate: Path | None, key: Path | None) -> None:
    """Refuse half of the options for HTTPS, and both where Ray answers."""
    if key is not None and certificate is None:
        raise UsageError("--tls-key needs --tls-certificate")
    if engine == "ray" and certificate is not None:
        raise UsageError("--tls-certificate is for --engine local; put a proxy in front of Ray")


def _show_log() -> None:
    """Print the service's log lines and the server's warnings on standard error, each once."""
    handler = logging.StreamHandler()
    for name, level in (("dear.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        log = logging.getLogger(name)
        log.handlers, log.propagate = [handler], False
        log.setLevel(level)


def _demand_extra() -> None:
    """Refuse to start without the packages of the extra `serve`."""
    try:
        import python_multipart  # noqa: F401 (read by the routes, which would fail at the first request)
        import uvicorn  # noqa: F401

        import dear.serve.app
        import dear.serve.server  # noqa: F401
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in (
            "fastapi", "httptools", "prometheus_client", "python_multipart", "starlette", "uvicorn"
        ):  # fmt: skip
            raise
        raise missing_extra("the service", "serve") from None


def _galleries(options: list[str]) -> dict[str, ImageSet]:
    """Image sets of NAME=FOLDER."""
    from dear.tasks.retrieve import gallery_of

    galleries: dict[str, ImageSet] = {}
    for one in options:
        name, equals, source = one.partition("=")
        if not equals or not name or not source or name in galleries:
            raise UsageError(f"--gallery {one}: give NAME=FOLDER, every name once")
        galleries[name] = gallery_of(source)
    return galleries
