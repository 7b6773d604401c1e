"""All runs of a folder over HTTP, from this process or from replicas on a Ray cluster: `dear serve`."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dear.errors import UsageError
from dear.serve.settings import Limits, ServeSettings
from dear.tasks.retrieve import gallery_of
from dear.utils.extras import missing_extra
from dear.utils.files import PathLike
from dear.utils.parallel import usable_cores

if TYPE_CHECKING:
    from dear.data.images import ImageSet

ENGINES = ("local", "ray")
_PACKAGES = ("fastapi", "httptools", "prometheus_client", "python_multipart", "starlette", "uvicorn")


def serve(
    runs: PathLike,
    *,
    backbone: PathLike = "mini",
    host: str = "127.0.0.1",
    port: int = 8000,
    keys: PathLike | None = None,
    batch: int | None = None,
    wait_ms: float | None = None,
    threads: int | None = None,
    adapters: int = 1000,
    queue: int | None = None,
    precision: str = "auto",
    drain_seconds: float = 30.0,
    rate: float | None = None,
    open_metrics: bool = False,
    tls_certificate: PathLike | None = None,
    tls_key: PathLike | None = None,
    gallery: Mapping[str, PathLike | ImageSet] | None = None,
    engine: str = "local",
    replicas: int = 1,
    route: str = "/",
    ray_address: str | None = None,
    device: str = "auto",
    limits: Mapping[str, Any] | None = None,
    report: Callable[[str], None] = lambda sentence: None,
) -> None:
    """Serve all runs of a folder over HTTP until the process gets a signal to stop.

    Args:
        runs: folder of run folders; each is served under its name.
        backbone: what `load` takes; every run must have been trained on it.
        host: address to listen on.
        port: its port.
        keys: JSON file of keys; None: everybody has access.
        batch: largest batch of images; None: 64 on a GPU, 8 on a CPU.
        wait_ms: milliseconds that an image waits for others while the device is busy; None: 4 on a GPU, 0 on
            a CPU.
        threads: CPU threads; None: `OMP_NUM_THREADS` or all cores, 1 when a GPU is used.
        adapters: adapters kept loaded.
        queue: images that may wait; None: 1024.
        precision: of the backbone: "auto", "float32", "bfloat16" or "float16".
        drain_seconds: for requests in flight when the service shuts down.
        rate: requests per second of each key; None: no limit.
        open_metrics: show all of /metrics without a key.
        tls_certificate: PEM file of a certificate, for HTTPS.
        tls_key: PEM file of its key.
        gallery: images to search by /retrieve: name -> folder, what `open_data` takes, or an image set.
        engine: "local" (this process) or "ray" (replicas on a cluster).
        replicas: copies of the service on Ray.
        route: prefix of the addresses on Ray; one per backbone.
        ray_address: of a running cluster; None starts one here.
        device: "auto", "cpu", "cuda", …
        limits: fields of `Limits` by name; `queue` and `rate` take precedence.
        report: called with sentences for the operator: the address, runs that cannot be served.

    Raises:
        UsageError: a setting is unknown or has no effect with this engine, or a package is missing.
        DearError: anything else a user can correct.

    Example:
        >>> serve("runs/", backbone="mini", port=8080)    # doctest: +SKIP
    """
    _require_packages()
    _check_options(engine, replicas, route, ray_address, threads, tls_certificate, tls_key)
    from dear.clip.factory import pick_device
    from dear.serve.keys import Keys

    folder, key_table = Path(runs), Keys() if keys is None else Keys.load(Path(keys))
    settings = ServeSettings(
        _limits(limits or {}, queued_images=queue, rate=rate),
        batch,
        None if wait_ms is None else wait_ms / 1000,
        adapters,
        precision=precision,
        drain_seconds=drain_seconds,
        open_metrics=open_metrics,
    )
    _check_address(host, port)
    images = {name: gallery_of(source) for name, source in (gallery or {}).items()}
    device = pick_device(device)
    if engine == "ray":
        from dear.serve.ray_app import RayService, start

        key_file = None if keys is None else str(Path(keys).resolve())
        reserved = float(device.startswith("cuda"))
        start(
            RayService(
                str(folder.resolve()), os.fspath(backbone), settings, key_file, images, device, replicas,
                gpus=reserved, route=route,
            ),
            host, port, ray_address,
        )  # fmt: skip
        report(f"{replicas} replicas; http://{host}:{port}{route}; stop with Ctrl-C")
        threading.Event().wait()
        return
    from dear.clip.factory import load
    from dear.serve.server import run_server
    from dear.serve.service import Service

    clip = load(backbone, device=device)
    _set_threads(threads, on_gpu=clip.device.type != "cpu")
    service = Service(folder, clip, settings, images, keys=key_table)
    for name, reason in service.store.problems().items():
        report(f"not served: {name}: {reason}")
    if service.recorded:
        report(f"CUDA graphs recorded: {service.recorded}")
    scheme = "http" if tls_certificate is None else "https"
    report(
        f"adapters: {len(service.store.cards())} on {clip.name}; {scheme}://{host}:{port}/docs; "
        "stop with Ctrl-C"
    )
    run_server(service, host, port, ssl_certfile=tls_certificate, ssl_keyfile=tls_key)


def _limits(values: Mapping[str, Any], **options: float | None) -> Limits:
    """Limits by name; those of `options` that are not None take precedence."""
    names = sorted(field.name for field in fields(Limits))
    unknown = next((name for name in values if name not in names), None)
    if unknown is not None:
        raise UsageError(f"unknown limit {unknown!r}; limits are {', '.join(names)}")
    return Limits(**{**values, **{name: value for name, value in options.items() if value is not None}})


def _check_address(host: str, port: int) -> None:
    """Raise a UsageError, before anything is loaded, where no service can listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"the service cannot listen on {host}:{port} ({error}); try another port", hint="port"
            ) from None


def _check_options(
    engine: str,
    replicas: int,
    route: str,
    ray_address: str | None,
    threads: int | None,
    certificate: PathLike | None,
    key: PathLike | None,
) -> None:
    """Raise a UsageError for an option that the engine does not have, or half of those for HTTPS."""
    if engine not in ENGINES:
        raise UsageError(f"engine must be {' or '.join(ENGINES)}, got {engine!r}")
    if key is not None and certificate is None:
        raise UsageError("tls_key needs tls_certificate, got none")
    if engine == "local" and (replicas > 1 or route != "/" or ray_address is not None):
        raise UsageError("replicas, route and ray_address need the engine ray, got local")
    if engine == "ray" and threads is not None:
        raise UsageError("threads needs the engine local; Ray gives every replica its threads")
    if engine == "ray" and certificate is not None:
        raise UsageError("tls_certificate needs the engine local; put a proxy in front of Ray")


def _set_threads(threads: int | None, on_gpu: bool) -> None:
    """Set the CPU threads of PyTorch; with a GPU one is enough, since the CPU only copies."""
    import torch

    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = 1 if on_gpu else usable_cores()
    if threads is not None:
        torch.set_num_threads(threads)


def _require_packages() -> None:
    """Raise a UsageError without the packages of the extra `serve`."""
    try:
        import python_multipart  # noqa: F401 (read by the routes, which would fail at the first request)
        import uvicorn  # noqa: F401

        import dear.serve.app
        import dear.serve.server  # noqa: F401
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in _PACKAGES:
            raise
        raise missing_extra("the service", "serve") from None
