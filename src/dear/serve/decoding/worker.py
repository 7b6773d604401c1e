"""The service's side of a decoding process: hands it files, hears its answers, kills it when it is greedy.

Processes also free the service from the decoders' Python parts, which hold the interpreter's lock: threads of
one process decode a few hundred files a second however many there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np
import torch

from dear.images.views import side_of
from dear.serve.decoding.process import (
    COUNT,
    PID,
    REPLY,
    REQUEST,
    RESULT,
    answer_offset,
    answer_size,
    shared_bytes,
)  # fmt: skip
from dear.serve.errors import Refused

if TYPE_CHECKING:
    from torch import Tensor

    from dear.serve.decoding.decoder import Decoder, Task

_SHORT = 2**20  # bytes; memory of longer files is given back
_CHECK_SECONDS = 0.05  # at least, between two looks at what a process has used
_START = "from dear.serve.decoding.process import template; template()"
# Memory of a large image goes back to the system when it is freed.
_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "MALLOC_TRIM_THRESHOLD_": "1048576",
}


class Worker:
    """A process that decodes files, one or a few at a time; it ends with this one, whichever way that ends.

    Files and pixels are in memory that both have; the line between them carries a few bytes for each.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._decoding = decoder.decoding
        self.tasks: list[Task] = []
        self.pid = 0  #: as sent by the template, which never reads a file
        self._handle = -1
        self.ready = False  #: whether it has reported that it can decode
        self._received = b""
        self._used = self._began = 0.0  # processor time until its last answer; when the files came
        self._timer: asyncio.TimerHandle | None = None
        self._memory, descriptor = _shared_memory(shared_bytes(self._decoding))
        self.line, other = socket.socketpair()
        self.line.setblocking(False)
        try:
            Template.running().fork(other, descriptor)
            decoding = msgspec.msgpack.encode(self._decoding)
            self.line.send(REQUEST.pack(len(decoding), 0) + decoding)
        finally:
            other.close()
            os.close(descriptor)
        decoder.loop.add_reader(self.line, self.receive)

    @property
    def idle(self) -> bool:
        """Whether it waits for files."""
        return self.ready and not self.tasks

    def decode(self, tasks: list[Task]) -> None:
        """Begin with files, together no longer than a body; `receive` is called when they are done."""
        self.tasks, self._began = tasks, time.monotonic()
        self._timer = self._decoder.loop.call_later(self._decoding.limits.decode_seconds, self._check_usage)
        offset, message = 0, [COUNT.pack(len(tasks))]
        try:
            for task in tasks:
                content = task.upload.content
                self._memory[offset : offset + len(content)] = content
                message.append(REQUEST.pack(len(content), max(task.upload.cost.pixels, 1)))
                offset += len(content)
            self.line.send(b"".join(message))
        except (ValueError, IndexError):  # longer than the room for it
            self._finish([Refused(413, "the file is too long")] * len(tasks))
        except OSError:
            self._end(_worker_lost(), again=True)

    def receive(self) -> None:
        """Receive the answers of the process."""
        try:
            data = self.line.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(_worker_lost(), again=True)
            return
        self._received += data
        if not self.pid and len(self._received) >= PID.size:
            self._identify(*PID.unpack_from(self._received))
            self._received = self._received[PID.size :]
        while self.pid and len(self._received) >= REPLY.size:
            count, used = REPLY.unpack_from(self._received)
            end = REPLY.size + count * RESULT.size
            if len(self._received) < end:
                break
            results = list(RESULT.iter_unpack(self._received[REPLY.size : end]))
            self._received, self._used = self._received[end:], used
            if self.ready:
                self._finish(self._answers(results))
            self.ready = True  # the first reply has no results
            self._decoder.dispatch()

    def _identify(self, pid: int) -> None:
        """The process was forked."""
        self.pid = pid
        with contextlib.suppress(OSError, AttributeError):  # not on every system
            self._handle = os.pidfd_open(pid)

    def kill(self) -> None:
        """End the process; one that is gone is not mistaken for another."""
        with contextlib.suppress(OSError):
            if self._handle >= 0:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            elif self.pid:
                os.kill(self.pid, signal.SIGKILL)

    def _answers(self, results: list[tuple[int, int]]) -> list[Tensor | Refused]:
        start, each, side = (
            answer_offset(self._decoding),
            answer_size(self._decoding),
            side_of(self._decoding.size),
        )
        # NumPy copies: PyTorch would have all cores copy a part each, and wait for one another.
        answers = np.frombuffer(self._memory, np.uint8, len(results) * each, start).reshape(-1, each)
        pixels = torch.from_numpy(answers[:, : 3 * side * side].copy()).view(-1, 3, side, side)
        return [
            Refused(status, answers[number, :length].tobytes().decode("utf-8", "replace"))
            if status
            else pixels[number]
            for number, (status, length) in enumerate(results)
        ]

    def _finish(self, answers: list[Tensor | Refused]) -> None:
        """The files were decoded or refused; the process waits for the next."""
        tasks, self.tasks = self.tasks, []
        if self._timer is not None:
            self._timer.cancel()
        if any(len(task.upload.content) > _SHORT for task in tasks) and hasattr(mmap, "MADV_REMOVE"):
            self._memory.madvise(mmap.MADV_REMOVE, 0, answer_offset(self._decoding))
        for task, answer in zip(tasks, answers, strict=False):
            self._decoder.release(task)
            self._decoder.finish(task, answer)

    def _check_usage(self) -> None:
        """See what files that are not done have used; the process is killed when that is too much.

        Processor time counts, so that a busy machine refuses no image. A process that something else stopped,
        or that got hardly any time for long, is replaced and its files tried once more.
        """
        limits, waited = self._decoding.limits, time.monotonic() - self._began
        used, stopped = _process_state(self.pid)
        remaining = limits.decode_seconds - (used - self._used)
        if remaining <= 0:
            reason = f"takes longer than {limits.decode_seconds:g} seconds to decode; make it smaller"
            self._end(Refused(413, reason), again=len(self.tasks) > 1)  # which of several was it?
        elif stopped or waited >= limits.decode_wall_seconds:
            busy = Refused(503, "the service is too busy to decode it; try again", retry_after=1)
            self._end(busy, again=True)
        else:
            wait = max(min(remaining, limits.decode_wall_seconds - waited), _CHECK_SECONDS)
            self._timer = self._decoder.loop.call_later(wait, self._check_usage)

    def _end(self, reason: Refused, again: bool = False) -> None:
        """End the process; its files are refused, or tried once more by another, one at a time."""
        self._decoder.loop.remove_reader(self.line)
        self.kill()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        self.line.close()
        tasks, self.tasks, started, self.ready = self.tasks, [], self.ready, False
        if self._timer is not None:
            self._timer.cancel()
        for task in tasks:
            self._decoder.release(task)
            if again:
                self._decoder.retry(task, reason)
            else:
                self._decoder.finish(task, reason)
        self._decoder.remove(self, started)


def _worker_lost() -> Refused:
    """The refusal of a file whose process ended twice: by the file, or by a system short of memory."""
    return Refused(503, "its decoder ended; try again, or save the image anew", retry_after=1)


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


def _process_state(pid: int) -> tuple[float, bool]:
    """Processor time of a process, infinite where the system does not say, and whether it was stopped."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] in "Tt"
    except (OSError, ValueError, IndexError):
        return float("inf"), False
