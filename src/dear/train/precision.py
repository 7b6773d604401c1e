"""Mixed precision without autocast: a copy of the frozen backbone whose matrices are cast once.

Autocast would cast every frozen weight again at every use. In the copy, projections and MLPs (where the time
goes) have 16-bit weights; norms, embeddings, the residual stream and everything learned stay in float32.
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dear.clip.attention import Linear
from dear.clip.model import Clip
from dear.clip.vision import Patches
from dear.errors import UsageError
from dear.methods.base import M, Method

_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_Stamp = tuple[tuple[int, int], ...]
_texts: WeakKeyDictionary[Method, tuple[Clip, Any, Any, Any]] = WeakKeyDictionary()
_copies: WeakKeyDictionary[Clip, dict[torch.dtype, tuple[_Stamp, Clip]]] = WeakKeyDictionary()


def choose(precision: str, device: torch.device) -> torch.dtype:
    """The precision of the matrices that "auto" or a name means on a device.

    >>> choose("auto", torch.device("cpu"))
    torch.float32
    """
    if precision == "auto":
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    try:
        return _NAMES[precision]
    except KeyError:
        raise UsageError(f"precision {precision!r} is not known; choose auto, {', '.join(_NAMES)}") from None


def in_precision(method: M, precision: str) -> M:
    """`method` bound to its backbone in a precision; `method` itself stays as it is.

    "auto" leaves a backbone that was loaded in another precision than float32 as it is. The copy of a
    backbone is made once and kept as long as the backbone; what a method keeps of its texts on it is found
    again, so that answers for one image after another encode texts once.
    """
    clip = method.clip
    if precision != "auto" or clip.dtype == torch.float32:
        clip = kept_cast(clip, choose(precision, clip.device))
    bound = method.bound(clip)
    kept = _texts.get(method)
    if kept is not None and kept[0] is clip and kept[1] is method.prompts:
        bound.prompts, bound._cache = kept[2], kept[3]
    else:
        _texts[method] = (clip, method.prompts, bound.prompts, bound._cache)
    return bound


def kept_cast(clip: Clip, dtype: torch.dtype) -> Clip:
    """`cast_backbone`, made once per backbone and precision; corrections of one backbone share it."""
    if clip.dtype == torch.float32 == dtype:
        return clip
    stamp = tuple((p.data_ptr(), p._version) for p in clip.parameters())
    kept = _copies.setdefault(clip, {})
    if dtype not in kept or kept[dtype][0] != stamp:
        plain = clip.plain
        cast = cast_backbone(clip, dtype) if plain is clip else kept_cast(plain, dtype)
        kept[dtype] = (stamp, cast if plain is clip else cast.corrected(clip.correction))
    return kept[dtype][1]


def cast_backbone(clip: Clip, dtype: torch.dtype) -> Clip:
    """A copy of the backbone with its matrices in `dtype` and the rest in float32.

    What is in float32 already is shared with the original.

    Raises:
        UsageError: a weight is larger than `dtype` holds.
    """
    fingerprint = clip.fingerprint  # of the original: the copy stands for it
    source = clip if clip.dtype == torch.float32 else copy.deepcopy(clip).float()
    matrices = {id(m.weight) for m in source.modules() if isinstance(m, Linear | Patches)}
    matrices |= {id(m.bias) for m in source.modules() if isinstance(m, Linear)}
    shared = {id(p): p for p in source.parameters() if id(p) not in matrices}
    other = copy.deepcopy(source, dict(shared))
    for name, module in other.named_modules():
        if isinstance(module, Linear | Patches):
            module.to(dtype)
            if dtype == torch.float16 and not all(bool(p.isfinite().all()) for p in module.parameters()):
                raise UsageError(
                    f"{clip.name}: a weight of {name} is larger than float16 holds; use bfloat16 or float32"
                )
    other.__dict__["fingerprint"] = fingerprint
    return other
