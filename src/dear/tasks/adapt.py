"""Training on a user's own images: `dear adapt`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.heads.roles import RoleMap
from dear.runs.folder import check_folder
from dear.runs.model import Model
from dear.runs.spec import Spec
from dear.shortcuts.without import Without
from dear.train.fit import fit
from dear.train.setup.prepare import prepare
from dear.utils.files import PathLike
from dear.utils.progress import Progress

_log = logging.getLogger("dear")


def adapt(
    data: PathLike | ImageSet,
    out: PathLike | None = None,
    spec: Spec | None = None,
    *,
    backbone: PathLike | Clip | None = None,
    roles: PathLike | RoleMap | None = None,
    without: Any = None,
    examples: PathLike | Mapping[str, PathLike] | None = None,
    way: str = "auto",
    mode: str | None = None,
    device: str = "auto",
    resume: bool = False,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    **changes: Any,
) -> Model:
    """Adapt a backbone to the user's own images.

    Args:
        data: what `open_data` takes (its training split is used), or an image set.
        out: run folder; None keeps the result in memory.
        spec: how to train; None: the defaults of `Spec`.
        backbone: what `dear.load` takes, or a loaded backbone; None: that of `spec`.
        roles: role map or its file, for methods that use roles; None: the backbone's own.
        without: concepts to remove before training ("location", "location,color"), or a `Without`.
        examples: images that show the values of the only concept to remove, one folder per value;
            for several concepts a mapping from concept to folder.
        way: how the concepts are removed ("words", "heads", …); "auto" chooses on the training images.
        mode: how the result will predict; checked before training.
        device: "auto", "cpu", "cuda", ...
        resume: continue an interrupted run in `out`.
        progress: called with (stage, done, total).
        stop: asked after every step; True stops.
        changes: fields of `Spec` by name, instead of those in `spec`.

    Raises:
        DearError: anything a user can correct, in one sentence.

    Example:
        >>> adapt("photos/", "run", method="dear", shots=16, recipe={"epochs": 5})   # doctest: +SKIP
    """
    if out is not None:
        check_folder(out, resume)
    if not isinstance(data, ImageSet):
        changes["data"] = data
    if backbone is not None and not isinstance(backbone, Clip):
        changes["backbone"] = backbone
    if roles is not None and not isinstance(roles, RoleMap):
        changes["roles"] = roles
    if without is None and way != "auto":
        changes["way"] = way
    if examples is not None and without is None:
        raise UsageError("examples show the values of a concept to remove; say which concept")
    if way != "auto" and without is None and not (spec and spec.without):
        raise UsageError(f"way = {way!r} is how a concept is removed; say which concept")
    job = prepare(
        (spec or Spec()).changed(**changes),
        data if isinstance(data, ImageSet) else None,
        clip=backbone if isinstance(backbone, Clip) else None,
        roles=roles if isinstance(roles, RoleMap) else None,
        without=None if without is None else Without.of(without, way, examples),
        device=device,
        progress=progress,
    )
    job.method.pick_mode(mode)
    for notice in job.notices:
        _log.warning("dear: %s", notice)
    return fit(job, out, resume=resume, progress=progress, stop=stop)
