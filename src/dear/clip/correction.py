"""A fixed change of the image feature: some heads left out of the sum, then an affine map.

The feature is the sum of what every head adds and a rest (`dear.heads.contributions`). A correction leaves
out the terms of some heads, exactly (the rest of the computation stays as it is), and applies `f A + b`.
The towers do not know where a correction comes from.
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
    heads: tuple[Head, ...] = ()  #: (layer, head) pairs whose terms are left out
    note: str = ""  #: what it is for, for people
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        width = self.bias.numel()
        if self.bias.shape != (width,) or self.matrix.shape != (width, width):
            raise UsageError(
                f"a correction is a matrix [E, E] and a bias [E]; got {list(self.matrix.shape)} and "
                f"{list(self.bias.shape)}"
            )
        if not (bool(self.matrix.isfinite().all()) and bool(self.bias.isfinite().all())):
            raise UsageError("a correction must be made of finite numbers")
        if len(set(self.heads)) != len(self.heads):
            raise UsageError("a correction names a head twice")
        tensors = (tensor.detach().to("cpu", torch.float32) for tensor in (self.matrix, self.bias))
        values = (tensor.contiguous().numpy().astype("<f4").tobytes() for tensor in tensors)
        object.__setattr__(self, "digest", f"sha256:{of_parts(repr(self.heads), *values).hex()}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Correction) and (self.digest, self.note) == (other.digest, other.note)

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def described(self) -> dict[str, Any]:
        """Plain values that identify it, without its tensors."""
        return {"note": self.note, "heads": [list(head) for head in self.heads], "digest": self.digest}

    @property
    def foldable(self) -> bool:
        """Whether a plain CLIP can have it in its weights: no heads are left out."""
        return not self.heads


@torch.no_grad()
def folded(proj: Tensor, weight: Tensor, bias: Tensor, correction: Correction) -> tuple[Tensor, Tensor]:
    """Projection [D, E] and norm bias [D] that give the corrected features in a plain CLIP.

    A plain CLIP has no bias after its projection. But the rows `y = n w + c` of the final norm satisfy one
    linear equation: n sums to 0, so `y · (1/w) = c · (1/w)` is the same for every image. With `u = 1/w`,
    `y' = y + t u` (a change of the norm's bias) and `P' = P A + u g^T`, the feature is
    `y P A + t u P A + (c · u + t |u|²) g`; g is chosen so that all but the first term is the bias wanted.
    """
    if not correction.foldable:
        raise UsageError(
            "a removal of heads depends on the image and cannot be folded into a plain CLIP; remove the "
            "concept by words or by examples"
        )
    P, w, c = proj.double(), weight.double(), bias.double()
    if bool((w == 0).any()):
        raise UsageError("the final norm has a weight of 0: the correction cannot be folded into this CLIP")
    A, b = correction.matrix.to(P), correction.bias.to(P)
    u = 1 / w
    # With t the constant is as large as |u|, so g is no larger than the bias it contributes.
    t = (u.norm() - c @ u) / (u @ u)
    g = (b - t * (u @ P @ A)) / (c @ u + t * (u @ u))
    return (P @ A + torch.outer(u, g)).to(proj), (c + t * u).to(bias)


class AppliedCorrection(NamedTuple):
    """A correction as an image tower applies it, on the tower's device."""

    heads: tuple[Head, ...]  #: whose terms are left out, sorted
    matrix: Tensor  #: A [E, E]
    bias: Tensor  #: b [E]
    pooled_matrix: Tensor  #: [D, D], for pooled vectors
    pooled_bias: Tensor  #: [D]


@torch.no_grad()
def apply_to(visual: VisionTower, correction: Correction) -> AppliedCorrection:
    """The correction for a tower, with the map that leaves in pooled vectors y only the corrected feature.

    The feature is `y P + p`; the shortest vector with the feature `(y P + p) A + b` is
    `y P A P^+ + (p A + b - p) P^+`, P^+ the pseudoinverse of the projection.
    """
    P = visual.space_matrix().double()
    A, b = correction.matrix.to(P), correction.bias.to(P)
    p = torch.zeros_like(b) if visual.proj_bias is None else visual.proj_bias.to(P)
    back = torch.linalg.pinv(P)
    device = visual.positions.device
    return AppliedCorrection(
        tuple(sorted(correction.heads)),
        correction.matrix.to(device),
        correction.bias.to(device),
        (P @ A @ back).float(),
        ((p @ A + b - p) @ back).float(),
    )
