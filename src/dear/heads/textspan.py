"""TEXTSPAN (Gandelsman et al. 2024): the phrases that span what a head writes, all heads at once.

For a head with contributions C [n, d] and unit text features T [m, d]: keep the part of T in the span of
C's top right singular vectors, center C, then repeat: pick the phrase whose projections C t vary most, and
remove its direction from C and from T.

Every step needs C's moments only. The singular vectors are the eigenvectors of C^T C; the variance of C t is
t^T S t with S the covariance; and once the direction of a pick is gone from T, all later phrases are
orthogonal to it, so removing it from C changes no later variance. With T S kept as well as T, a
pick costs O(m r) instead of O(n m): thousands of images cost no more than one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dear.errors import UsageError
from dear.heads.moments import Moments

RANK = 80  #: most singular vectors that are kept
_HEADS_AT_ONCE = 12  # bounds the memory: 2 · heads · phrases · rank float64 numbers


@dataclass(frozen=True)
class Spans:
    """The result of TEXTSPAN."""

    picks: Tensor  #: [..., N] row numbers of T, in order; -1 after a head's directions are exhausted
    explained: Tensor  #: [..., N] share of the head's variance along each pick's direction
    rank: Tensor  #: [...] singular vectors kept a head


def textspan(contributions: Tensor, text: Tensor, count: int = 20, rank: int = RANK) -> Spans:
    """TEXTSPAN on contributions in memory.

    Args:
        contributions: [n, ..., d], one row per image; the axes between are heads.
        text: [m, d] text features (of any length; they are made unit).
        count: phrases per head.
        rank: most singular vectors kept (r = min(rank, numerical rank)).

    Returns:
        Spans with leading axes `...`.

    >>> c = torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> textspan(c, torch.eye(2), count=2).picks
    tensor([0, 1])
    """
    n, d = contributions.shape[0], contributions.shape[-1]
    rows = contributions.reshape(n, -1, d).transpose(0, 1).double()  # [K, n, d]
    # [K, d, n] @ [K, n, d] and [K, d]
    spans = _solve(rows.transpose(1, 2) @ rows, rows.sum(1), None, n, text, count, rank)
    return _unflatten_heads(spans, contributions.shape[1:-1])


def textspan_moments(moments: Moments, text: Tensor, count: int = 20) -> Spans:
    """TEXTSPAN from running moments: `Spans` with leading axes [L, H]; arguments as `textspan`."""
    maps = moments.maps.double().flatten(0, 1)  # [K, d, E]
    # C = Z M, and M^T = Q R: the contributions live in the span of Q's columns, with coordinates Z R^T.
    basis, factor = torch.linalg.qr(maps.transpose(1, 2))  # [K, E, k], [K, k, d]
    # moments [L, H, ...] -> [K, ...], K = L*H
    square = factor @ moments.square.flatten(0, 1) @ factor.transpose(1, 2)
    total = (factor @ moments.total.flatten(0, 1)[..., None])[..., 0]
    spans = _solve(square, total, basis, moments.count, text, count, RANK)
    return _unflatten_heads(spans, moments.total.shape[:2])


def _solve(
    square: Tensor, total: Tensor, basis: Tensor | None, n: int, text: Tensor, count: int, rank: int
) -> Spans:
    """Run the picks for K heads with moments [K, k, k] and [K, k] in the coordinates of `basis` [K, d, k]."""
    if n < 2 or not len(text) or count < 1 or rank < 1:
        raise UsageError("TEXTSPAN needs at least two images, one phrase, and a positive count and rank")
    unit = torch.nn.functional.normalize(text.to(square), dim=-1)  # [m, d]
    parts = []
    for start in range(0, len(square), _HEADS_AT_ONCE):
        heads = slice(start, start + _HEADS_AT_ONCE)
        coordinates = unit.expand(len(square[heads]), -1, -1) if basis is None else unit @ basis[heads]
        parts.append(_picks(square[heads], total[heads], coordinates, n, text.shape[1], count, rank))
    return Spans(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _picks(
    square: Tensor, total: Tensor, text: Tensor, n: int, d: int, count: int, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Picks, explained shares and ranks of a few heads; text [K, m, k] in the moments' coordinates."""
    mean = total / n
    covariance = square / n - mean[:, :, None] * mean[:, None, :]  # [K, k, k]
    values, vectors = torch.linalg.eigh(square)  # ascending
    singular = values.clamp(min=0).sqrt().flip(-1)[:, :rank]  # [K, r]
    # numpy's matrix_rank tolerance for contributions computed in float32.
    tolerance = singular[:, :1] * max(n, d) * torch.finfo(torch.float32).eps  # [K, 1]
    keep = singular > tolerance
    axes = vectors.flip(-1)[:, :, :rank] * keep[:, None, :]  # V, zero columns beyond the numerical rank
    T = text @ axes  # [K, m, r]
    TS = T @ (axes.transpose(1, 2) @ covariance @ axes)  # [K, m, r]
    total_variance = covariance.diagonal(dim1=1, dim2=2).sum(-1)  # [K]
    heads = torch.arange(len(square), device=square.device)
    picks, explained = [], []
    alive = torch.ones_like(heads, dtype=torch.bool)
    for _ in range(count):
        variance = (T * TS).sum(-1)  # [K, m]: variance of C t over the images
        best, pick = variance.max(dim=1)
        # Below the tolerance only rounding remains to be described.
        alive = alive & (best.clamp(min=0) * n).sqrt().gt(tolerance[:, 0])
        t, ts = T[heads, pick], TS[heads, pick]  # [K, r]
        length = (t * t).sum(-1, keepdim=True).clamp(min=torch.finfo(T.dtype).tiny)  # t is not unit any more
        share = (T @ t[..., None]) / length[..., None]  # [K, m, 1]
        T = T - share * t[:, None]
        TS = TS - share * ts[:, None]
        picks.append(torch.where(alive, pick, -1))
        explained.append(torch.where(alive, best / length[:, 0] / total_variance.clamp(min=1e-300), 0.0))
    return torch.stack(picks, 1), torch.stack(explained, 1), keep.sum(1)


def _unflatten_heads(spans: Spans, shape: torch.Size) -> Spans:
    """Restore the shape of the flat head axis."""
    return Spans(
        # [K, N] -> [L, H, N] or the axes of the contributions
        spans.picks.reshape(*shape, -1),
        spans.explained.reshape(*shape, -1),
        spans.rank.reshape(shape),
    )
