"""Processes that decode images: forked with the decoders loaded, limited, killed when greedy.

They also free the service from the decoders' Python parts, which hold the interpreter's lock: threads of one
process decode a few hundred files a second however many there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np
from PIL import Image

from dear.errors import InputError
from dear.images import jpeg
from dear.images.headers import read_header
from dear.images.views import FORMATS, Size, Source, open_image, side_of, view_pixels
from dear.serve.errors import Refused
from dear.serve.settings import Limits

if TYPE_CHECKING:
    from torch import Tensor

    from dear.serve.decode import Decoder, Task

# A JPEG may be decoded at a scale that leaves at least this many times the wanted side. Features then stay
# within a cosine distance of 2e-4 of those of the whole decoding (benchmarks/serve.py draft).
REDUCED = 4
_SHORT = 2**20  # bytes; memory of longer files is given back
_MOST_SENTENCE = 4000  # bytes
_LOOK_SECONDS = 0.05  # at least, between two looks at what a process has used
_ENDED = "the image ended the program that was to decode it"
_COUNT = struct.Struct("<H")  # files that are asked for at once
_REQUEST = struct.Struct("<IQ")  # of each: its length, pixels that it may have
_REPLY = struct.Struct("<Hd")  # results, processor time so far
_RESULT = struct.Struct("<HI")  # of each file: status (0: pixels), length of the answer
MOST_AT_ONCE = 4  #: files that a process gets at once
_START = "from dear.serve.decode_process import template; template()"
# Memory of a large image goes back to the system when it is freed.
_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
}


@dataclass(frozen=True)
class Decoding:
    """How a file becomes pixels."""

    size: Size  #: side S of the square, or the whole rule
    limits: Limits = field(default_factory=Limits)  #: of one image
    reduced: bool = False  #: decode large JPEG files at a reduced scale: faster, pixels a little off

    def cost(self, content: bytes) -> int:
        """Pixels to decode, as the header says; the most that are allowed where it cannot be read."""
        header, most = read_header(content), self.limits.pixels
        if header is None:
            return most if len(content) > 64 else 0
        size = f"{header.width} x {header.height} pixels"
        if header.pixels > most:
            raise Refused(413, f"{size} are more than {most:,}; make it smaller")
        if header.cost > most:
            raise Refused(
                413, f"{header.scans} scans of {size} take too long to decode; save it as an ordinary JPEG"
            )
        return header.cost

    def pixels(self, content: bytes, most_pixels: int) -> bytes:
        """The bytes of uint8 [3, S, S]."""
        try:
            found: bytes = (
                view_pixels(self._checked(content, most_pixels), self.size).transpose(2, 0, 1).tobytes()
            )
            return found
        except InputError as error:
            if isinstance(error.__cause__, MemoryError):
                raise Refused(413, "takes too much memory to decode; make it smaller") from None
            raise Refused(400, _reason(error)) from None
        except (MemoryError, RuntimeError):  # PyTorch's kernels raise the latter
            raise Refused(413, "takes too much memory to decode; make it smaller") from None

    def _checked(self, content: bytes, most_pixels: int) -> Source:
        """The file, or an image at a reduced scale; refused where it is larger than its header said."""
        header = None if self.reduced else jpeg.read_header(content)
        if header is not None:
            _allow(header.width, header.height, most_pixels)
            return content
        try:
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                size, reducible = image.size, self.reduced and image.format == "JPEG"
        except Exception:  # the library's reader has the better sentence
            return content
        _allow(*size, most_pixels)
        if reducible:  # the decoder can halve, quarter and eighth
            with contextlib.suppress(Exception), Image.open(io.BytesIO(content), formats=FORMATS) as image:
                image.draft("RGB", (REDUCED * side_of(self.size),) * 2)
                if image.size != size:
                    return open_image(image)
        return content


def _allow(width: int, height: int, most_pixels: int) -> None:
    if width * height > most_pixels:
        raise Refused(413, f"{width} x {height} pixels are more than its header says")


class Worker:
    """A process that decodes files, one or a few at a time; it ends with this one, whichever way that ends.

    Files and pixels are in memory that both have; the line between them carries a few bytes for each.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._how = decoder.how
        self.tasks: list[Task] = []
        self.pid = 0  #: known when it is ready
        self._handle = -1
        self._ready = False
        self._heard = b""
        self._used = self._began = 0.0  # processor time until its last answer; when the files came
        self._timer: asyncio.TimerHandle | None = None
        self._memory, descriptor = _shared_memory(_room(self._how))
        self.line, other = socket.socketpair()
        self.line.setblocking(False)
        try:
            Template.running().fork(other, descriptor)
            how = msgspec.msgpack.encode(self._how)
            self.line.send(_REQUEST.pack(len(how), 0) + how)
        finally:
            other.close()
            os.close(descriptor)
        decoder.loop.add_reader(self.line, self.hear)

    @property
    def idle(self) -> bool:
        """Whether it waits for files."""
        return self._ready and not self.tasks

    def decode(self, tasks: list[Task]) -> None:
        """Begin with files, together no longer than a body; `hear` is called when they are done."""
        self.tasks, self._began = tasks, time.monotonic()
        self._timer = self._decoder.loop.call_later(self._how.limits.decode_seconds, self._look)
        place, message = 0, [_COUNT.pack(len(tasks))]
        try:
            for task in tasks:
                content = task.upload.content
                self._memory[place : place + len(content)] = content
                message.append(_REQUEST.pack(len(content), max(task.cost, 1)))
                place += len(content)
            self.line.send(b"".join(message))
        except (ValueError, IndexError):  # longer than the room for it
            self._done([Refused(413, "the file is too long")] * len(tasks))
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
            count, used = _REPLY.unpack_from(self._heard)
            end = _REPLY.size + count * _RESULT.size
            if len(self._heard) < end:
                break
            results = list(_RESULT.iter_unpack(self._heard[_REPLY.size : end]))
            self._heard, self._used = self._heard[end:], used
            if self._ready:
                self._done(self._found(results))
            else:
                self._greet(results[0][1])
        self._decoder.dispatch()

    def _greet(self, pid: int) -> None:
        """The process is ready."""
        self.pid, self._ready = pid, True
        with contextlib.suppress(OSError, AttributeError):  # not on every system
            self._handle = os.pidfd_open(pid)

    def kill(self) -> None:
        """End the process; one that is gone is not mistaken for another."""
        with contextlib.suppress(OSError):
            if self._handle >= 0:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            elif self.pid:
                os.kill(self.pid, signal.SIGKILL)

    def _found(self, results: list[tuple[int, int]]) -> list[Tensor | Refused]:
        import torch  # not above: a decoding process has no use for it

        start, each, side = _answer_at(self._how), _answer_size(self._how), side_of(self._how.size)
        # NumPy copies: PyTorch would have all cores copy a part each, and wait for one another.
        answers = np.frombuffer(self._memory, np.uint8, len(results) * each, start).reshape(-1, each)
        pixels = torch.from_numpy(answers[:, : 3 * side * side].copy()).view(-1, 3, side, side)
        return [
            Refused(status, answers[number, :length].tobytes().decode()) if status else pixels[number]
            for number, (status, length) in enumerate(results)
        ]

    def _done(self, found: list[Tensor | Refused]) -> None:
        """The files were decoded or refused; the process waits for the next."""
        tasks, self.tasks = self.tasks, []
        if self._timer is not None:
            self._timer.cancel()
        if any(len(task.upload.content) > _SHORT for task in tasks) and hasattr(mmap, "MADV_REMOVE"):
            self._memory.madvise(mmap.MADV_REMOVE, 0, _answer_at(self._how))
        for task, own in zip(tasks, found, strict=False):
            self._decoder.released(task)
            self._decoder.finish(task, own)

    def _look(self) -> None:
        """See what files that are not done have used; the process is killed when that is too much.

        Processor time counts, so that a busy machine refuses no image. A process that something else stopped,
        or that got hardly any time for long, is replaced and its files tried once more.
        """
        limits, waited = self._how.limits, time.monotonic() - self._began
        used, stopped = _state(self.pid)
        left = limits.decode_seconds - (used - self._used)
        if left <= 0:
            reason = f"takes longer than {limits.decode_seconds:g} seconds to decode; make it smaller"
            self._end(Refused(413, reason), again=len(self.tasks) > 1)  # which of several was it?
        elif stopped or waited >= limits.decode_wall_seconds:
            busy = Refused(503, "the service is too busy to decode it; try again", retry_after=1)
            self._end(busy, again=True)
        else:
            wait = max(min(left, limits.decode_wall_seconds - waited), _LOOK_SECONDS)
            self._timer = self._decoder.loop.call_later(wait, self._look)

    def _end(self, reason: Refused, again: bool = False) -> None:
        """End the process; its files are refused, or tried once more by another, one at a time."""
        self._decoder.loop.remove_reader(self.line)
        self.kill()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        self.line.close()
        tasks, self.tasks, started, self._ready = self.tasks, [], self._ready, False
        if self._timer is not None:
            self._timer.cancel()
        for task in tasks:
            self._decoder.released(task)
            if again:
                self._decoder.again(task, reason)
            else:
                self._decoder.finish(task, reason)
        self._decoder.ended(self, started)


