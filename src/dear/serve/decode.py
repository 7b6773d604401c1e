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
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
_SHORT = 2**20  # bytes; memory of longer files is given back
_MOST_SENTENCE = 4000  # bytes
_ENDED = "the image ended the program that was to decode it"
_REQUEST = struct.Struct("<IQ")  # length of the file, pixels that it may have
_REPLY = struct.Struct("<HId")  # status (0: pixels), length of the answer, processor time so far
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
    most_content: int = 32 * 2**20  #: bytes of a file
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


@dataclass(eq=False)
class _Task:
    """An image that waits for a process."""

    upload: Upload
    cost: int
    caller: str
    future: asyncio.Future[Tensor | Refused]
    tries: int = 0


class Decoder:
    """Turns uploads into uint8 [3, S, S], each in a process. All of it runs on one event loop.

    Args:
        workers: files decoded at once.
        how: size and limits of one file.
        most_in_flight: pixels decoded at once, over all files.
    """

    def __init__(self, workers: int, how: Decoding, most_in_flight: int = 100_000_000) -> None:
        self.how, self._budget = how, max(most_in_flight, how.most_pixels)
        self._most_workers = workers
        self._workers: list[_Worker] = []
        self._queue: FairQueue[_Task] = FairQueue()
        self._pixels = 0  # being decoded
        self._closed = False
        self._progress = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that it runs on."""
        assert self._loop is not None
        return self._loop

    def start(self) -> None:
        """Start all processes now, on the running event loop; else they start when they are needed."""
        self._on_this_loop()
        while len(self._workers) < self._most_workers:
            self._workers.append(_Worker(self))

    def standing(self, seconds: float) -> bool:
        """Whether files wait and none was finished for that long."""
        waiting = len(self._queue) or any(worker.task for worker in self._workers)
        return bool(waiting) and time.monotonic() - self._progress > seconds

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
        if self._closed:
            raise _stopping()
        loop = self._on_this_loop()
        if not len(self._queue) and not any(worker.task for worker in self._workers):
            self._progress = time.monotonic()
        pending: list[Refused | asyncio.Future[Tensor | Refused]] = []
        for upload, cost in zip(uploads, costs, strict=True):
            if isinstance(cost, Refused):
                pending.append(cost)
                continue
            task = _Task(upload, cost, caller, loop.create_future())
            self._queue.put(caller, cost + _BASE_COST, task)
            pending.append(task.future)
        self.dispatch()
        try:
            return [one if isinstance(one, Refused) else await one for one in pending]
        finally:
            for one in pending:  # of a request that was given up
                if not isinstance(one, Refused):
                    one.cancel()

    def close(self) -> None:
        """Stop: what waits is refused, what is being decoded is killed. From any thread."""
        self._closed = True
        for worker in self._workers:
            worker.process.kill()
        if self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(self._refuse_all)
        for worker in self._workers:
            worker.process.wait()

    def _refuse_all(self) -> None:
        for task in self._queue.clear():
            self.finish(task, _stopping())

    def _on_this_loop(self) -> asyncio.AbstractEventLoop:
        """The running loop; processes that another one had are heard on this one."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            for worker in self._workers:
                loop.add_reader(worker.line, worker.hear)
        return loop

    def dispatch(self) -> None:
        """Give waiting files to idle processes; start one more where none is idle."""
        while len(self._queue):
            worker = next((one for one in self._workers if one.idle), None)
            if worker is None:
                if len(self._workers) < self._most_workers and not self._closed:
                    self._workers.append(_Worker(self))
                return
            task = self._queue.take(self._fits)
            if task is None:
                return
            if not task.future.done():
                self._pixels += task.cost
                worker.decode(task)

    def _fits(self, task: _Task) -> bool:
        """Whether an image may be decoded now: its pixels are there, and it is small or not the last."""
        busy = sum(worker.task is not None for worker in self._workers)
        last = busy >= self._most_workers - 1 and self._most_workers > 1
        return self._pixels + task.cost <= self._budget and not (last and task.cost > _LARGE)

    def released(self, task: _Task) -> None:
        """A process is done with a file."""
        self._pixels -= task.cost
        self._progress = time.monotonic()

    def again(self, task: _Task, reason: Refused) -> None:
        """Try a file once more whose process was ended or held up by something else."""
        if task.tries or self._closed:
            self.finish(task, _stopping() if self._closed else reason)
        else:
            task.tries += 1
            self._queue.put(task.caller, _BASE_COST, task)

    def finish(self, task: _Task, found: Tensor | Refused) -> None:
        """Answer whoever waits for a file."""
        if not task.future.done():
            task.future.set_result(_named(task.upload, found) if isinstance(found, Refused) else found)

    def ended(self, worker: _Worker) -> None:
        """A process is gone."""
        self._workers.remove(worker)
        self.dispatch()


