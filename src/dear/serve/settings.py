"""Settings of a service, as frozen dataclasses."""

from __future__ import annotations

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
    largest_batch: int = 64  #: images computed together
    longest_wait: float = 0.004  #: seconds that the first image of a batch waits for others
    loaded_adapters: int = 1000  #: kept ready on the device; the least recently used one makes room
    decoders: int = 4  #: threads that decode images
    poll_seconds: float = 2.0  #: between two looks at the runs folder
    reduced_jpeg: bool = False  #: decode large JPEG files at a reduced scale: faster, features a little off
    precision: str = "auto"  #: of the backbone's matrices, as in the recipe

    def __post_init__(self) -> None:
        if self.largest_batch < 1 or self.loaded_adapters < 1 or self.decoders < 1:
            raise UsageError("largest_batch, loaded_adapters and decoders must be at least 1")
        if self.longest_wait < 0 or self.poll_seconds <= 0:
            raise UsageError("longest_wait cannot be negative and poll_seconds must be positive")
