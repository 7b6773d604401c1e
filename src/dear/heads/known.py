"""Role maps that need no discovery: an embedded backbone's own, and the supplement's Table 2."""

from __future__ import annotations

from dear.clip.factory import EMBEDDED
from dear.clip.model import Clip
from dear.heads.roles import RoleMap


def known_roles(clip: Clip) -> RoleMap | None:
    """The role map to use on a backbone when none is given; None: it has to be discovered.

    An embedded backbone has its own; Table 2 is taken for any tower of 12 layers of 12 heads.

    >>> from dear.clip.config import ClipConfig
    >>> known_roles(Clip(ClipConfig.named("ViT-B-32"))).rule
    'table2'
    """
    own = EMBEDDED / clip.name / "roles.json"
    if own.is_file():
        roles = RoleMap.load(own)
        if roles.fingerprint == clip.fingerprint:
            return roles
    vision = clip.config.vision
    return RoleMap.table2() if (vision.layers, vision.heads) == (12, 12) else None
