"""Hashes that tell backbones apart, whichever file, layout, precision or device they come from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor, nn

from dear.clip.config import ClipConfig


def fingerprint(visual: nn.Module | Mapping[str, Tensor]) -> str:
    """`sha256:…` of names, shapes and values of a `VisionTower` or its state dict (names without `visual.`).

    Values count as float32, so the same numbers stored in half precision, in another layout or on another
    device give the same answer.

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


def identity(config: ClipConfig, state: Mapping[str, Tensor], visual: str) -> str:
    """`Clip.identity` of a configuration and a state dict; `visual` is the vision tower's fingerprint."""
    rest = fingerprint({name: t for name, t in state.items() if not name.startswith("visual.")})
    parts = json.dumps([visual, rest, asdict(config)], sort_keys=True)
    return f"sha256:{hashlib.sha256(parts.encode()).hexdigest()}"


def visual_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of a model's state dict that is the vision tower's."""
    return {name.removeprefix("visual."): t for name, t in state.items() if name.startswith("visual.")}
