"""Images of requests, decoded by processes that a hostile file can neither hold nor take along.

A decoder may take minutes or gigabytes for a small file. What an image will cost is read from its header
first (`dear._io.image_header`) and taken from a budget; the file then goes to a process that has a memory
limit and is killed at a deadline. Callers take turns, and large images never occupy the last process.

The processes (`work`) do not load PyTorch. They also free the service from Pillow's Python parts, which hold
the interpreter's lock: threads of one process decode a few hundred files a second however many there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from PIL import Image

from dear._io.image_file import FORMATS, Size, open_image, side_of, square
from dear._io.image_header import read_header
from dear.errors import InputError
from dear.serve.errors import Refused
from dear.serve.fair import FairQueue

if TYPE_CHECKING:
    from torch import Tensor

# A JPEG may be decoded at a scale that leaves at least this many times the wanted side. Features then stay
# within a cosine distance of 2e-4 of those of the whole decoding (benchmarks/serve.py draft).
REDUCED = 4
_LARGE = 8_000_000  # pixels; such an image never takes the last idle process
_BASE_COST = 100_000  # pixels that the way to a process and back is worth
_START_SECONDS = 60.0  # for a process to start
_REQUEST, _REPLY = struct.Struct("<IQ"), struct.Struct("<HI")  # length, pixels; status (0: pixels), length
_START = "from dear.serve.decode import work; work()"
# Memory of a large image goes back to the system when it is freed.
_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
}


@dataclass(frozen=True)
class Upload:
    """One image as it came."""

    name: str
    content: bytes


@dataclass(frozen=True)
class Decoding:
    """How a file becomes pixels."""

    size: Size  #: side S of the square, or the whole rule
    most_pixels: int  #: of an image before it is resized
    reduced: bool = False  #: decode large JPEG files at a reduced scale: faster, pixels a little off
    seconds: float = 3.0  #: after which a decoding process is killed
    most_bytes: int = 2**30  #: of memory that a decoding process may take beyond what it has at its start

    def cost(self, content: bytes) -> int:
        """Pixels to decode, as the header says; the most that are allowed where it cannot be read.

        Raises:
            Refused: the image is too large, or a JPEG of too many scans.
        """
        header = read_header(content)
        if header is None:
            return self.most_pixels if len(content) > 64 else 0
        if header.pixels > self.most_pixels:
            raise Refused(
                413,
                f"{header.width} x {header.height} pixels are more than {self.most_pixels:,}; "
                "make it smaller",
            )
        if header.cost > self.most_pixels:
            raise Refused(
                413,
                f"{header.scans} scans of {header.width} x {header.height} pixels take too long to decode; "
                "save it as an ordinary JPEG",
            )
        return header.cost

    def pixels(self, content: bytes, most_pixels: int) -> bytes:
        """The bytes of uint8 [3, S, S].

        Raises:
            Refused: it is no image, damaged, or has more pixels than its header said.
        """
        try:
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                if image.width * image.height > most_pixels:
                    raise Refused(413, f"{image.width} x {image.height} pixels are more than its header says")
                if self.reduced and image.format == "JPEG":  # the decoder can halve, quarter and eighth
                    image.draft("RGB", (REDUCED * side_of(self.size),) * 2)
                    return self._view(open_image(image))
        except Refused:
            raise
        except Exception:  # the library's own reader has the better sentence
            pass
        try:
            return self._view(open_image(content))
        except InputError as error:
            if isinstance(error.__cause__, MemoryError):
                raise Refused(413, "takes too much memory to decode; make it smaller") from None
            raise Refused(400, _reason(error)) from None
        except MemoryError:
            raise Refused(413, "takes too much memory to decode; make it smaller") from None

    def _view(self, image: Image.Image) -> bytes:
        found: bytes = np.asarray(square(image, self.size)).transpose(2, 0, 1).tobytes()
        return found


@dataclass
class _Task:
    """An image that waits for a process."""

    upload: Upload
    cost: int
    future: Future[Tensor] = field(default_factory=Future)


class Decoder:
    """Turns uploads into uint8 [3, S, S], each in a process.

    Args:
        workers: files decoded at once.
        how: size and limits of one file.
        most_in_flight: pixels decoded at once, over all files.
    """

    def __init__(self, workers: int, how: Decoding, most_in_flight: int = 100_000_000) -> None:
        self.how, self._budget = how, max(most_in_flight, how.most_pixels)
        self._queue: FairQueue[_Task] = FairQueue()
        self._changed = threading.Condition()
        self._pixels = 0  # being decoded
        self._busy, self._workers = 0, workers
        self._closed = False
        self._progress = time.monotonic()
        self._processes: dict[int, _Process] = {}
        self._threads: list[threading.Thread] = []

    def start(self, workers: int | None = None) -> None:
        """Start threads that wait for work; each starts its process with its first file."""
        with self._changed:
            for number in range(len(self._threads), self._workers if workers is None else workers):
                name = f"dear-serve-decode-{number}"
                thread = threading.Thread(target=self._work, args=(number,), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def standing(self, seconds: float) -> bool:
        """Whether files wait and none was finished for that long."""
        with self._changed:
            waiting = len(self._queue) + self._busy > 0
            return waiting and time.monotonic() - self._progress > seconds

    async def decode(
        self, uploads: Sequence[Upload], caller: str = "", most_pixels: int | None = None
    ) -> list[Tensor | Refused]:
        """All images of a request; in the place of one that cannot be decoded, why.

        Args:
            uploads: the images.
            caller: who takes turns with others.
            most_pixels: of all images together.

        Raises:
            Refused: they have more pixels together than allowed, or the service is stopping.
        """
        costs: list[int | Refused] = []
        for upload in uploads:
            try:
                costs.append(self.how.cost(upload.content))
            except Refused as error:
                costs.append(_named(upload, error))
        total = sum(cost for cost in costs if not isinstance(cost, Refused))
        if most_pixels is not None and total > most_pixels:
            raise Refused(
                413, f"the images have {total:,} pixels together; {most_pixels:,} are allowed; send fewer"
            )
        waiting = [
            asyncio.wrap_future(self._put(upload, cost, caller))
            for upload, cost in zip(uploads, costs, strict=True)
            if not isinstance(cost, Refused)
        ]
        decoded = iter(await asyncio.gather(*waiting, return_exceptions=True))
        found = [cost if isinstance(cost, Refused) else next(decoded) for cost in costs]
        for one in found:
            if isinstance(one, BaseException) and not isinstance(one, Refused):
                raise one
        return [one for one in found if not isinstance(one, BaseException) or isinstance(one, Refused)]

    def one(self, upload: Upload) -> Tensor:
        """One image, waited for."""
        try:
            cost = self.how.cost(upload.content)
        except Refused as error:
            raise _named(upload, error) from None
        return self._put(upload, cost, "").result()

    def close(self, seconds: float = 0.0) -> None:
        """Stop: what waits is refused, what is being decoded after that many seconds is killed."""
        until = time.monotonic() + seconds
        with self._changed:
            self._closed = True
            left = self._queue.clear()
            self._changed.notify_all()
        for task in left:
            if task.future.set_running_or_notify_cancel():
                task.future.set_exception(_stopping())
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for process in list(self._processes.values()):
            process.close()
        for thread in self._threads:
            thread.join(1.0)

    def _put(self, upload: Upload, cost: int, caller: str) -> Future[Tensor]:
        task = _Task(upload, cost)
        with self._changed:
            if self._closed:
                raise _stopping()
            if not self._busy and not len(self._queue):
                self._progress = time.monotonic()
            self._queue.put(caller, cost + _BASE_COST, task)
            short = len(self._queue) + self._busy > len(self._threads)
            self._changed.notify()
        if short and len(self._threads) < self._workers:
            self.start(len(self._threads) + 1)
        return task.future

    def _fits(self, task: _Task) -> bool:
        """Whether an image may be decoded now: its pixels are there, and it is small or not the last."""
        last = self._busy >= self._workers - 1 and self._workers > 1
        return self._pixels + task.cost <= self._budget and not (last and task.cost > _LARGE)

    def _work(self, number: int) -> None:
        """Decode one file after another, until the decoder is closed."""
        while True:
            with self._changed:
                while (task := self._queue.take(self._fits)) is None:
                    if self._closed:
                        return
                    self._changed.wait()
                self._busy += 1
                self._pixels += task.cost
            try:
                if task.future.set_running_or_notify_cancel():
                    self._answer(number, task)
            finally:
                with self._changed:
                    self._busy -= 1
                    self._pixels -= task.cost
                    self._progress = time.monotonic()
                    self._changed.notify_all()

    def _answer(self, number: int, task: _Task) -> None:
        import torch  # not above: a decoding process has no use for it

        try:
            found = self._decoded(number, task)
        except Refused as error:
            task.future.set_exception(_named(task.upload, error))
        except BaseException as error:
            task.future.set_exception(error)
        else:
            side = side_of(self.how.size)
            task.future.set_result(torch.frombuffer(found, dtype=torch.uint8).view(3, side, side))

    def _decoded(self, number: int, task: _Task) -> bytearray:
        """The pixels; an image whose process was ended or held up by something else is tried once more."""
        most, reason = max(task.cost, 1), _stopping()
        for _ in range(2):
            process = self._processes.get(number)
            if process is None or process.ended:
                if self._closed:
                    raise _stopping()
                process = self._processes[number] = _Process(self.how)
            try:
                return process.pixels(task.upload.content, most)
            except (EOFError, ConnectionError):
                process.close()
                reason = Refused(400, "the image ended the program that was to decode it")
            except TimeoutError:
                idle = process.idle()
                process.close()
                seconds = self.how.seconds
                reason = Refused(413, f"takes longer than {seconds:g} seconds to decode; make it smaller")
                if not idle:
                    break
        raise reason


class _Process:
    """A process that decodes one file after another; it ends with this one, whichever way that ends."""

    def __init__(self, how: Decoding) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        self._seconds, self._used = how.seconds, 0.0
        self._line, other = socket.socketpair()
        self._process: subprocess.Popen[bytes]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START],
                stdin=other.fileno(),
                env={**os.environ, **_MALLOC, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            )
        finally:
            other.close()
        try:
            self._line.settimeout(_START_SECONDS)
            self._send(msgspec.json.encode(how), 0)
            self._receive(_REPLY.size, time.monotonic() + _START_SECONDS)
        except (OSError, EOFError):
            self.close()
            raise

    @property
    def ended(self) -> bool:
        """Whether it can decode no more."""
        return self._process.poll() is not None

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def pixels(self, content: bytes, most_pixels: int) -> bytearray:
        """As `Decoding.pixels`.

        Raises:
            EOFError: the process ended.
            TimeoutError: it took too long, and must be closed.
        """
        until, self._used = time.monotonic() + self._seconds, _cpu_seconds(self.pid)
        self._line.settimeout(self._seconds)
        self._send(content, most_pixels)
        status, length = _REPLY.unpack(self._receive(_REPLY.size, until))
        found = self._receive(length, until)
        if status:
            raise Refused(status, found.decode())
        return found

    def idle(self) -> bool:
        """Whether it had hardly any processor time for its last file: it was stopped, or others were busy."""
        return _cpu_seconds(self.pid) - self._used < self._seconds / 2

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._line.close()

    def _send(self, content: bytes, most_pixels: int) -> None:
        self._line.sendall(_REQUEST.pack(len(content), most_pixels))
        self._line.sendall(content)

    def _receive(self, length: int, until: float) -> bytearray:
        found = bytearray(length)
        view, place = memoryview(found), 0
        while place < length:
            self._line.settimeout(max(0.001, until - time.monotonic()))
            count = self._line.recv_into(view[place:])
            if not count:
                raise EOFError
            place += count
        return found


def work() -> None:
    """Decode files that come through standard input, a socket, until it ends; started by `Decoder`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which drains
    line = socket.socket(fileno=os.dup(0))
    with line, line.makefile("rwb") as stream, contextlib.suppress(EOFError, OSError):
        length, _ = _REQUEST.unpack(_read(stream, _REQUEST.size))
        how = msgspec.json.decode(_read(stream, length), type=Decoding)
        _limit_memory(how.most_bytes)
        found, status = b"", 0
        while True:
            stream.write(_REPLY.pack(status, len(found)) + found)
            stream.flush()
            length, most_pixels = _REQUEST.unpack(_read(stream, _REQUEST.size))
            content = _read(stream, length)
            try:
                status, found = 0, how.pixels(content, most_pixels)
            except Refused as error:
                status, found = error.http_status, str(error).encode()


def _limit_memory(more: int) -> None:
    """Let this process take so many bytes more than it has."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            own = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own + more, own + more))
    except (ImportError, OSError, ValueError):  # not on every system
        pass


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process; infinite where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return float("inf")


def _read(source: io.BufferedRWPair, length: int) -> bytes:
    """Exactly so many bytes.

    Raises:
        EOFError: the other side ended.
    """
    found = source.read(length)
    if found is None or len(found) < length:
        raise EOFError
    return found


def _named(upload: Upload, error: Refused) -> Refused:
    """A refusal with the image's name before it."""
    return Refused(error.http_status, f"{upload.name}: {error}", error.retry_after)


def _stopping() -> Refused:
    return Refused(503, "the service is stopping; ask another one")


def _reason(error: InputError) -> str:
    """The sentence without the library's own name for bytes in memory."""
    return str(error).partition(": ")[2] or str(error)
