"""A fixed change of the image feature: the terms of some heads are removed, then an affine map is applied.

The feature is the sum of the contributions of all heads and a rest (`dear.heads.contributions`). A correction
removes the terms of some heads exactly and applies `f A + b`; the rest of the computation is unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dear.clip.config import Head
from dear.errors import UsageError
from dear.utils.digest import of_parts

if TYPE_CHECKING:
    from dear.clip.towers import VisionTower


@dataclass(frozen=True, eq=False)
class Correction:
    """`f' = (f - sum of the terms of `heads`) A + b`."""

    matrix: Tensor  #: A, float32 [E, E]
    bias: Tensor  #: b, float32 [E]
    heads: tuple[Head, ...] = ()  #: (layer, head) pairs whose terms are removed
    note: str = ""  #: its purpose, for people
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        width = self.bias.numel()
        if self.bias.shape != (width,) or self.matrix.shape != (width, width):
            raise UsageError(
                f"a correction must have a matrix [E, E] and a bias [E], got {list(self.matrix.shape)} and "
                f"{list(self.bias.shape)}"
            )
        if not (bool(self.matrix.isfinite().all()) and bool(self.bias.isfinite().all())):
            raise UsageError("matrix and bias of a correction must be finite, got NaN or infinity")
        if len(set(self.heads)) != len(self.heads):
            raise UsageError(f"heads of a correction must be distinct, got {self.heads}")
        tensors = (tensor.detach().to("cpu", torch.float32) for tensor in (self.matrix, self.bias))
        values = (tensor.contiguous().numpy().astype("<f4").tobytes() for tensor in tensors)
        object.__setattr__(self, "digest", f"sha256:{of_parts(repr(self.heads), *values).hex()}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Correction) and (self.digest, self.note) == (other.digest, other.note)

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def summary(self) -> dict[str, Any]:
        """Plain values that identify the correction, without its tensors."""
        return {"note": self.note, "heads": [list(head) for head in self.heads], "digest": self.digest}

    @property
    def foldable(self) -> bool:
        """Whether the weights of a plain CLIP can contain it: it removes no heads."""
        return not self.heads


@torch.no_grad()
def fold_correction(
    proj: Tensor, weight: Tensor, bias: Tensor, correction: Correction
) -> tuple[Tensor, Tensor]:
    """Projection [D, E] and norm bias [D] with which a plain CLIP computes the corrected features.

    A plain CLIP has no bias after its projection. But the rows `y = n w + c` of the final norm satisfy one
    linear equation: n sums to 0, so `y · (1/w) = c · (1/w)` is the same for every image. With `u = 1/w`,
    `y' = y + t u` (a change of the norm's bias) and `P' = P A + u g^T`, the feature is
    `y P A + t u P A + (c · u + t |u|²) g`; g is chosen so that the last two terms sum to the bias b.
    """
    if not correction.foldable:
        raise UsageError(
            "only corrections without removed heads can be folded into a plain CLIP; remove the concept by "
            "words or by examples"
        )
    P, w, c = proj.double(), weight.double(), bias.double()
    if bool((w == 0).any()):
        raise UsageError("folding a correction needs a final norm without weights of 0")
    A, b = correction.matrix.to(P), correction.bias.to(P)
    u = 1 / w
    # t makes the constant c · u + t |u|² equal to |u|, so that g is no larger than the bias it adds.
    t = (u.norm() - c @ u) / (u @ u)
    g = (b - t * (u @ P @ A)) / (c @ u + t * (u @ u))
    return (P @ A + torch.outer(u, g)).to(proj), (c + t * u).to(bias)


class AppliedCorrection(NamedTuple):
    """A correction prepared for an image tower, on the tower's device.

    Where every image of a batch has its own, the tensors have a leading dimension B: matrices [B, E, E] and
    biases [B, 1, E] apply to rows [B, R, E].
    """

    heads: tuple[Head, ...]  #: heads whose terms are removed, sorted
    matrix: Tensor  #: A [E, E]
    bias: Tensor  #: b [E]
    pooled_matrix: Tensor  #: [D, D], for pooled vectors
    pooled_bias: Tensor  #: [D]

    def feature(self, features: Tensor) -> Tensor:
        """Features [..., E] after the affine map."""
        return features @ self.matrix.to(features) + self.bias.to(features)

    def pooled(self, pooled: Tensor) -> Tensor:
        """Pooled vectors [..., D] reduced to their corrected feature."""
        return pooled @ self.pooled_matrix.to(pooled) + self.pooled_bias.to(pooled)


@torch.no_grad()
def apply_to(visual: VisionTower, correction: Correction) -> AppliedCorrection:
    """The correction for a tower, with the map that reduces pooled vectors y to their corrected feature.

    The feature is `y P + p`; the shortest vector with the feature `(y P + p) A + b` is
    `y P A P^+ + (p A + b - p) P^+`, with P^+ the pseudoinverse of the projection.
    """
    P = visual.projection_matrix().double()
    A, b = correction.matrix.to(P), correction.bias.to(P)
    p = torch.zeros_like(b) if visual.proj_bias is None else visual.proj_bias.to(P)
    inverse = torch.linalg.pinv(P)  # [E, D]
    device = visual.positions.device
    return AppliedCorrection(
        tuple(sorted(correction.heads)),
        correction.matrix.to(device),
        correction.bias.to(device),
        (P @ A @ inverse).float(),
        ((p @ A + b - p) @ inverse).float(),
    )
