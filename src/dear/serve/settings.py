"""Settings of a service, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field

from dear.errors import UsageError
from dear.utils.parallel import usable_cores


@dataclass(frozen=True)
class Limits:
    """Limits of requests; beyond one a request is refused with one sentence."""

    # of one request
    header_bytes: int = 16 * 2**10  #: of a request's line and headers
    body_bytes: int = 32 * 2**20
    body_seconds: float = 20.0  #: for the body to arrive
    upload_bytes: int = 256 * 2**20  #: of the archive of an uploaded run
    images: int = 64
    pixels: int = 50_000_000  #: of one image, before it is resized
    request_pixels: int = 100_000_000  #: of all images of a request
    classes: int = 1000  #: that a request may name
    texts: int = 256  #: of an embedding request
    decode_seconds: float = 3.0  #: of processor time for one image; then its decoder is killed
    decode_wall_seconds: float = 12.0  #: for one image; then another decoder tries once more
    decode_bytes: int = 2**30  #: of memory that the decoder of an image may take
    seconds: float = 30.0  #: from the last byte of the request to its answer
    # of all requests together
    queued_images: int = 1024  #: waiting to be computed
    decoding_pixels: int = 100_000_000  #: being decoded at once
    held_bytes: int = 512 * 2**20  #: of bodies held in memory
    # of one key; `requests` and `rate` can be set per key in the key file
    requests: int = 256  #: being answered at once
    rate: float = float("inf")  #: requests per second

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise UsageError(f"{name} must be a positive number, got {value!r}")


@dataclass(frozen=True)
class ServeSettings:
    """How the service batches, keeps adapters, and is protected."""

    limits: Limits = field(default_factory=Limits)
    largest_batch: int | None = None  #: images computed together; None: 64 on a GPU, 8 on a CPU
    #: seconds that an image waits for others while the device is busy; None: 0.004 on a GPU, else 0
    longest_wait: float | None = None
    loaded_adapters: int = 1000  #: kept ready on the device; the least recently used one makes room
    decoders: int | None = None  #: processes that decode; None: all cores but two on a GPU, 2 to 4 on a CPU
    poll_seconds: float = 2.0  #: between two scans of the runs folder
    stall_seconds: float = 10.0  #: without an answer, while images wait, after which the service is not ready
    drain_seconds: float = 30.0  #: for requests in flight when the service is stopped
    precision: str = "auto"  #: of the backbone's matrices, as in the recipe
    open_metrics: bool = False  #: whether /metrics needs no key where keys are set

    def __post_init__(self) -> None:
        for name in ("largest_batch", "loaded_adapters", "decoders"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if self.longest_wait is not None and self.longest_wait < 0:
            raise UsageError(f"longest_wait must be at least 0, got {self.longest_wait}")
        for name in ("poll_seconds", "stall_seconds", "drain_seconds"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be positive, got {getattr(self, name)}")

    def batching(self, device_type: str) -> tuple[int, float]:
        """Largest batch and longest wait on a device.

        A CPU's time per image hardly falls beyond eight images, so that larger batches would only delay their
        first answer; and while it computes, others come in anyway (`benchmarks/serve.py threads`).

        >>> ServeSettings().batching("cuda"), ServeSettings(largest_batch=2).batching("cpu")
        ((64, 0.004), (2, 0.0))
        """
        largest, wait = (8, 0.0) if device_type == "cpu" else (64, 0.004)
        return (
            largest if self.largest_batch is None else self.largest_batch,
            wait if self.longest_wait is None else self.longest_wait,
        )

    def decoding(self, device_type: str) -> int:
        """How many processes decode.

        >>> ServeSettings().decoding("cpu") in (2, 3, 4), ServeSettings(decoders=6).decoding("cuda")
        (True, 6)
        """
        if self.decoders is not None:
            return self.decoders
        cores = usable_cores()
        return min(4, max(2, cores)) if device_type == "cpu" else max(2, cores - 2)
