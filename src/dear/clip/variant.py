"""Variants of a backbone: the same weights with a correction, a focus, or matrices in another precision.

`Clip.corrected`, `Clip.focused` and `Clip.cast` all end here. The same variant of the same backbone is the
same object as long as anything uses it, so that adapters share its work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from dear.clip.config import Head
from dear.clip.correction import Correction
from dear.clip.gpu import Recorder
from dear.clip.sharing import map_tensors, replace
from dear.clip.tower import Linear
from dear.clip.towers import Patches
from dear.errors import UsageError

if TYPE_CHECKING:
    from dear.clip.model import Clip

_PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_Stamp = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Variant:
    """How a backbone differs from the one with the same weights that was loaded."""

    correction: Correction | None = None  #: of the image feature
    focus: tuple[Head, ...] = ()  #: heads whose terms `encode_image` returns next to the feature


class ImageParts(NamedTuple):
    """What `Clip.encode_image` returns of each image, by name."""

    feature: Tensor  #: [..., E], the image feature
    focus: Tensor | None = None  #: [..., E], the part of it that the heads of the focus add

    def joined(self) -> Tensor:
        """One row per image, [..., E] or [..., 2 E], as caches store it; `Clip.parts` is the inverse."""
        return self.feature if self.focus is None else torch.cat([self.feature, self.focus], dim=-1)


@dataclass(frozen=True)
class _Variants:
    """The variants of one backbone object."""

    #: on the same tensors; they refer to this backbone, so it must not hold them
    shared: WeakValueDictionary[Variant, Clip] = field(default_factory=WeakValueDictionary)
    #: with cast matrices; they do not refer to it. The stamp changes with the weights
    casts: dict[torch.dtype, tuple[_Stamp, Clip]] = field(default_factory=dict)


_variants: WeakKeyDictionary[Clip, _Variants] = WeakKeyDictionary()


def _variants_of(clip: Clip) -> _Variants:
    return _variants.setdefault(clip, _Variants())


def as_variant(clip: Clip, variant: Variant) -> Clip:
    """The backbone with the weights and precision of `clip` as `variant` describes it."""
    plain = clip.plain
    for known in (clip, plain):
        if variant == known.variant:
            return known
    vision, correction = clip.config.vision, variant.correction
    if correction is not None:
        vision.check_heads(correction.heads)
        width, expected = correction.bias.numel(), clip.config.embed_dim
        if width != expected:
            raise UsageError(f"the correction is for features of width {width}, not {expected}")
    vision.check_heads(variant.focus)
    shared = _variants_of(plain).shared
    other = shared.get(variant)
    if other is None:
        if variant.focus:
            plain.visual.require_class_token("a focus on heads")
            visual = as_variant(clip, Variant(correction)).visual
        else:
            visual = plain.visual.with_correction(correction)
        other = replace(plain, type(plain), variant=variant, visual=visual, _plain=(plain,))
        shared[variant] = other
    return other


def cast(clip: Clip, dtype: torch.dtype) -> Clip:
    """The same variant with its matrices in `dtype` and the rest in float32, made once per backbone.

    Autocast would cast every frozen weight again at every use; here projections and MLPs, where the time
    goes, are cast once. What is in float32 already is shared with the original.
    """
    if clip.dtype == torch.float32 == dtype:
        return clip
    stamp = tuple((p.data_ptr(), p._version) for p in clip.parameters())
    casts = _variants_of(clip).casts
    if dtype not in casts or casts[dtype][0] != stamp:
        plain = clip.plain
        other = _cast_weights(clip, dtype) if plain is clip else as_variant(cast(plain, dtype), clip.variant)
        if other is clip:
            return clip  # it is in this precision; holding it here would keep it forever
        casts[dtype] = (stamp, other)
    return casts[dtype][1]


def _cast_weights(clip: Clip, dtype: torch.dtype) -> Clip:
    def change(owner: nn.Module, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.to(dtype) if isinstance(owner, Linear | Patches) else tensor.float()

    other = map_tensors(clip, change)
    if dtype == torch.float16:
        for name, tensor in other.named_parameters():
            if tensor.dtype == dtype and not bool(tensor.isfinite().all()):
                raise UsageError(
                    f"{clip.name}: a weight of {name.rpartition('.')[0]} is larger than float16 holds; use "
                    "bfloat16 or float32"
                )
    if other is not clip:
        other.digests = clip.weight_digests()  # of the values before they were rounded
        other.recorder = Recorder(clip.recorder.buckets)
    return other


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


def fast_bfloat16(device: torch.device) -> bool:
    """Whether a CPU has bfloat16 matrix products in hardware (AVX-512 BF16, AMX): faster than float32."""
    known: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type == "cpu" and (known.get("avx512_bf16", False) or known.get("amx_bf16", False))
