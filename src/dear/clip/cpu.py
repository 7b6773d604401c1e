"""Products with frozen weights on a CPU: oneDNN's float32 kernels, with the activation in the same pass.

PyTorch gives float32 products to MKL, which multiplies more slowly on processors that are not Intel's, and
goes through the widest activations of a layer once more (for QuickGELU three times). oneDNN comes with
PyTorch and takes the weights as they lie in memory: no copy is kept that could go stale. Its
operations have no gradient, so they are used where none is recorded; sums differ from MKL's by rounding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from dear.utils.memory import KEPT, keep_freed

_QUICK = 1.702  # QuickGELU(x) = x sigmoid(1.702 x) = swish(1.702 x) / 1.702
_FUSED: dict[str, tuple[str, str]] = {  # oneDNN's names: operation, kind
    "none": ("none", ""),
    "swish": ("swish", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
}


def usable(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` and `mlp` can take x and a weight here and now."""
    return (
        not torch.is_grad_enabled()
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and torch._C._get_mkldnn_enabled()
        # Compilers, exporters and counters of operations need PyTorch's operations.
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and _operation() is not None
    )


@cache
def _operation() -> Any:
    """The product with an activation in oneDNN; None where that is missing, or not made for the processor."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    try:
        product = torch.ops.mkldnn._linear_pointwise.default
    except AttributeError:
        return None
    keep_freed()
    return product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none") -> Tensor:
    """activation(x W^T + b): [..., inputs] -> [..., outputs]; see `usable`."""
    operation, kind = _FUSED[activation]
    bias = None if bias is None else bias.contiguous()  # oneDNN would read past the strides of another one
    out: Tensor = _operation()(x, weight, bias, operation, [], kind)
    return out


def mlp(x: Tensor, up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor], activation: str) -> Tensor:
    """activation(x U^T + u) D^T + d of weights and biases: [..., width] -> [..., width]; see `usable`.

    Rows go in parts whose hidden activations are kept memory when they are freed.
    """
    limit = max(1, KEPT // (4 * len(up[0])))
    if x.numel() // x.shape[-1] > limit:
        parts = [mlp(rows, up, down, activation) for rows in x.reshape(-1, x.shape[-1]).split(limit)]
        return torch.cat(parts).view(x.shape)
    if activation != "quick_gelu":
        return linear(linear(x, *up, activation), *down)
    # The factor and its inverse are on the narrow sides of the two products.
    hidden = linear(_QUICK * x, up[0], _QUICK * up[1], "swish")
    return linear(hidden, down[0], _QUICK * down[1]).mul_(1 / _QUICK)
