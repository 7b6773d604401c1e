"""Start a labeling session on the images of a pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F

from dear.clip.model import Clip
from dear.data.images import TEMPLATE
from dear.data.open import open_with_splits
from dear.data.unlabeled import open_unlabeled
from dear.errors import DataError
from dear.runs.feature_cache import FeatureCache
from dear.tasks.labeling.answers import AnswerFile
from dear.tasks.labeling.next import open_readable
from dear.tasks.labeling.session import LabelingSession
from dear.tasks.load import load_backbone
from dear.utils.files import PathLike, check_output
from dear.utils.progress import Progress


def start_session(
    pool: PathLike,
    out: PathLike,
    *,
    data: PathLike | None = None,
    classes: Sequence[str] | None = None,
    backbone: PathLike | Clip = "mini",
    template: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> tuple[LabelingSession, tuple[str, ...]]:
    """A session on the images of a pool, and why some images cannot be read.

    Args:
        pool: a folder, a table with a column `path`, or a dataset.
        out: the table of labels, `.csv`.
        data: labels to start with, which can be checked: class folders or a table of the same images.
        classes: names to start with.
        backbone: what `dear.load` takes, or a loaded backbone.
        template: prompt with `{}`; None: "a photo of a {}.".
        device: "auto", "cpu", "cuda", …
        progress: called with (stage, done, total).

    Raises:
        DataError: the pool holds no readable image, or none that the data labels.
    """
    check_output(out)
    clip = load_backbone(backbone, device)
    listed = open_unlabeled(pool)
    file = AnswerFile(out)
    images, unreadable = open_readable(listed)
    if data is not None:
        every, splits = open_with_splits(data)
        keys = [every.key(index) for index in range(len(every))]
        readable = {images.key(index) for index in range(len(images))}
        if readable.isdisjoint(keys):
            raise DataError(f"{data}: labels no image of {pool}; its first is {keys[0]!r}")
        labels = (every.classes[label] for label in every.labels.tolist())
        file.start_with(dict(zip(keys, labels, strict=True)), dict(zip(keys, splits, strict=True)))
    features = F.normalize(FeatureCache().image_features(clip, images, progress), dim=1)
    name = clip.name if isinstance(backbone, Clip) else str(backbone)
    session = LabelingSession(
        images, features, clip, file, classes or (), template or TEMPLATE, str(pool), name
    )
    return session, unreadable
