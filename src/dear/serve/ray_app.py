"""The service as a Ray Serve application: the same routes, several replicas, on one machine or many.

Every replica holds the backbone and reads the runs folder, which all machines must see under the same path.
Several backbones are several applications, each under a different route.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dear.errors import UsageError
from dear.serve.settings import ServeSettings
from dear.utils.cluster import serve_replicas


@dataclass(frozen=True)
class RayService:
    """What a replica needs to start."""

    runs: str  #: folder of run folders, the same path on every machine
    backbone: str  #: as `dear.load` takes it
    settings: ServeSettings = field(default_factory=ServeSettings)  #: limits and batching of each replica
    keys: str | None = None  #: path of the key file
    galleries: Mapping[str, Any] = field(default_factory=dict)  #: sources of galleries by name
    device: str = "cpu"  #: of each replica
    replicas: int = 1  #: how many
    cpus: float = 1.0  #: that Ray reserves per replica
    gpus: float = 0.0  #: that Ray reserves per replica
    route: str = "/"  #: prefix of the application's addresses

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise UsageError(f"replicas must be at least 1, got {self.replicas}")
        if not re.fullmatch(r"/|(/[A-Za-z0-9._-]+)+", self.route):
            raise UsageError(f"route must be a path such as /small, got {self.route!r}")

    @property
    def name(self) -> str:
        """Name of the application: one per route."""
        return "dear" + self.route.rstrip("/").replace("/", "-")


def build(service: RayService) -> Any:
    """The application of one replica."""
    from pathlib import Path

    from dear.clip.factory import load
    from dear.serve.app import make_app
    from dear.serve.keys import Keys
    from dear.serve.service import Service

    clip = load(service.backbone, device=service.device)
    keys = Keys.load(service.keys) if service.keys is not None else Keys()
    return make_app(Service(Path(service.runs), clip, service.settings, service.galleries, keys=keys), True)


def start(service: RayService, host: str, port: int, address: str | None = None) -> Any:
    """Start the application on a Ray cluster; returns when its replicas answer.

    Every machine's proxy listens on `host` and `port`; `address` is that of a running cluster ("auto",
    "ray://host:10001"), None starts one here.
    """
    return serve_replicas(
        partial(build, service),
        service.name,
        service.route,
        host,
        port,
        replicas=service.replicas,
        cpus=service.cpus,
        gpus=service.gpus,
        max_requests=service.settings.limits.queued_images,
        drain_seconds=service.settings.drain_seconds,
        address=address,
    )
