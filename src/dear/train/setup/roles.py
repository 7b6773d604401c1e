"""The role map of a backbone: passed, packaged, cached, or discovered on the training images."""

from __future__ import annotations

from msgspec import structs

from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.errors import DearError, DiskError
from dear.heads.discover import discover_roles, location_of
from dear.heads.known_roles import known_roles, read_roles
from dear.heads.roles import RoleMap
from dear.heads.stability import role_map_warnings
from dear.runs.spec import data_digest, digest
from dear.utils.files import PathLike
from dear.utils.progress import Progress
from dear.utils.user_cache import cache_folder

MOST_IMAGES = 2000  #: images that an automatic discovery looks at


def roles_for(
    clip: Clip, images: ImageSet, roles: PathLike | RoleMap | None, progress: Progress | None = None
) -> tuple[RoleMap, list[str]]:
    """A role map for a backbone, and what the user should know about it.

    A map that is passed is used, else the packaged map of the backbone. Otherwise roles are discovered on up
    to `MOST_IMAGES` images, spread evenly over the set; the map is cached for the same backbone and images.
    """
    if roles is not None:
        roles = roles if isinstance(roles, RoleMap) else read_roles(roles)
        return roles, role_map_warnings(roles) if roles.evidence else []
    known = known_roles(clip)
    if known is not None:
        return known, []
    sample = images.subset(range(0, len(images), -(-len(images) // MOST_IMAGES)))
    cached = cache_folder() / "roles" / f"{digest([clip.identity, data_digest(sample)])[:32]}.json"
    if cached.is_file():
        try:
            role_map = RoleMap.load(cached)
            role_map.check(clip)
            # The weights may have another name and place than at the first discovery.
            role_map = structs.replace(role_map, backbone=clip.name, location=location_of(clip))
        except DearError:  # damaged: discovered again
            cached.unlink(missing_ok=True)
        else:
            notice = f"roles of {clip.name} were discovered before on these {len(sample)} images ({cached})"
            return role_map, [notice, *role_map_warnings(role_map)]
    role_map = discover_roles(clip, sample, concepts="tags", progress=progress)
    counts = ", ".join(f"{number} {kind}" for kind, number in role_map.counts().items())
    notices = [
        f"no role map of {clip.name} was passed; roles were discovered on {len(sample)} images ({counts})"
    ]
    notices += role_map_warnings(role_map)
    try:
        role_map.save(cached)
    except DiskError as error:
        notices.append(f"the role map could not be cached: {error}")
    return role_map, notices
