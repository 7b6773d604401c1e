"""Why a run answers as it does: `dear explain`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.data.open import open_data
from dear.errors import DataError, UsageError
from dear.heads.known_roles import read_roles
from dear.heads.roles import RoleMap
from dear.images.names import find_images
from dear.images.open import ImageLike
from dear.runs.images import training_images
from dear.runs.model import Model, Run
from dear.tasks.explain.dataset import SetExplanation, explain_set
from dear.tasks.explain.explainer import Explainer, find_class
from dear.tasks.explain.explanation import Explanations
from dear.tasks.explain.scores import ScoreParts
from dear.tasks.load import load_model
from dear.utils.files import PathLike, check_output
from dear.utils.notices import note
from dear.utils.progress import Progress


def explain(
    run: Run,
    images: ImageLike | Sequence[ImageLike] | ImageSet | None = None,
    *,
    answer: str | None = None,
    against: str | None = None,
    data: PathLike | ImageSet | None = None,
    split: str = "test",
    roles: PathLike | RoleMap | None = None,
    mode: str | None = None,
    data_root: PathLike | None = None,
    backbone: PathLike | Clip | None = None,
    device: str = "auto",
    out: PathLike | None = None,
    progress: Progress | None = None,
) -> Explanations | SetExplanation:
    """Explain the answers of a run: `dear explain`.

    Args:
        run: run folder, archive, `hf://owner/name`, method or model.
        images: an image, a folder, a pattern or several of them; an image set. None: `data` is explained.
        answer: the class to explain; None: each image's answer, or each of its several labels.
        against: the class to compare with; None: the runner-up. A label of several is compared with its
            threshold.
        data: without `images` a labeled set to explain; with `images` the reference images. None: those the
            run was trained on, while they can be opened.
        split: of the set to explain.
        roles: a role map; None: the run's, or the backbone's own.
        mode: way to predict; None: the usual one.
        data_root: folder of the benchmarks, for a set that is the name of one.
        backbone: for a run folder whose backbone moved.
        device: "auto", "cpu", "cuda", …
        out: page to write.
        progress: called with (stage, images done, images in all).

    Returns:
        `Explanations`, one per image; for a set a `SetExplanation`.

    Raises:
        UsageError: neither images nor a set is named, or a class that the model does not have.
        DataError: images cannot be opened.

    Example:
        >>> import dear
        >>> from dear.methods import build_method
        >>> method = build_method("zeroshot", dear.load("mini"), ("dog", "cat", "bird"))
        >>> images = dear.open_data("world:shortcut-place").subset([0])
        >>> result = explain(method, images, data=images)
        >>> sum(bar.answer for bar in result[0].bars) - result[0].scores[0] < 1e-4
        True
    """
    if images is None and data is None:
        raise UsageError("explain needs images, or data (a labeled set), got neither")
    if images is None and (answer or against):
        raise UsageError(
            "answer and against are for images; leave them out, because a set is explained by its answers"
        )
    check_output(out)
    model = load_model(run, backbone, device)
    for name in (answer, against):
        if name is not None:
            find_class(model.classes, name)  # before any work
    reference = _open(data, "train", data_root) if images is not None and data is not None else None
    explainer = explainer_of(model, reference, roles, mode, progress)
    if images is None:
        assert data is not None
        result: Explanations | SetExplanation = explain_set(
            explainer, _open(data, split, data_root), progress
        )
    else:
        result = explainer.explain(_images(images), answer, against, progress)
    if out is not None:
        result.write_page(out)
    return result


def explainer_of(
    model: Model,
    reference: ImageSet | None = None,
    roles: PathLike | RoleMap | None = None,
    mode: str | None = None,
    progress: Progress | None = None,
) -> Explainer:
    """An explainer with reference images: None means the run's training images, while they can be opened."""
    if reference is None:
        reference = reference_images(model)
    if reference is None:
        note("the run's training images are not found; name other images to see answers without a role")
    role_map = roles if roles is None or isinstance(roles, RoleMap) else read_roles(roles)
    return Explainer(ScoreParts(model, reference, role_map, mode, progress))


def reference_images(model: Model) -> ImageSet | None:
    """The images that a model was trained on, to compare others with; None where they cannot be opened."""
    spec = model.spec
    if spec is None or spec.data is None:
        return None
    try:
        return training_images(spec)
    except DataError:
        return None


def _open(data: PathLike | ImageSet, split: str, root: PathLike | None) -> ImageSet:
    return data if isinstance(data, ImageSet) else open_data(data, split, root=root)


def _images(images: ImageLike | Sequence[ImageLike] | ImageSet) -> Sequence[ImageLike] | ImageSet:
    """Names of files, folders and patterns as files; everything else as it is."""
    if isinstance(images, ImageSet):
        return images
    several: list[ImageLike] = [*images] if isinstance(images, list | tuple) else [cast(ImageLike, images)]
    names = [os.fspath(one) for one in several if isinstance(one, str | os.PathLike)]
    return find_images(names) if len(names) == len(several) else several