def _answer_at(how: Decoding) -> int:
    """Where the answers begin in the shared memory; before them lie the files."""
    return -(-how.limits.body_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _answer_size(how: Decoding) -> int:
    """Bytes between the answer of one file and that of the next."""
    return max(3 * side_of(how.size) ** 2, _MOST_SENTENCE)


def _room(how: Decoding) -> int:
    """Bytes of the shared memory; taken from the system only as far as they are used."""
    return _answer_at(how) + MOST_AT_ONCE * _answer_size(how)


def _shared_memory(length: int) -> tuple[mmap.mmap, int]:
    """Memory that a child process can have, too, and the descriptor by which it gets it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("dear-serve")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, length)
    return mmap.mmap(descriptor, length), descriptor


class Template:
    """A process that has loaded what decoding needs; decoding processes are forked from it in an instant.

    One serves all decoders of this process and ends with it (`Template.running`).
    """

    _one: ClassVar[Template | None] = None

    @classmethod
    def running(cls) -> Template:
        """The template; one that ended is replaced."""
        if cls._one is None or cls._one.process.poll() is not None:
            cls._one = cls()
        return cls._one

    def __init__(self) -> None:
        self._line, other = socket.socketpair()
        self._line.setblocking(False)
        paths = os.pathsep.join(path for path in sys.path if path)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START],
                stdin=other.fileno(),
                env={**os.environ, **_MALLOC, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            )
        finally:
            other.close()

    def fork(self, line: socket.socket, memory: int) -> None:
        """Make a decoding process that uses a line and the memory of a descriptor."""
        with contextlib.suppress(OSError):  # it ended: the line ends, too
            socket.send_fds(self._line, [b"f"], [line.fileno(), memory])


def template() -> None:
    """Fork a decoding process whenever the socket at standard input asks for one; started by `Template`."""
    import torch  # resizes images: the same pixels as elsewhere in the library

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which drains
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a decoding process ended
    line = socket.socket(fileno=os.dup(0))
    while True:
        asked, descriptors, _, _ = socket.recv_fds(line, 1, 2)
        if not asked:
            return
        if os.fork() == 0:
            line.close()
            try:
                work(*descriptors)
            finally:
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def work(descriptor: int, memory_descriptor: int) -> None:
    """Decode files in shared memory, as a line asks for, until it ends."""
    _end_with_parent()
    with socket.socket(fileno=descriptor) as line, contextlib.suppress(OSError, msgspec.DecodeError):
        length, _ = _REQUEST.unpack(_received(line, _REQUEST.size))
        how = msgspec.msgpack.decode(_received(line, length), type=Decoding)
        start, each, memory = _answer_at(how), _answer_size(how), mmap.mmap(memory_descriptor, _room(how))
        _limit_memory(how.limits.decode_bytes)
        line.sendall(_REPLY.pack(1, time.process_time()) + _RESULT.pack(0, os.getpid()))
        while True:
            (count,) = _COUNT.unpack(_received(line, _COUNT.size))
            asked = list(_REQUEST.iter_unpack(_received(line, count * _REQUEST.size)))
            place, results = 0, []
            for number, (length, most_pixels) in enumerate(asked):
                try:
                    status, found = 0, how.pixels(memory[place : place + length], most_pixels)
                except Refused as error:
                    status, found = error.http_status, str(error).encode()[:_MOST_SENTENCE]
                at, place = start + number * each, place + length
                memory[at : at + len(found)] = found
                results.append(_RESULT.pack(status, len(found)))
            line.sendall(_REPLY.pack(count, time.process_time()) + b"".join(results))


def _received(line: socket.socket, length: int) -> bytes:
    """So many bytes of a line."""
    data = line.recv(length, socket.MSG_WAITALL)
    if len(data) < length:
        raise ConnectionError("the line has ended")
    return data


def _end_with_parent() -> None:
    """Have this process killed when the one that forked it ends (Linux)."""
    with contextlib.suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _limit_memory(more: int) -> None:
    """Let this process take so many bytes more than it has."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            own = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (own + more, own + more))
    except (ImportError, OSError, ValueError):  # not on every system
        pass


def _state(pid: int) -> tuple[float, bool]:
    """Processor time of a process, infinite where the system does not say, and whether it was stopped."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] in "Tt"
    except (OSError, ValueError, IndexError):
        return float("inf"), False


def _reason(error: InputError) -> str:
    """The sentence without the library's own name for bytes in memory."""
    return str(error).partition(": ")[2] or str(error)