class _Worker:
    """A process that decodes one file after another; it ends with this one, whichever way that ends.

    File and pixels are in memory that both have; the line between them carries a few bytes for each.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._how = decoder.how
        self.task: _Task | None = None
        self._ready = False
        self._heard = b""
        self._used = 0.0  # processor time until its last answer
        self._timer: asyncio.TimerHandle | None = None
        self._memory, descriptor = _shared_memory(_room(self._how))
        self.line, other = socket.socketpair()
        self.line.setblocking(False)
        paths = os.pathsep.join(path for path in sys.path if path)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, msgspec.json.encode(self._how).decode(), str(descriptor)],
                stdin=other.fileno(),
                pass_fds=(descriptor,),
                env={**os.environ, **_MALLOC, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            )
        finally:
            other.close()
            os.close(descriptor)
        decoder.loop.add_reader(self.line, self.hear)

    @property
    def idle(self) -> bool:
        """Whether it waits for a file."""
        return self._ready and self.task is None

    def decode(self, task: _Task) -> None:
        """Begin with a file; `hear` is called when it is done."""
        content = task.upload.content
        self.task = task
        self._timer = self._decoder.loop.call_later(self._how.seconds, self._late)
        try:
            self._memory[: len(content)] = content
            self.line.send(_REQUEST.pack(len(content), max(task.cost, 1)))
        except ValueError:  # longer than the room for it
            self._done(Refused(413, "the file is too long"))
        except OSError:
            self._end(Refused(400, _ENDED), again=True)

    def hear(self) -> None:
        """Take what the process says."""
        try:
            data = self.line.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(Refused(400, _ENDED), again=True)
            return
        self._heard += data
        while len(self._heard) >= _REPLY.size:
            status, length, self._used = _REPLY.unpack(self._heard[: _REPLY.size])
            self._heard = self._heard[_REPLY.size :]
            if self._ready:
                self._done(self._found(status, length))
            self._ready = True
        self._decoder.dispatch()

    def _found(self, status: int, length: int) -> Tensor | Refused:
        import torch  # not above: a decoding process has no use for it

        place = _answer_at(self._how)
        if status:
            return Refused(status, self._memory[place : place + length].decode())
        side = side_of(self._how.size)
        found = torch.frombuffer(self._memory, dtype=torch.uint8, count=length, offset=place)
        return found.clone().view(3, side, side)

    def _done(self, found: Tensor | Refused) -> None:
        """The file was decoded or refused; the process waits for the next."""
        task, self.task = self.task, None
        if self._timer is not None:
            self._timer.cancel()
        if task is not None:
            if len(task.upload.content) > _SHORT and hasattr(mmap, "MADV_REMOVE"):
                self._memory.madvise(mmap.MADV_REMOVE, 0, _answer_at(self._how))
            self._decoder.released(task)
            self._decoder.finish(task, found)

    def _late(self) -> None:
        """The file took too long: the process is killed."""
        seconds = self._how.seconds
        reason = Refused(413, f"takes longer than {seconds:g} seconds to decode; make it smaller")
        # With hardly any processor time it was stopped, or others were busy: not the image's fault.
        self._end(reason, again=_cpu_seconds(self.process.pid) - self._used < seconds / 2)

    def _end(self, reason: Refused, again: bool) -> None:
        """End the process; its file is refused, or tried once more by another."""
        self._decoder.loop.remove_reader(self.line)
        self.process.kill()
        self.process.wait()
        self.line.close()
        task, self.task, self._ready = self.task, None, False
        if self._timer is not None:
            self._timer.cancel()
        if task is not None:
            self._decoder.released(task)
            if again:
                self._decoder.again(task, reason)
            else:
                self._decoder.finish(task, reason)
        self._decoder.ended(self)


def _answer_at(how: Decoding) -> int:
    """Where the answer begins in the shared memory; before it lies the file."""
    return -(-how.most_content // mmap.PAGESIZE) * mmap.PAGESIZE


def _room(how: Decoding) -> int:
    """Bytes of the shared memory; taken from the system only as far as they are used."""
    return _answer_at(how) + max(3 * side_of(how.size) ** 2, _MOST_SENTENCE)


def _shared_memory(length: int) -> tuple[mmap.mmap, int]:
    """Memory that a child process can have, too, and the descriptor by which it gets it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("dear-serve")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, length)
    return mmap.mmap(descriptor, length), descriptor


def work() -> None:
    """Decode files in shared memory, as a socket at standard input asks for; started by `Decoder`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which drains
    how = msgspec.json.decode(sys.argv[1], type=Decoding)
    place, memory = _answer_at(how), mmap.mmap(int(sys.argv[2]), _room(how))
    with socket.socket(fileno=os.dup(0)) as line, contextlib.suppress(OSError):
        _limit_memory(how.most_bytes)
        status, found = 0, b""
        while True:
            memory[place : place + len(found)] = found
            line.sendall(_REPLY.pack(status, len(found), time.process_time()))
            asked = line.recv(_REQUEST.size, socket.MSG_WAITALL)
            if len(asked) < _REQUEST.size:
                return
            length, most_pixels = _REQUEST.unpack(asked)
            try:
                status, found = 0, how.pixels(memory[:length], most_pixels)
            except Refused as error:
                status, found = error.http_status, str(error).encode()[:_MOST_SENTENCE]


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


def _named(upload: Upload, error: Refused) -> Refused:
    """A refusal with the image's name before it."""
    return Refused(error.http_status, f"{upload.name}: {error}", error.retry_after)


def _stopping() -> Refused:
    return Refused(503, "the service is stopping; ask another one")


def _reason(error: InputError) -> str:
    """The sentence without the library's own name for bytes in memory."""
    return str(error).partition(": ")[2] or str(error)
