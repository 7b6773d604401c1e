"""Role maps that come with the package: those of the embedded backbones, and the supplement's Table 2."""

from __future__ import annotations

import os
import re

from dear.clip.factory import EMBEDDED
from dear.clip.model import Clip
from dear.heads.roles import RoleMap

TABLE2 = "table2"  #: the name of the supplement's map
# How OpenAI's ViT-B/16 is called: on the hub, as a folder downloaded from there, and as OpenAI's file.
_OPENAI_B16 = re.compile(r"(openai/)?clip-vit-base-patch16|vit-b-16(\.pt)?", re.IGNORECASE)


def known_roles(clip: Clip) -> RoleMap | None:
    """The role map to use on a backbone by default; None: it has to be discovered.

    An embedded backbone has its own. Table 2 is used for OpenAI's ViT-B/16 alone (see `is_openai_b16`); on
    any other tower of 12 layers of 12 heads it has to be requested by name: `read_roles("table2")`.

    >>> from dear.clip.config import ClipConfig
    >>> known_roles(Clip(ClipConfig.named("ViT-B-16"), "openai/clip-vit-base-patch16")).rule
    'table2'
    >>> known_roles(Clip(ClipConfig.named("ViT-B-32"), "openai/clip-vit-base-patch32")) is None
    True
    """
    packaged = EMBEDDED / clip.name / "roles.json"
    if packaged.is_file():
        roles = RoleMap.load(packaged)
        if roles.fingerprint == clip.fingerprint:
            return roles
    return RoleMap.table2() if is_openai_b16(clip) else None


def is_openai_b16(clip: Clip) -> bool:
    """Whether a backbone is OpenAI's ViT-B/16, by its name, its shape and its activation.

    Its name must be the hub's ("openai/clip-vit-base-patch16"), that of a folder downloaded from there, or
    that of OpenAI's file ("ViT-B-16.pt"); LAION's weights of the same shape have another activation.
    """
    vision = clip.config.vision
    shape = (vision.layers, vision.heads, vision.width, vision.patch_size, vision.image_size)
    return (
        _OPENAI_B16.fullmatch(clip.name) is not None
        and shape == (12, 12, 768, 16, 224)
        and vision.activation == "quick_gelu"
    )


def read_roles(source: str | os.PathLike[str]) -> RoleMap:
    """A role map by file, or Table 2 by its name.

    >>> read_roles("table2").counts()["core"]
    28
    """
    return RoleMap.table2() if os.fspath(source) == TABLE2 else RoleMap.load(source)


def resolve_roles(roles: str | os.PathLike[str] | RoleMap | None, clip: Clip) -> RoleMap | None:
    """The role map, checked against the backbone; None: the packaged one, if there is one."""
    if roles is None:
        return known_roles(clip)
    checked = roles if isinstance(roles, RoleMap) else read_roles(roles)
    checked.check(clip)
    return checked
