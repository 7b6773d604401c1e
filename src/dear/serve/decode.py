"""Images of requests, decoded in a pool; a hostile file is refused with one sentence.

Pillow's Python parts hold the interpreter's lock, so threads of one process decode no more than a few hundred
files a second however many there are. Where the model is faster than that, each thread hands its files to a
process of its own (`work`), which does not load PyTorch and whose end costs nobody but the file it reads.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import io
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import msgspec
import numpy as np
from PIL import Image

from dear._io.image_file import FORMATS, Size, open_image, side_of, square
from dear.errors import InputError
from dear.serve.errors import Refused

if TYPE_CHECKING:
    from torch import Tensor

# A JPEG may be decoded at a scale that leaves at least this many times the wanted side. Features then stay
# within a cosine distance of 2e-4 of those of the whole decoding (benchmarks/serve.py draft).
REDUCED = 4
_REQUEST, _REPLY = struct.Struct("<I"), struct.Struct("<HI")  # length; status (0: pixels) and length
_START = "from dear.serve.decode import work; work()"


@dataclass(frozen=True)
class Upload:
    """One image as it came."""

    name: str
    content: bytes


@dataclass(frozen=True)
class Decoding:
    """How a file becomes pixels.

    Attributes:
        size: side S of the square, or the whole rule.
        most_pixels: of an image before it is resized.
        reduced: decode large JPEG files at a reduced scale: faster, and not quite the same pixels.
    """

    size: Size
    most_pixels: int
    reduced: bool = False

    def pixels(self, content: bytes) -> bytes:
        """The bytes of uint8 [3, S, S].

        Raises:
            Refused: it is no image, damaged or too large.
        """
        try:
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                if image.width * image.height > self.most_pixels:
                    raise Refused(
                        413,
                        f"{image.width} x {image.height} pixels are more than {self.most_pixels:,}; "
                        "make it smaller",
                    )
                if self.reduced and image.format == "JPEG":  # the decoder can halve, quarter and eighth
                    image.draft("RGB", (REDUCED * side_of(self.size),) * 2)
                return self._view(open_image(image))
        except Refused:
            raise
        except InputError as error:
            raise Refused(400, _reason(error)) from None
        except Exception:
            pass
        try:  # the library's own reader has the better sentence for what is no image
            return self._view(open_image(content))
        except InputError as error:
            raise Refused(400, _reason(error)) from None

    def _view(self, image: Image.Image) -> bytes:
        found: bytes = np.asarray(square(image, self.size)).transpose(2, 0, 1).tobytes()
        return found


class Decoder:
    """Turns uploads into uint8 [3, S, S].

    Args:
        workers: files decoded at once.
        how: size and limits.
        processes: each worker is a process instead of a thread.
    """

    def __init__(self, workers: int, how: Decoding, processes: bool = False) -> None:
        self.how, self.processes = how, processes
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="dear-serve-decode")
        self._own = threading.local()
        self._started: list[_Process] = []

    async def decode(self, uploads: Sequence[Upload]) -> list[Tensor]:
        """All images of a request.

        Raises:
            Refused: one of them is no image, damaged or too large; it is named.
        """
        loop = asyncio.get_running_loop()
        return list(await asyncio.gather(*(loop.run_in_executor(self._pool, self.one, u) for u in uploads)))

    def one(self, upload: Upload) -> Tensor:
        """One image."""
        import torch  # not above: a decoding process has no use for it

        try:
            found = (
                self._process().pixels(upload.content) if self.processes else self.how.pixels(upload.content)
            )
        except Refused as error:
            raise Refused(error.http_status, f"{upload.name}: {error}") from None
        side = side_of(self.how.size)
        return torch.frombuffer(bytearray(found), dtype=torch.uint8).view(3, side, side)

    def close(self) -> None:
        """Stop the workers."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for process in self._started:
            process.close()

    def _process(self) -> _Process:
        """The process of this thread; one that ended is replaced."""
        process: _Process | None = getattr(self._own, "process", None)
        if process is None or process.ended:
            process = self._own.process = _Process(self.how)
            self._started.append(process)  # by several threads at once
        return process


class _Process:
    """A process that decodes one file after another; it ends with this one, whichever way that ends."""

    def __init__(self, how: Decoding) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        self._send(msgspec.json.encode(how))

    @property
    def ended(self) -> bool:
        """Whether it can decode no more."""
        return self._process.poll() is not None

    def pixels(self, content: bytes) -> bytes:
        """As `Decoding.pixels`."""
        try:
            self._send(content)
            status, length = _REPLY.unpack(_read(self._process.stdout, _REPLY.size))
            found = _read(self._process.stdout, length)
        except (EOFError, OSError):
            self.close()
            raise Refused(400, "the image ended the program that was to decode it") from None
        if status:
            raise Refused(status, found.decode())
        return found

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for end in (self._process.stdin, self._process.stdout):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.close()

    def _send(self, content: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(_REQUEST.pack(len(content)) + content)
        self._process.stdin.flush()


def work() -> None:
    """Decode files from standard input until it ends; started by `Decoder`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which drains
    source, target = sys.stdin.buffer, sys.stdout.buffer
    how: Decoding | None = None
    try:
        while True:
            content = _read(source, _REQUEST.unpack(_read(source, _REQUEST.size))[0])
            if how is None:
                how = msgspec.json.decode(content, type=Decoding)
                continue
            status = 0
            try:
                found = how.pixels(content)
            except Refused as error:
                status, found = error.http_status, str(error).encode()
            target.write(_REPLY.pack(status, len(found)) + found)
            target.flush()
    except (EOFError, OSError):
        return


def _read(source: IO[bytes] | None, length: int) -> bytes:
    """Exactly so many bytes.

    Raises:
        EOFError: the other side ended.
    """
    found = source.read(length) if source is not None else b""
    if len(found) < length:
        raise EOFError
    return found


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
