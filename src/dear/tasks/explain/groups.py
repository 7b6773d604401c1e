"""Heads in groups that people can read: by role where a backbone has roles, else by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dear.clip.config import VisionConfig
from dear.heads.names import KIND_TITLES, Head
from dear.heads.roles import RoleMap

_CLEAR = 0.15  # share of the map's heads with a concept of their own below which roles say little


@dataclass(frozen=True)
class HeadGroups:
    """Every head of a tower in exactly one group."""

    heads: Mapping[str, tuple[Head, ...]]  #: by name
    by_role: bool  #: else by layer
    notice: str = ""  #: why they are grouped by layer

    @property
    def named(self) -> dict[str, tuple[Head, ...]]:
        """The groups with a name: roles, or layers."""
        return {name: heads for name, heads in self.heads.items() if name not in (EARLY, MIXED)}


EARLY, MIXED = "Earlier heads", "Mixed heads"


def head_groups(vision: VisionConfig, roles: RoleMap | None) -> HeadGroups:
    """Group the heads of a tower.

    >>> from dear.clip.config import ClipConfig
    >>> vision = ClipConfig.named("ViT-B-16").vision
    >>> list(head_groups(vision, RoleMap.table2()).heads)[:3], len(head_groups(vision, None).heads)
    (['Location', 'Generalization', 'Object'], 12)
    """
    layers = {
        f"Layer {layer}": tuple((layer, head) for head in range(vision.heads))
        for layer in range(1, vision.layers + 1)
    }
    if roles is None:
        return HeadGroups(
            layers,
            False,
            "Heads are grouped by layer: this backbone has no role map.",
        )
    if caveat := roles.caveat():
        return HeadGroups(layers, False, f"{caveat} Heads are grouped by layer, and no concept is named.")
    clear = sum(role.kind in ("core", "other") for _, role in roles)
    if clear < _CLEAR * len(roles):
        return HeadGroups(
            layers,
            False,
            f"Only {clear} of the {len(roles)} heads of this backbone's role map have a concept of their "
            "own: heads are grouped by layer.",
        )
    titles = KIND_TITLES | {"mixed": MIXED}
    members: dict[str, list[Head]] = {}
    for key, role in roles:
        name = role.concept if role.kind in ("core", "other") else titles[role.kind]
        members.setdefault(str(name), []).append(key)
    ordered = sorted(members, key=lambda name: (name == MIXED, -len(members[name]), name))
    groups = {name: tuple(members[name]) for name in ordered}
    early = tuple(key for heads in layers.values() for key in heads if key not in roles.table)
    return HeadGroups({**groups, **({EARLY: early} if early else {})}, True)
