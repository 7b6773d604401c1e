"""Matrix products on a CPU: which library computes them, and in which precision they are fast.

PyTorch computes float32 products by MKL, which uses AVX-512 on Intel's processors only. oneDNN, which comes
with PyTorch, uses it on all: on an AMD EPYC, features of images take 0.5 to 0.7 of the time. Results differ
by rounding. Products that need a gradient stay with MKL.

The environment variable `DEAR_KERNELS=0` turns this off, as it does for kernels on a GPU.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dear.utils.memory import reuse_freed_memory

_MIN_WORK = 1 << 22  # multiplications of a product; smaller ones gain less than the conversions cost
_MAX_ROWS = 2048  # of a product by oneDNN


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product x W^T + b on any device: [..., inputs] -> [..., outputs]."""
    if not _is_for_onednn(x, weight):
        return F.linear(x, weight, bias)
    bias = None if bias is None else bias.contiguous()  # oneDNN ignores strides
    rows = x.reshape(-1, x.shape[-1])
    parts = [_linear_by_onednn(part, weight, bias) for part in rows.split(_MAX_ROWS)]
    product = parts[0] if len(parts) == 1 else torch.cat(parts)
    return product.view(*x.shape[:-1], len(weight))


def _linear_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same for rows [n, inputs], at most `_MAX_ROWS`."""
    count = len(x)
    padding = _padded(count) - count
    if padding:
        x = F.pad(x, (0, 0, 0, padding))
    return F.linear(x.to_mkldnn(), weight, bias).to_dense()[:count]


def _padded(rows: int) -> int:
    """The next number of rows with a product: oneDNN keeps half a megabyte for each that it has seen.

    >>> [_padded(rows) for rows in (1, 65, 197, 1025)]
    [8, 72, 208, 1152]
    """
    step = 1 << max(3, (rows - 1).bit_length() - 4) if rows else 1
    return -(-rows // step) * step


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
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
