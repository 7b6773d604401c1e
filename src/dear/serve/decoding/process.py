"""The process that decodes: forked from a template with the decoders loaded, limited in memory.

Files and pixels are in memory that it shares with the service; the line between them carries a few bytes for
each. Nothing that it sends is used but a status, a length and its processor time.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import struct
import time

import msgspec

from dear.images.views import side_of
from dear.serve.decoding.pixels import Decoding
from dear.serve.errors import Refused

MOST_AT_ONCE = 4  #: files that a process gets at once
MOST_SENTENCE = 4000  #: bytes of a refusal
COUNT = struct.Struct("<H")  #: number of files in a request
REQUEST = struct.Struct("<IQ")  #: of each file: its length, pixels that it may have
REPLY = struct.Struct("<Hd")  #: number of results, processor time so far
RESULT = struct.Struct("<HI")  #: of each file: status (0: pixels), length of the answer
PID = struct.Struct("<I")  #: what the template sends on a new process's line


def answer_offset(decoding: Decoding) -> int:
    """Where the answers begin in the shared memory; before them lie the files."""
    return -(-decoding.limits.body_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def answer_size(decoding: Decoding) -> int:
    """Bytes between the answer of one file and that of the next."""
    return max(3 * side_of(decoding.size) ** 2, MOST_SENTENCE)


def shared_bytes(decoding: Decoding) -> int:
    """Bytes of the shared memory; taken from the system only as far as they are used."""
    return answer_offset(decoding) + MOST_AT_ONCE * answer_size(decoding)


def template() -> None:
    """Fork a decoding process whenever the socket at standard input asks for one; started by `Template`."""
    import torch  # resizes images: the same pixels as elsewhere in the library

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which drains
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no exit status is read
    line = socket.socket(fileno=os.dup(0))
    while True:
        message, descriptors, _, _ = socket.recv_fds(line, 1, 2)
        if not message:
            return
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            line.close()
            os.close(writer)
            os.read(reader, 1)  # until the line has its number
            try:
                work(*descriptors)
            finally:
                os._exit(0)
        with contextlib.suppress(OSError):  # the service has ended
            os.write(descriptors[0], PID.pack(pid))
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def work(descriptor: int, memory_descriptor: int) -> None:
    """Decode files in shared memory, as a line asks for, until it ends."""
    _end_with_parent()
    with socket.socket(fileno=descriptor) as line, contextlib.suppress(OSError, msgspec.DecodeError):
        length, _ = REQUEST.unpack(_receive(line, REQUEST.size))
        decoding = msgspec.msgpack.decode(_receive(line, length), type=Decoding)
        start, size = answer_offset(decoding), answer_size(decoding)
        memory = mmap.mmap(memory_descriptor, shared_bytes(decoding))
        _limit_memory(decoding.limits.decode_bytes)
        line.sendall(REPLY.pack(0, time.process_time()))  # ready
        while True:
            (count,) = COUNT.unpack(_receive(line, COUNT.size))
            requests = list(REQUEST.iter_unpack(_receive(line, count * REQUEST.size)))
            offset, results = 0, []
            for number, (length, most_pixels) in enumerate(requests):
                try:
                    status, answer = 0, decoding.pixels(memory[offset : offset + length], most_pixels)
                except Refused as error:
                    status, answer = error.http_status, str(error).encode()[:MOST_SENTENCE]
                reply = start + number * size
                memory[reply : reply + len(answer)] = answer
                offset += length
                results.append(RESULT.pack(status, len(answer)))
            line.sendall(REPLY.pack(count, time.process_time()) + b"".join(results))


def _receive(line: socket.socket, length: int) -> bytes:
    """Exactly `length` bytes of a line."""
    data = line.recv(length, socket.MSG_WAITALL)
    if len(data) < length:
        raise ConnectionError("the line has ended")
    return data


def _end_with_parent() -> None:
    """Have this process killed when the one that forked it ends (Linux)."""
    with contextlib.suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _limit_memory(more: int) -> None:
    """Let this process use `more` bytes than it uses now."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))
    except (ImportError, OSError, ValueError):  # not on every system
        pass
