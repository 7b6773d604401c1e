"""Triton kernels for softmax attention under masks.

PyTorch's fast attention takes no mask, and the one that does is slow on current GPUs.

- `attend`, `attend_backward`: under an additive mask per head and a causal rule, for all or some query rows;
- `join_tokens`: without gradients, from PyTorch's fast attention on the originals alone.

No kernel uses atomics: results repeat to the bit. `input_precision` changes nothing in 16 bits; in float32,
where the kernels are only tested, it keeps the GPU from rounding to TF32. Only `dear.clip.gpu.attention`
uses this module.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_HIDDEN = tl.constexpr(-1.0e30)  # a score that exp sends to 0; -inf makes NaN where all of a block is hidden


@triton.jit
def _scores(
    q, k, mask, positions, keys, keys_count, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Scores [BM, BN] in units of log 2 (exp2 is the fast one) of queries [BM, BD] and keys [BN, BD].

    `positions` [BM] and `keys` [BN] are their positions. Without CHECK, all pairs are visible.
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * _LOG2E)
    if CHECK:
        visible = (keys[None, :] < keys_count) & (positions[:, None] >= 0)
        if CAUSAL:
            visible = visible & (keys[None, :] <= positions[:, None])
        if MASK:
            at = mask + positions[:, None].to(tl.int64) * keys_count + keys[None, :]
            s += tl.maximum(tl.load(at, mask=visible, other=0.0).to(tl.float32), _HIDDEN) * _LOG2E
        s = tl.where(visible, s, _HIDDEN)
    return s


@triton.jit
def _rows(x, at, stride, count, dims, WIDTH: tl.constexpr, CHECK: tl.constexpr):
    """Rows `at` of a head: [rows, BD]."""
    here = x + at[:, None] * stride + dims[None, :]
    if CHECK:
        return tl.load(here, mask=(at[:, None] < count) & (dims[None, :] < WIDTH), other=0.0)
    return tl.load(here)


@triton.jit
def _positions(rows, row_stride, batch, at, queries, ROWS: tl.constexpr):
    """Positions of queries `at` in the sequence; -1 beyond the last."""
    if ROWS:
        return tl.load(rows + batch * row_stride + at, mask=at < queries, other=-1).to(tl.int32)
    return tl.where(at < queries, at, -1)


@triton.jit
def _unchecked_rows(
    end, unmasked, size: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr
):
    """Number of rows of the other side that need no check: the first `unmasked` tokens all see each other."""
    if ROWS or CAUSAL or not EVEN:
        return 0
    else:  # compiled: only one branch exists
        return tl.where(end <= unmasked, unmasked // size * size, 0)


@triton.jit
def _add_keys(
    query, k, v, mask, positions, start, kv_row, keys_count, scale, largest, total, result, dims,
    WIDTH: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, CHECK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to the running softmax."""
    keys = start + tl.arange(0, SIZE)
    key = _rows(k, keys, kv_row, keys_count, dims, WIDTH, CHECK)
    s = _scores(query, key, mask, positions, keys, keys_count, scale, MASK, CAUSAL, CHECK)
    new = tl.maximum(largest, tl.max(s, 1))
    p = tl.exp2(s - new[:, None])
    shrink = tl.exp2(largest - new)
    value = _rows(v, keys, kv_row, keys_count, dims, WIDTH, CHECK)
    total = total * shrink + tl.sum(p, 1)
    result = result * shrink[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
    return new, total, result


@triton.jit
def attend(
    q, k, v,  # [B, queries or keys, H, d]; the last axis is dense
    mask,  # [H or 1, N, N]
    rows,  # [B or 1, queries]
    out,  # [B, queries, H, d], dense
    norm,  # [B, H, queries], log2 of the softmax's sum
    q_batch, q_row, kv_batch, kv_row, mask_head, row_stride,
    queries, keys_count, scale, heads,
    unmasked,  # number of leading tokens that are all visible to each other
    WIDTH: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head."""
    blocks = tl.cdiv(queries, BM)
    block, sequence = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch = (sequence // heads).to(tl.int64)
    head = sequence % heads
    at = block * BM + tl.arange(0, BM)
    dims = tl.arange(0, BD)
    positions = _positions(rows, row_stride, batch, at, queries, ROWS)
    query = _rows(q + batch * q_batch + head * WIDTH, at, q_row, queries, dims, WIDTH, True)
    largest = tl.full([BM], _HIDDEN, tl.float32)
    total = tl.zeros([BM], tl.float32)
    result = tl.zeros([BM, BD], tl.float32)
    k += batch * kv_batch + head * WIDTH
    v += batch * kv_batch + head * WIDTH
    mask += head * mask_head
    unchecked = _unchecked_rows(block * BM + BM, unmasked, BN, ROWS, CAUSAL, WIDTH == BD)
    for start in range(0, unchecked, BN):
        largest, total, result = _add_keys(
            query, k, v, mask, positions, start, kv_row, keys_count, scale, largest, total, result, dims,
            WIDTH, MASK, CAUSAL, False, BN,
        )  # fmt: skip
    for start in range(unchecked, keys_count, TAIL):
        largest, total, result = _add_keys(
            query, k, v, mask, positions, start, kv_row, keys_count, scale, largest, total, result, dims,
            WIDTH, MASK, CAUSAL, True, TAIL,
        )  # fmt: skip
    result = result / total[:, None]
    dense = heads * WIDTH
    inside = (at[:, None] < queries) & (dims[None, :] < WIDTH)
    target = out + batch * queries * dense + head * WIDTH + at[:, None] * dense + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)
    tl.store(norm + sequence.to(tl.int64) * queries + at, largest + tl.log2(total), mask=at < queries)


@triton.jit
def join_tokens(
    q, k, v,  # [B, N, H, d]
    mask,  # [H or 1, N, N], the same for all originals
    part,  # [B, H, N, d], attention on the originals alone, unmasked
    norm,  # [B, H, N], natural logarithm of its softmax's sum
    out,  # [B, N, H, d], dense
    batch_stride, row_stride, mask_head, part_batch, part_head, part_row,
    originals, count, scale, heads,
    WIDTH: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Attention on all tokens from that on the originals: a block of queries of one head."""
    blocks = tl.cdiv(count, BM)
    block, sequence = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch = (sequence // heads).to(tl.int64)
    head = (sequence % heads).to(tl.int64)
    at = block * BM + tl.arange(0, BM)
    keys = originals + tl.arange(0, BT)
    dims = tl.arange(0, BD)
    positions = tl.where(at < count, at, -1)
    here = batch * batch_stride + head * WIDTH
    query = _rows(q + here, at, row_stride, count, dims, WIDTH, True)
    key = _rows(k + here, keys, row_stride, count, dims, WIDTH, True)
    value = _rows(v + here, keys, row_stride, count, dims, WIDTH, True)
    mask += head * mask_head
    s = _scores(query, key, mask, positions, keys, count, scale, True, False, True)
    old = tl.load(norm + sequence.to(tl.int64) * count + at, mask=at < count, other=0.0)
    original_mask = tl.load(mask + at.to(tl.int64) * count, mask=at < count, other=0.0).to(tl.float32)
    old = old * _LOG2E + tl.maximum(original_mask, _HIDDEN)
    largest = tl.maximum(old, tl.max(s, 1))
    p = tl.exp2(s - largest[:, None])
    weight = tl.exp2(old - largest)
    first = _rows(part + batch * part_batch + head * part_head, at, part_row, count, dims, WIDTH, True)
    result = weight[:, None] * first.to(tl.float32) + tl.dot(p.to(value.dtype), value, input_precision="ieee")
    result = result / (weight + tl.sum(p, 1))[:, None]
    dense = heads * WIDTH
    inside = (at[:, None] < count) & (dims[None, :] < WIDTH)
    target = out + batch * count * dense + head * WIDTH + at[:, None] * dense + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_key_gradients(
    q, key, value, mask, rows, out, norm, d_out, keys, start, q_row, row_stride, dense, batch,
    queries, keys_count, scale, grad_key, grad_value, dims,
    WIDTH: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr,
    CHECK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Add the contribution of a block of queries to the gradients of a block of keys."""
    at = start + tl.arange(0, SIZE)
    positions = _positions(rows, row_stride, batch, at, queries, ROWS)
    query = _rows(q, at, q_row, queries, dims, WIDTH, CHECK)
    s = _scores(query, key, mask, positions, keys, keys_count, scale, MASK, CAUSAL, CHECK)
    p = tl.exp2(s - tl.load(norm + at, mask=at < queries, other=0.0)[:, None])
    if CHECK:
        p = tl.where(at[:, None] < queries, p, 0.0)
    grad_out = _rows(d_out, at, dense, queries, dims, WIDTH, CHECK)
    result = _rows(out, at, dense, queries, dims, WIDTH, CHECK)
    mean = tl.sum(grad_out.to(tl.float32) * result.to(tl.float32), 1)
    grad_value += tl.dot(tl.trans(p.to(grad_out.dtype)), grad_out, input_precision="ieee")
    ds = p * (tl.dot(grad_out, tl.trans(value), input_precision="ieee") - mean[:, None])
    grad_key += tl.dot(tl.trans(ds.to(query.dtype)), query, input_precision="ieee")
    return grad_key, grad_value


@triton.jit
def _key_gradients(
    q, k, v, mask, rows, out, norm, d_out, d_k, d_v, q_row, kv_row, row_stride, dense, batch, block,
    queries, keys_count, scale, unmasked,
    WIDTH: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """d_k and d_v of a block of keys; all pointers are at the batch and head."""
    dims = tl.arange(0, BD)
    keys = block * BN + tl.arange(0, BN)
    key = _rows(k, keys, kv_row, keys_count, dims, WIDTH, True)
    value = _rows(v, keys, kv_row, keys_count, dims, WIDTH, True)
    grad_key = tl.zeros([BN, BD], tl.float32)
    grad_value = tl.zeros([BN, BD], tl.float32)
    unchecked = _unchecked_rows(block * BN + BN, unmasked, BM, ROWS, CAUSAL, WIDTH == BD)
    for start in range(0, unchecked, BM):
        grad_key, grad_value = _add_key_gradients(
            q, key, value, mask, rows, out, norm, d_out, keys, start, q_row, row_stride, dense, batch,
            queries, keys_count, scale, grad_key, grad_value, dims, WIDTH, MASK, ROWS, CAUSAL, False, BM,
        )  # fmt: skip
    for start in range(unchecked, queries, TAIL):
        grad_key, grad_value = _add_key_gradients(
            q, key, value, mask, rows, out, norm, d_out, keys, start, q_row, row_stride, dense, batch,
            queries, keys_count, scale, grad_key, grad_value, dims, WIDTH, MASK, ROWS, CAUSAL, True, TAIL,
        )  # fmt: skip
    inside = (keys[:, None] < keys_count) & (dims[None, :] < WIDTH)
    target = keys[:, None] * kv_row + dims[None, :]
    tl.store(d_k + target, (grad_key * scale).to(d_k.dtype.element_ty), mask=inside)
    tl.store(d_v + target, grad_value.to(d_v.dtype.element_ty), mask=inside)


@triton.jit
def _add_query_gradients(
    query, k, v, mask, positions, log_sum, grad_out, mean, start, kv_row, keys_count, scale, grad_query, dims,
    WIDTH: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, CHECK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Add the contribution of a block of keys to the gradient of a block of queries."""
    keys = start + tl.arange(0, SIZE)
    key = _rows(k, keys, kv_row, keys_count, dims, WIDTH, CHECK)
    value = _rows(v, keys, kv_row, keys_count, dims, WIDTH, CHECK)
    s = _scores(query, key, mask, positions, keys, keys_count, scale, MASK, CAUSAL, CHECK)
    p = tl.exp2(s - log_sum[:, None])
    ds = p * (tl.dot(grad_out, tl.trans(value), input_precision="ieee") - mean[:, None])
    return grad_query + tl.dot(ds.to(key.dtype), key, input_precision="ieee")


@triton.jit
def _query_gradients(
    q, k, v, mask, rows, out, norm, d_out, d_q, q_row, kv_row, row_stride, dense, batch, block,
    queries, keys_count, scale, unmasked,
    WIDTH: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """d_q of a block of queries; all pointers are at the batch and head."""
    dims = tl.arange(0, BD)
    at = block * BM + tl.arange(0, BM)
    positions = _positions(rows, row_stride, batch, at, queries, ROWS)
    query = _rows(q, at, q_row, queries, dims, WIDTH, True)
    log_sum = tl.load(norm + at, mask=at < queries, other=0.0)
    grad_out = _rows(d_out, at, dense, queries, dims, WIDTH, True)
    result = _rows(out, at, dense, queries, dims, WIDTH, True)
    mean = tl.sum(grad_out.to(tl.float32) * result.to(tl.float32), 1)
    grad_query = tl.zeros([BM, BD], tl.float32)
    unchecked = _unchecked_rows(block * BM + BM, unmasked, BN, ROWS, CAUSAL, WIDTH == BD)
    for start in range(0, unchecked, BN):
        grad_query = _add_query_gradients(
            query, k, v, mask, positions, log_sum, grad_out, mean, start, kv_row, keys_count, scale,
            grad_query, dims, WIDTH, MASK, CAUSAL, False, BN,
        )  # fmt: skip
    for start in range(unchecked, keys_count, TAIL):
        grad_query = _add_query_gradients(
            query, k, v, mask, positions, log_sum, grad_out, mean, start, kv_row, keys_count, scale,
            grad_query, dims, WIDTH, MASK, CAUSAL, True, TAIL,
        )  # fmt: skip
    inside = (at[:, None] < queries) & (dims[None, :] < WIDTH)
    tl.store(
        d_q + at[:, None] * q_row + dims[None, :], (grad_query * scale).to(d_q.dtype.element_ty), mask=inside
    )


@triton.jit
def attend_backward(
    q, k, v, mask, rows, out, norm,
    d_out,  # as out
    d_q, d_k, d_v,  # laid out as q, k and v
    q_batch, q_row, kv_batch, kv_row, mask_head, row_stride,
    queries, keys_count, scale, heads, unmasked, key_blocks,
    WIDTH: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TAIL: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Programs below `key_blocks` compute d_k and d_v of a block of keys, the others d_q of queries."""
    blocks = key_blocks + tl.cdiv(queries, BM)
    block, sequence = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch = (sequence // heads).to(tl.int64)
    head = sequence % heads
    dense = heads * WIDTH
    at_q = batch * q_batch + head * WIDTH
    at_kv = batch * kv_batch + head * WIDTH
    at_out = batch * queries * dense + head * WIDTH
    at_norm = sequence.to(tl.int64) * queries
    if block < key_blocks:
        _key_gradients(
            q + at_q, k + at_kv, v + at_kv, mask + head * mask_head, rows, out + at_out, norm + at_norm,
            d_out + at_out, d_k + at_kv, d_v + at_kv, q_row, kv_row, row_stride, dense, batch,
            block, queries, keys_count, scale, unmasked, WIDTH, MASK, ROWS, CAUSAL,
            BM, BN, BM if BM < TAIL else TAIL, BD,
        )  # fmt: skip
    else:
        _query_gradients(
            q + at_q, k + at_kv, v + at_kv, mask + head * mask_head, rows, out + at_out, norm + at_norm,
            d_out + at_out, d_q + at_q, q_row, kv_row, row_stride, dense, batch,
            block - key_blocks, queries, keys_count, scale, unmasked, WIDTH, MASK, ROWS, CAUSAL,
            BM, BN, TAIL, BD,
        )  # fmt: skip
