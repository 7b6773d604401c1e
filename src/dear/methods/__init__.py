"""Methods that adapt a frozen CLIP, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dear.clip.model import Clip
from dear.errors import UsageError
from dear.heads.roles import RoleMap
from dear.methods.base import Method
from dear.methods.clip_adapter import CLIPAdapter
from dear.methods.clip_lora import CLIPLoRA
from dear.methods.cocoop import CoCoOp
from dear.methods.coop import CoOp
from dear.methods.dear import DeAR
from dear.methods.dear_config import DeARConfig
from dear.methods.frozen import Batch, Batches, Frozen, Loss
from dear.methods.headtools import HeadLoRA, combine, fold, head_gates, head_masks
from dear.methods.kgcoop import KgCoOp
from dear.methods.linear_probe import LinearProbe
from dear.methods.lp_plus_plus import LPPlusPlus
from dear.methods.maple import MaPLe
from dear.methods.mmrl import MMRL
from dear.methods.mmrlpp import MMRLpp
from dear.methods.options import Preset
from dear.methods.prograd import ProGrad
from dear.methods.proker import ProKeR
from dear.methods.prolip import ProLIP
from dear.methods.promptsrc import PromptSRC
from dear.methods.purify import Purify
from dear.methods.role_masks import layer_mask
from dear.methods.rpo import RPO
from dear.methods.skip_tuning import SkipTuning
from dear.methods.tcp import TCP
from dear.methods.tip_adapter import TipAdapter, TipAdapterF
from dear.methods.two_stage import TwoStage
from dear.methods.vpt import VPT
from dear.methods.zeroshot import ZeroShot
from dear.utils.text import unknown_name

METHODS: dict[str, type[Method]] = {
    kind.name: kind
    for kind in (
        *(ZeroShot, LinearProbe, CoOp, CoCoOp, VPT, MaPLe, PromptSRC, ProGrad, KgCoOp, TCP, CLIPAdapter),
        *(TipAdapter, TipAdapterF, CLIPLoRA, RPO, MMRL, MMRLpp, DeAR, Purify, SkipTuning, TwoStage, ProLIP),
        *(LPPlusPlus, ProKeR),
    )
}
"""All methods by name; add a method of your own here before using it by name."""


def list_methods() -> list[str]:
    """Names of all methods, in the order of tables.

    >>> "dear" in list_methods()
    True
    """
    return list(METHODS)


def find_method(name: str) -> type[Method]:
    """The class of a method by name; case does not matter."""
    if name in METHODS:
        return METHODS[name]
    same = [key for key in METHODS if key.casefold() == name.casefold()]
    if len(same) != 1:
        raise UsageError(unknown_name("method", name, METHODS))
    return METHODS[same[0]]


def build_method(
    name: str, clip: Clip, classes: Sequence[str], *, roles: RoleMap | None = None, **options: Any
) -> Method:
    """Build a method by name; `roles` is ignored by methods that do not use a role map."""
    kind = find_method(name)
    return kind(clip, classes, roles=roles if kind.uses_roles else None, **options)


__all__ = [
    "METHODS",
    "Batch",
    "Batches",
    "DeAR",
    "DeARConfig",
    "Frozen",
    "HeadLoRA",
    "Loss",
    "Method",
    "Preset",
    "Purify",
    "ZeroShot",
    "build_method",
    "combine",
    "find_method",
    "fold",
    "head_gates",
    "head_masks",
    "layer_mask",
    "list_methods",
]
