"""Settings of a service, as frozen dataclasses."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from dear.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """What a single request may cost; beyond it the request is refused with one sentence."""

    body_bytes: int = 32 * 2**20  #: of a request's body
    upload_bytes: int = 256 * 2**20  #: of the archive of an uploaded run
    pixels: int = 50_000_000  #: of one image, before it is resized
    images: int = 64  #: per request
    classes: int = 1000  #: that a request may name
    texts: int = 256  #: per embedding request
    body_seconds: float = 20.0  #: for a request's body to arrive
    seconds: float = 30.0  #: from the last byte of the request to its answer
    queued_images: int = 1024  #: waiting at once, over all requests

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UsageError(f"{name} = {value} must be positive")


@dataclass(frozen=True)
class ServeSettings:
    """How the service batches, keeps adapters, and is protected."""

    limits: Limits = field(default_factory=Limits)
    largest_batch: int | None = None  #: images computed together; None: 64 on a GPU, 8 on a CPU
    longest_wait: float | None = None  #: seconds that a batch waits for others; None: 0.004 on a GPU, else 0
    loaded_adapters: int = 1000  #: kept ready on the device; the least recently used one makes room
    decoders: int | None = None  #: files decoded at once; None: all cores but two on a GPU, 4 on a CPU
    poll_seconds: float = 2.0  #: between two looks at the runs folder
    reduced_jpeg: bool = False  #: decode large JPEG files at a reduced scale: faster, features a little off
    precision: str = "auto"  #: of the backbone's matrices, as in the recipe

    def __post_init__(self) -> None:
        if min(self.batching("cpu")[0], self.loaded_adapters, self.decoding("cpu")[0]) < 1:
            raise UsageError("largest_batch, loaded_adapters and decoders must be at least 1")
        if self.batching("cpu")[1] < 0 or self.poll_seconds <= 0:
            raise UsageError("longest_wait cannot be negative and poll_seconds must be positive")

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

    def decoding(self, device_type: str) -> tuple[int, bool]:
        """How many files are decoded at once, and whether each in a process of its own.

        A CPU's model is slower than decoding in threads, a GPU's far faster (`benchmarks/serve.py direct`).

        >>> ServeSettings().decoding("cpu"), ServeSettings(decoders=6).decoding("cuda")
        ((4, False), (6, True))
        """
        if device_type == "cpu":
            return 4 if self.decoders is None else self.decoders, False
        return max(1, (os.cpu_count() or 4) - 2) if self.decoders is None else self.decoders, True
