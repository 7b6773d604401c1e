"""Matrix products on a CPU: which library computes them, and in which precision they are fast.

PyTorch computes float32 products by MKL, which uses AVX-512 on Intel's processors only. oneDNN, which comes
with PyTorch, uses it on all: on an AMD EPYC, features of 16 images take 0.5 to 0.6 of the time. Results
differ by rounding. Products that need a gradient stay with MKL.

The environment variable `DEAR_KERNELS=0` turns this off, as it does for kernels on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.utils.memory import reuse_freed_memory

_MIN_WORK = 1 << 22  # multiplications of a product; smaller ones gain less than the conversions cost
_MAX_VALUES = 3 << 20  # of a result by oneDNN: it stays in the cache for the next layer
_MAX_EXACT = 32  # numbers of rows that a process computes as they are
_exact: set[int] = set()  # these numbers

Layer = tuple[Tensor, Tensor | None]  #: weight [outputs, inputs] and bias [outputs]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product x W^T + b on any device: [..., inputs] -> [..., outputs]."""
    if uses_onednn(x, weight):
        return _by_onednn(x, (weight, bias))
    return F.linear(x, weight, bias)


def mlp_by_onednn(x: Tensor, up: Layer, activation: Callable[[Tensor], Tensor], down: Layer) -> Tensor:
    """Two layers around QuickGELU or GELU without converting what is between them, where `uses_onednn`."""
    return _by_onednn(x, up, activation, down)


def _by_onednn(x: Tensor, *steps: Layer | Callable[[Tensor], Tensor]) -> Tensor:
    """Layers and activations one after the other, in equal parts of at most `_MAX_VALUES` values."""
    rows = x.reshape(-1, x.shape[-1])
    widest = max(len(step[0]) for step in steps if not callable(step))
    count = -(-len(rows) * widest // _MAX_VALUES)
    parts = []
    for part in rows.split(-(-len(rows) // count)):
        padding = _padded(len(part)) - len(part)
        y = (F.pad(part, (0, 0, 0, padding)) if padding else part).to_mkldnn()
        for step in steps:
            y = step(y) if callable(step) else F.linear(y, step[0], _dense(step[1]))
        parts.append(y.to_dense()[: len(part)])
    product = parts[0] if len(parts) == 1 else torch.cat(parts)
    return product.view(*x.shape[:-1], product.shape[-1])


def _dense(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()  # oneDNN ignores strides


def _padded(rows: int) -> int:
    """The number of rows to compute: the first few numbers of a process as they are, others rounded up.

    oneDNN keeps half a megabyte for each number that it has seen. From 8 rows on, the product of a row had
    the same bits with every number of rows that was tried.
    """
    if rows in _exact:
        return rows
    if rows >= 8 and len(_exact) < _MAX_EXACT:
        _exact.add(rows)
        return rows
    return _rounded(rows)


def _rounded(rows: int) -> int:
    """The next of 56 numbers up to 4,096.

    >>> [_rounded(rows) for rows in (1, 65, 197, 1025)]
    [8, 72, 208, 1152]
    """
    step = 1 << max(3, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN computes x W^T: on a CPU, in float32, without gradient, if that is faster."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()  # exported models use standard operations
        and x.numel() * len(weight) >= _MIN_WORK
        and _onednn_is_faster()
        and os.environ.get("DEAR_KERNELS") != "0"
    )


@cache
def _onednn_is_faster() -> bool:
    capabilities = _capabilities()
    faster = (
        capabilities.get("avx512_f", False)
        and "intel" not in str(capabilities.get("cpu_name", "intel")).lower()
        and torch.backends.mkldnn.is_available()
    )
    if faster:
        reuse_freed_memory()  # converting x and the result allocates two more blocks
    return faster


def fast_bfloat16(device: torch.device) -> bool:
    """Whether a CPU has bfloat16 matrix products in hardware (AVX-512 BF16, AMX): faster than float32."""
    capabilities = _capabilities()
    return device.type == "cpu" and (
        capabilities.get("avx512_bf16", False) or capabilities.get("amx_bf16", False)
    )


def _capabilities() -> dict[str, Any]:
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # PyTorch 2.11 has it
    return capabilities
