"""SHA-256 digests of text, JSON values, files and tensors: the same on every machine and in every version."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


def of_parts(*parts: bytes | str) -> bytes:
    """Digest of bytes and texts, one after the other; separate them where "ab", "c" must not equal "a", "bc".

    >>> of_parts("ab", b"c").hex()[:8]
    'ba7816bf'
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass"))
    return digest.digest()


def canonical(value: Any) -> str:
    """JSON text that is the same for equal values: sorted keys, no spaces, tuples as lists.

    >>> canonical({"b": (1, 2), "a": 0.5})
    '{"a":0.5,"b":[1,2]}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def of_json(value: Any) -> bytes:
    """Digest of plain values; equal values have equal digests.

    >>> of_json({"a": 1, "b": (2,)}) == of_json({"b": [2], "a": 1})
    True
    """
    return of_parts(canonical(value))


def of_file(path: str | os.PathLike[str]) -> bytes:
    """Digest of a file's content, read in parts.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def of_git_blob(path: str | os.PathLike[str]) -> bytes:
    """SHA-1 of a small file as git stores it: a header with the size before the content.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).digest()


def of_tensors(tensors: Mapping[str, Tensor], as_float32: bool = False) -> bytes:
    """Digest of names, shapes and values, in the order of the names.

    With `as_float32` the same numbers in another precision have the same digest; otherwise precision counts.
    Devices never do.
    """
    import torch  # here: digests are also used where PyTorch is not loaded

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if as_float32:
            digest.update(f"{name} {list(tensor.shape)}\n".encode())
            values = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
            digest.update(np.ascontiguousarray(values, dtype="<f4").reshape(-1).data)
        else:
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest.update(values.data)
    return digest.digest()
