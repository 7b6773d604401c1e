"""Variants of a backbone: the same weights with a correction of the feature or matrices in another precision.

`Clip.with_correction` and `Clip.cast` call these functions. The same variant of the same backbone is the same
object while anything uses it, so that adapters share its work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from dear.clip.correction import Correction
from dear.clip.gpu import Recorder
from dear.clip.sharing import map_tensors, replace, tensor_stamp
from dear.clip.tower import Linear
from dear.clip.towers import Patches
from dear.errors import UsageError

if TYPE_CHECKING:
    from dear.clip.model import Clip

_PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_Stamp = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Variants:
    """The variants of one backbone object."""

    #: on the same tensors; weak, because they refer to this backbone
    corrected: WeakValueDictionary[Correction, Clip] = field(default_factory=WeakValueDictionary)
    #: with cast matrices, which do not refer to it, and the stamp of the weights they were cast from
    casts: dict[torch.dtype, tuple[_Stamp, Clip]] = field(default_factory=dict)


_variants: WeakKeyDictionary[Clip, _Variants] = WeakKeyDictionary()


def _variants_of(clip: Clip) -> _Variants:
    return _variants.setdefault(clip, _Variants())


def with_correction(clip: Clip, correction: Correction | None) -> Clip:
    """The backbone with the weights and precision of `clip` and this correction of its image feature."""
    plain = clip.plain
    if correction is None:
        return plain
    if correction == clip.correction:
        return clip
    clip.config.vision.check_heads(correction.heads)
    width, expected = correction.bias.numel(), clip.config.embed_dim
    if width != expected:
        raise UsageError(f"the correction must be for features of width {expected}, got {width}")
    variants = _variants_of(plain).corrected
    variant = variants.get(correction)
    if variant is None:
        visual = plain.visual.with_correction(correction)
        variant = replace(plain, type(plain), correction=correction, visual=visual, _plain=(plain,))
        variants[correction] = variant
    return variant


def cast(clip: Clip, dtype: torch.dtype) -> Clip:
    """The same backbone with its matrices in `dtype` and the rest in float32, created once per backbone.

    Autocast would cast every frozen weight at every use; here the matrices of projections and MLPs are cast
    once. Tensors that are in float32 already are shared with the original.
    """
    if clip.dtype == torch.float32 == dtype:
        return clip
    stamp = tensor_stamp(clip.parameters())
    casts = _variants_of(clip).casts
    if dtype not in casts or casts[dtype][0] != stamp:
        plain = clip.plain
        if plain is clip:
            variant = _cast_weights(clip, dtype)
        else:
            variant = with_correction(cast(plain, dtype), clip.correction)
        if variant is clip:
            return clip  # it has this precision; a reference here would keep it alive forever
        casts[dtype] = (stamp, variant)
    return casts[dtype][1]


def _cast_weights(clip: Clip, dtype: torch.dtype) -> Clip:
    def change(owner: nn.Module, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.to(dtype) if isinstance(owner, Linear | Patches) else tensor.float()

    variant = map_tensors(clip, change)
    if dtype == torch.float16:
        for name, tensor in variant.named_parameters():
            if tensor.dtype == dtype and not bool(tensor.isfinite().all()):
                raise UsageError(
                    f"{clip.name}: weights of {name.rpartition('.')[0]} exceed the range of float16; use "
                    "bfloat16 or float32"
                )
    if variant is not clip:
        variant.digests = clip.weight_digests()  # of the values before rounding
        variant.recorder = Recorder(clip.recorder.buckets)
    return variant


def matrix_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The precision of the matrices that "auto" or a name means on a device.

    >>> matrix_dtype("auto", torch.device("cpu"))
    torch.float32
    """
    if precision == "auto":
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    try:
        return _PRECISIONS[precision]
    except KeyError:
        raise UsageError(f"precision must be auto, {', '.join(_PRECISIONS)}, got {precision!r}") from None
