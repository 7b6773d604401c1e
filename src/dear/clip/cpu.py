"""Matrix products on a CPU: which library computes them, and in which precision they are fast.

PyTorch computes float32 products by MKL, which uses AVX-512 on Intel's processors only. oneDNN, which comes
with PyTorch, uses it on all: on an AMD EPYC, features of images take half the time. Results differ by
rounding. Products that need a gradient stay with MKL.

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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """X W^T + b on any device: [..., inputs] -> [..., outputs]."""
    if not _is_for_onednn(x, weight):
        return F.linear(x, weight, bias)
    bias = None if bias is None else bias.contiguous()  # oneDNN ignores strides
    return F.linear(x.to_mkldnn(), weight, bias).to_dense()


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()  # exported models use standard operations
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
