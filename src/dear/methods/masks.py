"""Role masks: who may read whom in each head, from a role map (eq. 7 to 9)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dear.clip.edit import BlockMask
from dear.errors import RoleError, UsageError
from dear.heads.names import CORE
from dear.heads.roles import Role, RoleMap

ISOLATIONS = ("bidirectional", "readonly")
_ALIASES = {"colour": "color", "place": "location", "material": "texture", "form": "shape", "thing": "object"}


def find_attribute(name: str, attributes: Sequence[str] = CORE) -> int:
    """Place of the attribute `name` among `attributes`, whatever the case.

    >>> find_attribute("color")
    0

    Raises:
        UsageError: there is no such attribute.
    """
    wanted = name.strip().casefold()
    names = [attribute.casefold() for attribute in attributes]
    for candidate in (wanted, _ALIASES.get(wanted, wanted)):
        if candidate in names:
            return names.index(candidate)
    raise UsageError(f"no attribute is called {name!r}; there are {', '.join(attributes)}")


def canonical_attribute(name: str, attributes: Sequence[str]) -> str:
    """The attribute `name` as `attributes` spells it, whatever the case, aliases included.

    >>> canonical_attribute("colour", CORE), canonical_attribute("PLACE", CORE)
    ('Color', 'Location')
    """
    return attributes[find_attribute(name, attributes)]


def layer_mask(
    roles: RoleMap,
    layer: int,
    attributes: Sequence[str] = CORE,
    each: int = 1,
    isolation: str = ISOLATIONS[0],
) -> BlockMask:
    """The block mask of all heads of a layer.

    A core head whose concept has no token among `attributes` has nothing to read: it is isolated like the
    other specialized heads.

    Args:
        roles: the role map.
        layer: counted from 1.
        attributes: the attributes that have tokens, in their order.
        each: tokens per attribute; those of one attribute stand side by side.
        isolation: "bidirectional", or "readonly": attribute tokens of isolated heads may read the originals.

    Raises:
        RoleError: the map has no roles for the layer.
    """
    if isolation not in ISOLATIONS:
        raise UsageError(f"isolation {isolation!r} is not known; choose from {', '.join(ISOLATIONS)}")
    if layer not in roles.layers:
        raise RoleError(f"the role map has no layer {layer}; it has {', '.join(map(str, roles.layers))}")
    heads = [_see(roles[layer, h], attributes, each, isolation) for h in range(roles.heads)]
    return BlockMask(torch.stack(heads))


def _see(role: Role, attributes: Sequence[str], each: int, isolation: str) -> torch.Tensor:
    """One head's part of the mask, bool [1 + T, 1 + T]; block 0 is the original tokens."""
    see = torch.ones(1 + len(attributes) * each, 1 + len(attributes) * each, dtype=torch.bool)
    if role.kind == "mixed":
        return see
    own = [
        a for a, name in enumerate(attributes) if role.concept and name.casefold() == role.concept.casefold()
    ]
    if role.kind == "core" and own:  # eq. 9: of all attribute tokens only its own can be read, by every query
        see[:, 1:] = False
        see[:, 1 + own[0] * each : 1 + (own[0] + 1) * each] = True
        return see
    see[0, 1:] = False  # eq. 8: originals do not read attribute tokens ...
    see[1:, 0] = isolation == "readonly"  # ... nor the other way round
    return see


def draw_mask(mask: BlockMask, attributes: Sequence[str] = CORE, each: int = 1) -> str:
    """A layer's mask as text: per head one row per query and one column per key; # is seen, · is hidden.

    >>> print(draw_mask(layer_mask(RoleMap.table2(), 12)).splitlines()[0])
    head 0
    """
    short = [name[:2] + (str(i) if each > 1 else "") for name in attributes for i in range(each)]
    names = ["or", *short]  # "or": the original tokens, class token and patches
    width = max(map(len, names))
    lines = []
    for head, see in enumerate(mask.see.tolist()):
        lines.append(f"head {head}")
        lines.append(" " * (width + 1) + " ".join(name.ljust(width) for name in names))
        for name, row in zip(names, see, strict=True):
            cells = " ".join(("#" if seen else "·").ljust(width) for seen in row)
            lines.append(f"{name.ljust(width)} {cells}".rstrip())
    return "\n".join(lines)
