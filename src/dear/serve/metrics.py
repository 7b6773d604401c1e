"""What the service counts, in Prometheus' format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters of one service; several may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "dear_requests", "Requests by route and status.", ["route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "dear_request_seconds",
            "Time from request to response.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.images = Counter("dear_images", "Images answered.", registry=self.registry)
        self.batch = Histogram(
            "dear_batch_images", "Images per batch.", buckets=_SIZES, registry=self.registry
        )
        self.compute = Histogram(
            "dear_batch_seconds", "Time of a batch.", buckets=_SECONDS, registry=self.registry
        )
        self.queued = Gauge("dear_queued_images", "Images waiting or being computed.", registry=self.registry)
        self.adapters = Gauge("dear_adapters", "Adapters that can be asked.", registry=self.registry)
        self.loaded = Gauge("dear_adapters_loaded", "Adapters ready on the device.", registry=self.registry)

    def observe_batch(self, images: int, seconds: float) -> None:
        """Count one batch."""
        self.images.inc(images)
        self.batch.observe(images)
        self.compute.observe(seconds)

    def text(self) -> bytes:
        """All of it, for `GET /metrics`."""
        return generate_latest(self.registry)
