"""Removing a concept from the image feature: by heads, by words, by examples, or several of them together.

Notation of the method page, section 4: f the feature, c_h the contribution of head h, S_q the heads with role
q, T_q the unit text features of the concept's values, B_q an orthonormal basis of the centered T_q.

- by heads:    f' = f + sum over h in S_q of (mean c_h - c_h), the mean over the training images;
- by words:    f' = f - (f - mean f) B_q^T B_q;
- by examples: the same with B_q from the mean features of example images per value, or LEACE (Belrose et al.
  2023): the smallest change after which no linear classifier can distinguish the values of the examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dear.clip.correction import Correction
from dear.errors import UsageError
from dear.heads.collect import HeadContributions
from dear.heads.names import Head

_TINY = 1e-4  # directions shorter than this fraction of the longest are rounding errors


@dataclass(frozen=True, eq=False)
class Removal:
    """A removal: `g = f + sum (means - c_h)`, then `f' = g - (g - center) removed`."""

    concepts: tuple[str, ...]  #: names of the removed concepts
    #: "heads", "words", "examples" or "leace", in the order in which removals were combined
    ways: tuple[str, ...]
    center: Tensor  #: mean feature of the training images, [E]
    removed: Tensor  #: [E, E], the projection on the removed directions; zero if only heads are removed
    heads: tuple[Head, ...] = ()  #: (layer, head) pairs whose contribution is replaced by its mean
    means: Tensor | None = None  #: [len(heads), E], mean contribution of each over the training images
    rank: int = 0  #: number of removed directions

    @property
    def title(self) -> str:
        """Short description, such as "Location by words (11 directions)"."""
        parts = []
        if self.heads:
            parts.append(f"{len(self.heads)} heads")
        if self.rank:
            parts.append(f"{self.rank} directions")
        return f"{', '.join(self.concepts)} by {' and '.join(dict.fromkeys(self.ways))} ({', '.join(parts)})"

    def apply(self, images: HeadContributions) -> Tensor:
        """The features [n, E] of images, whose contributions were collected, after the removal."""
        features = images.features
        if self.heads and self.means is not None:
            features = features + self.means.sum(dim=0)
            features = features - images.contribution(self.heads)
        return features - (features - self.center) @ self.removed

    def correction(self, after: Correction | None = None) -> Correction:
        """The removal as a correction of the backbone, composed with an earlier correction `after`."""
        keep = torch.eye(len(self.center)) - self.removed
        bias, heads, matrix, note = self.center @ self.removed, self.heads, keep, self.title
        if after is not None:
            matrix, bias = after.matrix.cpu() @ keep, bias + after.bias.cpu() @ keep
            heads, note = tuple(dict.fromkeys(after.heads + heads)), f"{after.note}; {note}"
        if self.means is not None:
            earlier = () if after is None else after.heads
            means = [mean for head, mean in zip(self.heads, self.means, strict=True) if head not in earlier]
            bias = bias + sum(means, torch.zeros_like(bias)) @ matrix
        return Correction(matrix.contiguous(), bias.contiguous(), heads, note)


def remove_heads(images: HeadContributions, heads: Sequence[Head], concept: str = "heads") -> Removal:
    """Removal by heads, with means over `images` (the training images)."""
    if not heads:
        raise UsageError(
            f"removing {concept!r} by heads needs at least one head, the role map has none; remove it by "
            "words or by examples"
        )
    chosen = tuple(sorted(set(heads)))
    means = torch.stack([images.contribution([key]).mean(dim=0) for key in chosen])
    center = images.features.mean(dim=0)
    return Removal((concept,), ("heads",), center, torch.zeros(len(center), len(center)), chosen, means)


def remove_span(images: HeadContributions, directions: Tensor, concept: str, way: str = "words") -> Removal:
    """Removal of the span of centered `directions` [K, E]: text features of values, or means of examples."""
    basis = span_basis(directions)
    removed = (basis.T @ basis).to(images.features)
    return Removal((concept,), (way,), images.features.mean(dim=0), removed, rank=len(basis))


def span_basis(directions: Tensor) -> Tensor:
    """B_q: an orthonormal basis of the centered rows, [at most K - 1, E] in float64.

    >>> span_basis(torch.tensor([[1.0, 0.0, 2.0], [-1.0, 0.0, 2.0]])).abs().tolist()
    [[1.0, 0.0, 0.0]]
    """
    rows = directions.double()
    centered = rows - rows.mean(dim=0)
    if len(rows) < 2 or not bool(centered.abs().max() > 0):
        raise UsageError(
            f"directions must have at least two different rows, got {min(1, len(rows))} in {len(rows)}"
        )
    _, lengths, axes = torch.linalg.svd(centered, full_matrices=False)
    basis: Tensor = axes[: min(int((lengths > _TINY * lengths[0]).sum()), len(rows) - 1)]
    return basis


def remove_examples(
    images: HeadContributions, examples: Tensor, values: Tensor, concept: str, leace: bool = False
) -> Removal:
    """Removal by examples: features [m, E] of images whose value is known, `values` [m] from 0."""
    present = values.unique()
    if len(present) < 2:
        raise UsageError(f"examples of {concept!r} must have at least two values, got {len(present)}")
    if leace:
        removed, rank = leace_map(examples, values)
        center = images.features.mean(dim=0)
        return Removal((concept,), ("leace",), center, removed.to(images.features), rank=rank)
    means = torch.stack([examples[values == value].double().mean(dim=0) for value in present])
    return remove_span(images, means, concept, "examples")


def leace_map(features: Tensor, values: Tensor, shrinkage: float | None = None) -> tuple[Tensor, int]:
    """LEACE: `f - (f - mean) R` is the least change after which features and values are uncorrelated.

    In rows, with S the covariance of the features [m, E], W = S^(-1/2), C their covariance with the one-hot
    values [m], Q the projection on the columns of W C: `R = (W^+ Q W)^T` [E, E] in float64 (Belrose et al.
    2023, theorem 4.3), and its rank. `shrinkage` is the fraction of the mean variance mixed into the
    covariance, which few examples do not determine; None: the estimate of Ledoit and Wolf (2004).
    """
    x = features.double()
    x = x - x.mean(dim=0)
    z = torch.nn.functional.one_hot(values.unique(return_inverse=True)[1]).double()
    z = z - z.mean(dim=0)
    if shrinkage is None:
        from sklearn.covariance import ledoit_wolf_shrinkage

        shrinkage = float(ledoit_wolf_shrinkage(x.numpy(), assume_centered=True))
    covariance = x.T @ x / len(x)
    isotropic = covariance.diagonal().mean() * torch.eye(x.shape[1], dtype=x.dtype)
    eigenvalues, axes = torch.linalg.eigh((1 - shrinkage) * covariance + shrinkage * isotropic)
    nonzero = eigenvalues > eigenvalues[-1] * max(x.shape) * torch.finfo(x.dtype).eps
    root = eigenvalues.clamp(min=0).sqrt()
    inverse = torch.where(nonzero, 1 / root.clamp(min=1e-300), 0.0)
    whiten = (axes * inverse) @ axes.T  # W
    unwhiten = (axes * torch.where(nonzero, root, 0.0)) @ axes.T  # W^+
    columns, lengths, _ = torch.linalg.svd(whiten @ (x.T @ z / len(x)), full_matrices=False)
    columns = columns[:, lengths > _TINY * lengths[0]]  # Q = columns columns^T
    return (unwhiten @ columns @ columns.T @ whiten).T, columns.shape[1]


def combine(first: Removal, *others: Removal) -> Removal:
    """Several removals as one: heads together, then the span of all directions together.

    LEACE's map is not a span; it is applied after the others.
    """
    result = first
    for other in others:
        if not torch.allclose(result.center, other.center, atol=1e-4):
            distance = float((result.center - other.center).abs().max())
            raise UsageError(
                "removals must be made on the same training images to be combined, got means that differ by "
                f"{distance:.2g}"
            )
        keys = tuple(sorted(set(result.heads) | set(other.heads)))
        means: dict[Head, Tensor] = {}
        for removal in (result, other):
            if removal.means is not None:
                means |= dict(zip(removal.heads, removal.means, strict=True))
        removed, rank = _combine_spans(result, other)
        result = replace(
            result,
            concepts=tuple(dict.fromkeys(result.concepts + other.concepts)),
            ways=result.ways + other.ways,
            removed=removed,
            heads=keys,
            means=torch.stack([means[key] for key in keys]) if keys else None,
            rank=rank,
        )
    return result


def _combine_spans(first: Removal, second: Removal) -> tuple[Tensor, int]:
    """`removed` and `rank` of two removals together."""
    if not first.rank or not second.rank:
        removal = first if first.rank else second
        return removal.removed, removal.rank
    if "leace" in first.ways + second.ways:
        eye = torch.eye(len(first.center), dtype=torch.float64)
        removed = eye - (eye - first.removed.double()) @ (eye - second.removed.double())
        return removed.to(first.removed), first.rank + second.rank
    # the projection on the sum of two spans
    lengths, axes = torch.linalg.eigh(first.removed.double() + second.removed.double())
    basis = axes[:, lengths > 1e-3].T
    return (basis.T @ basis).to(first.removed), len(basis)
