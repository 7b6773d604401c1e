"""Role masks: which tokens each head of a layer may attend to, by the role of the head (eq. 7-9)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dear.clip.edit import BlockMask
from dear.errors import RoleError, UsageError
from dear.heads.names import CORE
from dear.heads.role import Role
from dear.heads.roles import RoleMap

ISOLATIONS = ("bidirectional", "readonly")


def layer_mask(
    roles: RoleMap,
    layer: int,
    attributes: Sequence[str] = CORE,
    isolation: str = ISOLATIONS[0],
) -> BlockMask:
    """The block mask of all heads of a layer.

    A core head whose concept has no token among `attributes` is isolated like the other specialized heads.

    Args:
        roles: the role map.
        layer: counted from 1.
        attributes: the attributes, in the order of their tokens.
        isolation: "bidirectional", or "readonly": attribute tokens of isolated heads may read the originals.
    """
    if isolation not in ISOLATIONS:
        raise UsageError(f"isolation must be one of {', '.join(ISOLATIONS)}, got {isolation!r}")
    if layer not in roles.layers:
        layers = ", ".join(map(str, roles.layers))
        raise RoleError(f"the role map must contain layer {layer}, it has {layers}; discover roles for it")
    heads = [_visible_blocks(roles[layer, head], attributes, isolation) for head in range(roles.heads)]
    return BlockMask(torch.stack(heads))  # [H, 1 + A, 1 + A]


def _visible_blocks(role: Role, attributes: Sequence[str], isolation: str) -> Tensor:
    """The mask of one head, bool [1 + A, 1 + A] (query, key); block 0 is all original tokens."""
    visible = torch.ones(1 + len(attributes), 1 + len(attributes), dtype=torch.bool)
    if role.kind == "mixed":
        return visible
    names = [name.casefold() for name in attributes]
    if role.kind == "core" and role.concept and role.concept.casefold() in names:
        # eq. 9: no query attends to tokens of other attributes
        visible[:, 1:] = False
        visible[:, 1 + names.index(role.concept.casefold())] = True
        return visible
    visible[0, 1:] = False  # eq. 8: original tokens do not attend to attribute tokens ...
    visible[1:, 0] = isolation == "readonly"  # ... and vice versa
    return visible


def draw_mask(mask: BlockMask, attributes: Sequence[str] = CORE) -> str:
    """A layer's mask as text: for each head a row per query and a column per key; # is visible, · hidden.

    >>> print(draw_mask(layer_mask(RoleMap.table2(), 12)).splitlines()[0])
    head 0
    """
    names = ["or", *(name[:2] for name in attributes)]  # "or": the original tokens, class token and patches
    width = max(map(len, names))
    lines = []
    for head, visible in enumerate(mask.visible.tolist()):
        lines.append(f"head {head}")
        lines.append(" " * (width + 1) + " ".join(name.ljust(width) for name in names))
        for name, row in zip(names, visible, strict=True):
            cells = " ".join(("#" if cell else "·").ljust(width) for cell in row)
            lines.append(f"{name.ljust(width)} {cells}".rstrip())
    return "\n".join(lines)
