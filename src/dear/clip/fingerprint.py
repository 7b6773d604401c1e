"""The fingerprint that identifies a backbone: a hash of the values of its visual weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn


def fingerprint(visual: nn.Module | Mapping[str, Tensor]) -> str:
    """`sha256:…` of a vision tower's names, shapes and values.

    Values count as float32, so the same numbers stored in half precision, in another layout or on another
    device give the same answer.

    Args:
        visual: a `VisionTower`, or its state dict (names without the leading `visual.`).

    Example:
        >>> whole = {"proj": torch.tensor([[1.0, 0.5]])}
        >>> fingerprint(whole) == fingerprint({"proj": whole["proj"].half()})
        True
    """
    state = visual.state_dict() if isinstance(visual, nn.Module) else visual
    digest = hashlib.sha256()
    for name in sorted(state):
        values = state[name].detach().to("cpu", torch.float32).contiguous().numpy()
        digest.update(f"{name} {list(values.shape)}\n".encode())
        digest.update(np.ascontiguousarray(values, dtype="<f4").reshape(-1).data)
    return f"sha256:{digest.hexdigest()}"
