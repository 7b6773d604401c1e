"""A backbone with its matrices in another precision."""

from __future__ import annotations

import copy
from weakref import WeakKeyDictionary

import torch

from dear.clip.model import Clip
from dear.clip.tower import Linear
from dear.clip.towers import Patches
from dear.errors import UsageError

_PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_Stamp = tuple[tuple[int, int], ...]
_copies: WeakKeyDictionary[Clip, dict[torch.dtype, tuple[_Stamp, Clip]]] = WeakKeyDictionary()


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
        raise UsageError(
            f"precision {precision!r} is not known; choose auto, {', '.join(_PRECISIONS)}"
        ) from None


def fast_bfloat16(device: torch.device) -> bool:
    """Whether a CPU multiplies matrices in bfloat16 by itself (AVX-512 BF16, AMX), faster than in float32."""
    known: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type == "cpu" and (known.get("avx512_bf16", False) or known.get("amx_bf16", False))


def cached_cast(clip: Clip, dtype: torch.dtype) -> Clip:
    """`cast_backbone`, made once per backbone and precision; corrections of one backbone share it."""
    if clip.dtype == torch.float32 == dtype:
        return clip
    stamp = tuple((p.data_ptr(), p._version) for p in clip.parameters())
    cached = _copies.setdefault(clip, {})
    if dtype not in cached or cached[dtype][0] != stamp:
        plain = clip.plain
        cast = cast_backbone(clip, dtype) if plain is clip else cached_cast(plain, dtype)
        cached[dtype] = (
            stamp,
            cast if plain is clip else cast.corrected(clip.correction).focused(clip.focus),
        )
    return cached[dtype][1]


def cast_backbone(clip: Clip, dtype: torch.dtype) -> Clip:
    """A copy of the backbone with its matrices in `dtype` and the rest in float32.

    Autocast would cast every frozen weight again at every use; here projections and MLPs, where the time
    goes, are cast once. What is in float32 already is shared with the original.
    """
    source = clip if clip.dtype == torch.float32 else copy.deepcopy(clip).float()
    cast = (module for module in source.modules() if isinstance(module, Linear | Patches))
    matrices = {id(parameter) for module in cast for parameter in module.parameters()}
    shared = {id(p): p for p in source.parameters() if id(p) not in matrices}
    other = copy.deepcopy(source, dict(shared))
    for name, module in other.named_modules():
        if isinstance(module, Linear | Patches):
            module.to(dtype)
            if dtype == torch.float16 and not all(bool(p.isfinite().all()) for p in module.parameters()):
                raise UsageError(
                    f"{clip.name}: a weight of {name} is larger than float16 holds; use bfloat16 or float32"
                )
    return other.stand_for(clip)
