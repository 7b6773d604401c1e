"""Images of requests, decoded in a pool of threads; a hostile file is refused with one sentence."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from dear._io.image_file import FORMATS, Size, open_image, resize_crop, side_of
from dear.errors import InputError
from dear.serve.errors import Refused

# A JPEG may be decoded at a scale that leaves at least this many times the wanted side. Features then stay
# within a cosine distance of 2e-4 of those of the whole decoding (benchmarks/serve.py draft).
REDUCED = 4


@dataclass(frozen=True)
class Upload:
    """One image as it came."""

    name: str
    content: bytes


class Decoder:
    """Turns uploads into uint8 [3, S, S].

    Args:
        threads: that decode.
        size: S.
        most_pixels: of an image before it is resized.
        reduced: decode large JPEG files at a reduced scale: faster, and not quite the same pixels.
    """

    def __init__(self, threads: int, size: Size, most_pixels: int, reduced: bool = False) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dear-serve-decode")
        self.size, self.most_pixels, self.reduced = size, most_pixels, reduced

    async def decode(self, uploads: Sequence[Upload]) -> list[Tensor]:
        """All images of a request.

        Raises:
            Refused: one of them is no image, damaged or too large; it is named.
        """
        loop = asyncio.get_running_loop()
        return list(await asyncio.gather(*(loop.run_in_executor(self._pool, self.one, u) for u in uploads)))

    def one(self, upload: Upload) -> Tensor:
        """One image."""
        try:
            with Image.open(io.BytesIO(upload.content), formats=FORMATS) as image:
                if image.width * image.height > self.most_pixels:
                    raise Refused(
                        413,
                        f"{upload.name}: {image.width} x {image.height} pixels are more than "
                        f"{self.most_pixels:,}; make it smaller",
                    )
                if self.reduced and image.format == "JPEG":  # the decoder can halve, quarter and eighth
                    image.draft("RGB", (REDUCED * side_of(self.size),) * 2)
                return resize_crop(open_image(image), self.size)
        except Refused:
            raise
        except InputError as error:
            raise Refused(400, f"{upload.name}: {_reason(error)}") from None
        except Exception:
            pass
        try:  # the library's own reader has the better sentence for what is no image
            return resize_crop(open_image(upload.content), self.size)
        except InputError as error:
            raise Refused(400, f"{upload.name}: {_reason(error)}") from None

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _reason(error: InputError) -> str:
    """The sentence without the library's own name for bytes in memory."""
    return str(error).partition(": ")[2] or str(error)


def from_base64(texts: Sequence[str]) -> list[Upload]:
    """Images of a JSON request.

    Raises:
        Refused: one of them is not base64.
    """
    found = []
    for number, text in enumerate(texts, 1):
        try:
            content = base64.b64decode(
                text.partition(",")[2] if text.startswith("data:") else text, validate=True
            )
        except (binascii.Error, ValueError):
            raise Refused(400, f"image {number} is not valid base64") from None
        found.append(Upload(f"image {number}", content))
    return found
