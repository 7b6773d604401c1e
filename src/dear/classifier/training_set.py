"""What a classifier trains on, from the X and y of scikit-learn."""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dear.data.images import TEMPLATE, ImageSet, ListedImages, main_labels, unlabeled_images
from dear.data.inputs import as_images, as_indicators, check_labels, is_frame, label_names, unlabeled_indices
from dear.data.open import open_data
from dear.data.unlabeled import open_unlabeled
from dear.errors import InputError

Labels = NDArray[Any]


def split_unlabeled(X: Any, y: Any, unlabeled: Any) -> tuple[Any, Any, Any]:
    """Labeled images, their labels, and the unlabeled images: of `unlabeled`, or those without a label in y.

    Raises:
        InputError: both name unlabeled images, or there is not one label per image.
    """
    if unlabeled is not None and not isinstance(unlabeled, ImageSet | str | os.PathLike):
        unlabeled = open_unlabeled(unlabeled)
    if y is not None and not isinstance(X, ImageSet | str | os.PathLike):
        items = as_images(X)
        missing = [] if as_indicators(y) is not None else unlabeled_indices(y)
        if missing and unlabeled is not None:
            raise InputError(
                f"y has {len(missing)} images without a label and unlabeled is set too; use one of them"
            )
        if missing and len(y) != len(items):
            raise InputError(f"{len(items)} images but {len(y)} labels; give one label per image")
        if missing:
            unlabeled = unlabeled_images([items[place] for place in missing])
            labeled = sorted(set(range(len(items))) - set(missing))
            labels = y.tolist() if hasattr(y, "tolist") else list(y)
            X, y = [items[place] for place in labeled], [labels[place] for place in labeled]
    return X, y, unlabeled


def training_set(
    X: Any, y: Any, class_names: Any = None, template: str | None = None
) -> tuple[ImageSet, Labels]:
    """The images that `Classifier.fit` trains on, and the labels that `predict` answers with.

    X, y and class_names are as in `Classifier.fit`.
    """
    if y is None and is_frame(X):
        X = open_data(X, "train", template=template)
    if isinstance(X, ImageSet | str | os.PathLike):
        if y is not None or class_names is not None:
            raise InputError("y and class_names must be None with a folder, table or image set")
        images = X if isinstance(X, ImageSet) else open_data(X, "train", template=template)
        return images, np.array(images.classes)
    items = as_images(X)
    if y is None:
        raise InputError(f"y must have one label per image, got None for {len(items)} images")
    matrix = as_indicators(y)
    if matrix is not None:
        return _set_of_several(items, matrix, class_names, template)
    classes, labels = np.unique(check_labels(y, len(items)), return_inverse=True)
    names = label_names(classes.tolist(), class_names)
    if class_names is None and all(name.lstrip("-").isdecimal() for name in names):
        warnings.warn(
            f"the labels are numbers, so CLIP reads {names[0]!r} instead of a name; pass names with "
            "fit(X, y, class_names={...})",
            stacklevel=3,
        )
    return ListedImages(items, torch.as_tensor(labels), names, template or TEMPLATE), classes


def _set_of_several(
    items: tuple[Any, ...], matrix: NDArray[np.bool_], class_names: Any, template: str | None
) -> tuple[ImageSet, Labels]:
    """Images with an indicator matrix [n, C]; without names, classes are numbered as in scikit-learn."""
    if len(matrix) != len(items):
        raise InputError(f"{len(items)} images but {len(matrix)} rows of labels; give one row per image")
    columns = list(range(matrix.shape[1]))
    names = label_names(columns, class_names)
    targets = torch.from_numpy(matrix)
    images = ListedImages(items, main_labels(targets), names, template or TEMPLATE, targets=targets)
    return images, np.array(columns if class_names is None else names)
