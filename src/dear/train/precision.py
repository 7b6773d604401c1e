"""Mixed precision without autocast: a twin of the frozen backbone whose matrices are cast once.

Autocast would cast every frozen weight again at every use. In the twin, projections and MLPs (where the time
goes) have 16-bit weights; norms, embeddings, the residual stream and everything learned stay in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dear.clip.attention import Linear
from dear.clip.model import Clip, Patches
from dear.errors import UsageError
from dear.methods.base import Method

_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


def twin(clip: Clip, dtype: torch.dtype) -> Clip:
    """A copy of the backbone with its matrices in `dtype`; the rest is shared with the original.

    Raises:
        UsageError: a weight is larger than `dtype` holds.
    """
    matrices = {id(m.weight) for m in clip.modules() if isinstance(m, Linear | Patches)}
    matrices |= {id(m.bias) for m in clip.modules() if isinstance(m, Linear)}
    shared = {id(p): p for p in clip.parameters() if id(p) not in matrices}
    fingerprint = clip.fingerprint  # of the original: the twin stands for it
    other = copy.deepcopy(clip, dict(shared))
    for name, module in other.named_modules():
        if isinstance(module, Linear | Patches):
            module.to(dtype)
            if dtype == torch.float16 and not all(bool(p.isfinite().all()) for p in module.parameters()):
                raise UsageError(
                    f"{clip.name}: a weight of {name} is larger than float16 holds; use bfloat16 or float32"
                )
    other.__dict__["fingerprint"] = fingerprint
    return other


@contextmanager
def backbone_in(method: Method, precision: str) -> Iterator[torch.dtype]:
    """Let `method` use its backbone in `precision` for a while; yields the precision chosen."""
    original = method.clip
    dtype = choose(precision, original.device)
    if dtype == torch.float32 or original.dtype != torch.float32:
        yield original.dtype
        return
    method.use_backbone(twin(original, dtype))
    try:
        yield dtype
    finally:
        method.use_backbone(original)
