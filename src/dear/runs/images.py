"""The images of a run: those it was trained on, and other splits of the same data."""

from __future__ import annotations

from dear.data.images import ImageSet
from dear.data.open import HELD_OUT_SPLIT, open_data
from dear.data.shots import few_shot
from dear.data.unreadable import check_images
from dear.errors import DataError, UsageError
from dear.runs.folder import read_config
from dear.runs.spec import Spec
from dear.utils.files import PathLike


def run_images(run: PathLike | Spec, split: str = HELD_OUT_SPLIT) -> ImageSet:
    """A split of the dataset that a run was trained on, with the classes of the run.

    Classes that this split does not have are left out.

    Raises:
        UsageError: the run does not name a dataset.
        DataError: the dataset cannot be opened.
    """
    spec = run if isinstance(run, Spec) else read_config(run)
    name = (spec.dataset or "the training") if isinstance(run, Spec) else run
    if spec.data is None:
        raise UsageError(f"{name}: its dataset is not recorded; pass data", hint="report-data")
    try:
        images = open_data(spec.data, split, root=spec.root, margin=spec.margin)
    except DataError as error:
        raise DataError(f"{name}: its images cannot be opened again ({error})", hint="report-data") from None
    known = [name for name in spec.classes if name in set(images.classes)]
    return images.select_classes(known) if known and tuple(known) != tuple(images.classes) else images


def training_images(run: PathLike | Spec) -> ImageSet:
    """The images that a run was trained on: its classes, its draw of shots, without unreadable files.

    Raises:
        UsageError: the run does not name a dataset.
        DataError: the dataset cannot be opened, or none of its images can be read.
    """
    spec = run if isinstance(run, Spec) else read_config(run)
    return draw_training_images(run_images(run, spec.split), spec)


def draw_training_images(images: ImageSet, spec: Spec) -> ImageSet:
    """The images of a set that a training with this Spec uses: its classes, its shots, readable ones."""
    if spec.classes and spec.classes != tuple(images.classes):
        images = images.select_classes(spec.classes)
    if spec.shots:
        images = few_shot(images, spec.shots, spec.seed)
    return check_images(images, "skip").kept
