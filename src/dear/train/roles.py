"""The role map of a backbone: given, shipped with it, cached, or discovered on the training images."""

from __future__ import annotations

from pathlib import Path

from dear._io.files import PathLike
from dear._io.progress import Progress
from dear._io.user_cache import cache_folder
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.errors import DearError, DiskError
from dear.heads.discover import discover_roles
from dear.heads.known_roles import known_roles, read_roles
from dear.heads.roles import RoleMap
from dear.heads.stability import warnings_about

MOST_IMAGES = 2000  #: images that an automatic discovery looks at


def roles_for(
    clip: Clip,
    images: ImageSet,
    given: PathLike | RoleMap | None,
    progress: Progress | None = None,
) -> tuple[RoleMap, list[str]]:
    """A role map for a backbone, and what the user should know about it.

    A map that was given is taken. Otherwise the backbone's own one, then one that was found earlier for the
    same weights and kept in the user's cache folder; at last roles are discovered on `images`, and kept.
    """
    if given is not None:
        roles = given if isinstance(given, RoleMap) else read_roles(given)
        return roles, warnings_about(roles) if roles.evidence else []
    known = known_roles(clip)
    if known is not None:
        return known, []
    kept = kept_path(clip)
    if kept.is_file():
        try:
            found = RoleMap.load(kept)
            found.check(clip)
        except DearError:  # of an older version, or damaged: it is found again
            kept.unlink(missing_ok=True)
        else:
            told = f"roles of {clip.name} were found before and are kept in {kept}"
            return found, [told, *warnings_about(found)]
    return _find(clip, images, kept, progress)


def kept_path(clip: Clip) -> Path:
    """Where the role map of a backbone is kept."""
    return cache_folder() / "roles" / f"{clip.fingerprint.removeprefix('sha256:')[:32]}.json"


def _find(clip: Clip, images: ImageSet, kept: Path, progress: Progress | None) -> tuple[RoleMap, list[str]]:
    """Discover roles on up to `MOST_IMAGES` images, spread evenly over the set."""
    step = -(-len(images) // MOST_IMAGES)
    some = images.subset(range(0, len(images), step))
    found = discover_roles(clip, some, concepts="tags", progress=progress)
    counts = ", ".join(f"{number} {kind}" for kind, number in found.counts().items())
    notices = [f"no role map of {clip.name} was given; roles were found on {len(some)} images ({counts})"]
    notices += warnings_about(found)
    try:
        found.save(kept)
    except DiskError as error:
        notices.append(f"the role map could not be kept for the next time: {error}")
    return found, notices
