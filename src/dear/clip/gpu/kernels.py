"""Triton kernels for everything between the matrix products of a layer.

On a GPU a layer's matrix products are fast; adding to the residual stream, norming, casting and the
activation, each a pass over memory in PyTorch, take as long as the products. Here each is one kernel forward
and one backward:

- `add_norm`: new residual = old + change (extra tokens mixed in on the way), and its layer norm in 16 bits;
- `activate`: QuickGELU, GELU or tanh-GELU.

Weights are frozen, so no kernel computes a gradient for one. None uses atomics: results repeat to the bit.
Only `dear.clip.gpu.tower` uses this module; it is imported where Triton is.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def add_norm(
    x,  # [rows, width], the residual stream
    change,  # [rows, width], added to it
    tokens,  # [count, width] or [B, count, width], mixed into rows first .. first + count - 1 of a sequence
    weight,
    bias,
    new,  # [rows, width], the new residual stream
    normed,  # [rows, width], its layer norm
    length,
    first,
    count,
    token_stride,
    token_weight,
    eps,
    width,
    CHANGE: tl.constexpr,
    TOKENS: tl.constexpr,
    INSERT: tl.constexpr,  # x and change do not contain the tokens' rows yet
    BLOCK: tl.constexpr,
):
    """A row of the stream: add, mix in tokens, store, norm."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    place = row % length - first
    extra = (place >= 0) & (place < count)
    source, valid = row, inside
    if INSERT:
        source = row - (row // length) * count - tl.where(place >= count, count, 0)
        valid = columns < tl.where(extra, 0, width)
    value = tl.load(x + source * width + columns, mask=valid, other=0.0).to(tl.float32)
    if CHANGE:
        value += tl.load(change + source * width + columns, mask=valid, other=0.0).to(tl.float32)
    if TOKENS:
        at = tokens + (row // length) * token_stride + place * width
        raw = tl.load(at + columns, mask=columns < tl.where(extra, width, 0), other=0.0).to(tl.float32)
        value = tl.where(extra, token_weight * raw + (1.0 - token_weight) * value, value)  # eq. 5 and 6
    if CHANGE or TOKENS:
        tl.store(new + row * width + columns, value.to(new.dtype.element_ty), mask=inside)
    mean = tl.sum(value, 0) / width
    centered = tl.where(inside, value - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centered * centered, 0) / width + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    result = centered * scale * gain + shift
    tl.store(normed + row * width + columns, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def add_norm_backward(
    new,
    weight,
    d_new,  # gradient of the new residual stream
    d_normed,  # gradient of its norm
    d_x,
    d_change,
    d_tokens,  # [B, count, width]
    length,
    first,
    count,
    token_weight,
    eps,
    width,
    RESIDUAL: tl.constexpr,  # the new residual stream has a gradient, d_new
    CHANGE: tl.constexpr,
    TOKENS: tl.constexpr,
    INSERT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of `add_norm`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(new + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / width
    centered = tl.where(inside, value - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centered * centered, 0) / width + eps)
    hat = centered * scale
    grad = tl.load(d_normed + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    grad *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    along = tl.sum(grad * hat, 0) / width
    mean_grad = tl.sum(grad, 0) / width
    result = (grad - mean_grad - hat * along) * scale
    if RESIDUAL:
        result += tl.load(d_new + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    place = row % length - first
    extra = (place >= 0) & (place < count)
    source, valid = row, inside
    if INSERT:
        source = row - (row // length) * count - tl.where(place >= count, count, 0)
        valid = columns < tl.where(extra, 0, width)
    if TOKENS:
        at = d_tokens + ((row // length) * count + place) * width
        value = (token_weight * result).to(d_tokens.dtype.element_ty)
        tl.store(at + columns, value, mask=columns < tl.where(extra, width, 0))
        result = tl.where(extra, (1.0 - token_weight) * result, result)
    tl.store(d_x + source * width + columns, result.to(d_x.dtype.element_ty), mask=valid)
    if CHANGE:
        tl.store(d_change + source * width + columns, result.to(d_change.dtype.element_ty), mask=valid)


@triton.jit
def activate(x, y, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """QuickGELU (KIND 0), GELU (1) or its tanh approximation (2)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    if KIND == 0:
        result = value / (1.0 + tl.exp2(value * (-1.702 * _LOG2E)))
    elif KIND == 1:
        result = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    else:  # 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
        inner = value * (1.0 + 0.044715 * value * value)
        result = value / (1.0 + tl.exp2(inner * (-1.5957691216057308 * _LOG2E)))
    tl.store(y + at, result.to(y.dtype.element_ty), mask=at < size)


@triton.jit
def activate_backward(x, dy, dx, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Gradient of `activate`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    if KIND == 0:
        gate = 1.0 / (1.0 + tl.exp2(value * (-1.702 * _LOG2E)))
        grad = gate * (1.0 + 1.702 * value * (1.0 - gate))
    elif KIND == 1:
        density = 0.3989422804014327 * tl.exp2(value * value * (-0.5 * _LOG2E))
        grad = 0.5 * (1.0 + tl.erf(value * 0.7071067811865476)) + value * density
    else:
        square = value * value
        inner = value * (1.0 + 0.044715 * square)
        gate = 1.0 / (1.0 + tl.exp2(inner * (-1.5957691216057308 * _LOG2E)))
        grad = gate * (1.0 + (1.0 - gate) * 1.5957691216057308 * value * (1.0 + 0.134145 * square))
    result = grad * tl.load(dy + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(dx + at, result.to(dx.dtype.element_ty), mask=at < size)
