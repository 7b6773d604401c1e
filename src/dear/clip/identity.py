"""Hashes that identify backbones, independent of file, layout, precision and device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch import Tensor, nn

from dear.clip.config import ClipConfig
from dear.utils import digest


def fingerprint(visual: nn.Module | Mapping[str, Tensor]) -> str:
    """`sha256:…` of names, shapes and values of a `VisionTower` or its state dict (names without `visual.`).

    Values are hashed as float32, so the same values in half precision, in another layout or on another device
    have the same hash.

    >>> import torch
    >>> state = {"proj": torch.tensor([[1.0, 0.5]])}
    >>> fingerprint(state) == fingerprint({"proj": state["proj"].half()})
    True
    """
    state = visual.state_dict() if isinstance(visual, nn.Module) else visual
    return f"sha256:{digest.of_tensors(state, as_float32=True).hex()}"


@dataclass(frozen=True)
class WeightDigests:
    """`sha256:…` of a backbone's weights."""

    visual: str  #: of the image tower
    rest: str  #: of all other weights

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> WeightDigests:
        """Digests of a model's state dict."""
        visual = {name.removeprefix("visual."): t for name, t in state.items() if name.startswith("visual.")}
        return cls(fingerprint(visual), fingerprint({n: t for n, t in state.items() if n[:7] != "visual."}))


def identity(config: ClipConfig, digests: WeightDigests) -> str:
    """`Clip.identity` of a configuration and the digests of the weights."""
    parts = json.dumps([digests.visual, digests.rest, asdict(config)], sort_keys=True)
    return f"sha256:{digest.of_parts(parts).hex()}"
