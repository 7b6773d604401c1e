"""Counters of the service in Prometheus' format; the number of series is bounded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONFIDENCE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_MOST_MODELS, _MOST_CLASSES = 200, 5000  # adapters, and classes of all adapters, that have series
T = TypeVar("T")
OTHER = "(other)"  #: adapter or class of the answers beyond these


class Metrics:
    """Counters of one service; several may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter("dear_requests", "Requests by route and status.", ["route", "status"])
        self.seconds = histogram(
            "dear_request_seconds", "Time from request to response.", ["route"], buckets=_SECONDS
        )
        self.images = counter("dear_images", "Images answered.")
        self.batch = histogram("dear_batch_images", "Images per batch.", buckets=_SIZES)
        self.compute = histogram("dear_batch_seconds", "Time of a batch.", buckets=_SECONDS)
        self.queued = gauge("dear_queued_images", "Images waiting or being computed.")
        self.adapters = gauge("dear_adapters", "Adapters that are served.")
        self.loaded = gauge("dear_adapters_loaded", "Adapters ready on the device.")
        self.answers = counter("dear_answers", "Images by adapter and likeliest class.", ["model", "class"])
        self.confidence = histogram(
            "dear_confidence", "Probability of the likeliest class.", ["model"], buckets=_CONFIDENCE
        )
        # `labels` checks its values at every call; these are cached.
        self._requests, self._seconds = cache(self.requests.labels), cache(self.seconds.labels)
        self._answers, self._confidence = cache(self.answers.labels), cache(self.confidence.labels)
        self._models: set[str] = set()
        self._classes: set[tuple[str, str]] = set()

    def observe_request(self, route: str, status: int, seconds: float) -> None:
        """Count one request."""
        self._requests(route, status).inc()
        self._seconds(route).observe(seconds)

    def observe_batch(self, images: int, seconds: float) -> None:
        """Count one batch."""
        self.images.inc(images)
        self.batch.observe(images)
        self.compute.observe(seconds)

    def observe_answers(
        self, model: str, known: Collection[str], answers: Sequence[tuple[str, float]]
    ) -> None:
        """Count answers (class, probability) of an adapter; classes that it was not trained on are one."""
        model = _bounded(self._models, model, _MOST_MODELS, OTHER)
        for name, probability in answers:
            label = name if model != OTHER and name in known else OTHER
            model_and_class = _bounded(self._classes, (model, label), _MOST_CLASSES, (model, OTHER))
            self._answers(*model_and_class).inc()
            self._confidence(model).observe(probability)

    def text(self, can_access: Callable[[str], bool] | None = None) -> bytes:
        """All series; with `can_access` those about adapters alone for which it is true."""
        registry = self.registry if can_access is None else _FilteredRegistry(self.registry, can_access)
        return generate_latest(registry)


class _FilteredRegistry:
    """A registry without the series of some adapters."""

    def __init__(self, registry: CollectorRegistry, can_access: Callable[[str], bool]) -> None:
        self._registry, self._can_access = registry, can_access

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        for metric in self._registry.collect():
            shown = Metric(metric.name, metric.documentation, metric.type)
            shown.samples = [
                one for one in metric.samples
                if "model" not in one.labels or self._can_access(one.labels["model"])
            ]  # fmt: skip
            yield shown


def _bounded(seen: set[T], value: T, most: int, other: T) -> T:
    """The value if it is among the first `most`, else `other`."""
    if value not in seen:
        if len(seen) >= most:
            return other
        seen.add(value)
    return value
