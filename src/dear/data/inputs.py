"""Images and labels that Python callers pass: files, bytes, Pillow images, arrays, tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from dear.data.images import ImageSet
from dear.errors import InputError
from dear.images.arrays import from_array
from dear.images.names import find_images
from dear.images.open import ImageLike, open_image


def is_frame(data: object) -> bool:
    """Whether data is a pandas or polars frame."""
    return hasattr(data, "columns") and hasattr(data, "dtypes")


def as_images(X: Any) -> tuple[ImageLike, ...]:
    """A tuple of files and Pillow images.

    X is a sequence of files, bytes of image files, Pillow images, arrays, or tensors; a pandas or polars
    frame with a column `path` or `image`; one Pillow image, the bytes of one, one array, or a batch
    [n, H, W, 3] or [n, 3, H, W].

    Raises:
        InputError: names the first item that is not an image.
    """
    if isinstance(X, str | os.PathLike):
        raise InputError(f"images must be a list, got {os.fspath(X)!r}; use [{os.fspath(X)!r}]")
    if is_frame(X):
        column = next((name for name in ("path", "image") if name in X.columns), None)
        if column is None:
            raise InputError(
                f"a frame of images must have a column path or image, got {', '.join(map(str, X.columns))}"
            )
        X = X[column]
    if isinstance(X, Image.Image | bytes | bytearray):
        return (_as_image(X, 0),)
    numeric = isinstance(X, Tensor) or (isinstance(X, np.ndarray) and X.dtype.kind in "biuf")
    if numeric and X.ndim in (2, 3):
        return (from_array(X, "the image"),)
    try:
        items = list(X)
    except TypeError:
        raise InputError(f"images must be a list, got {type(X).__name__}") from None
    return tuple(_as_image(item, index) for index, item in enumerate(items))


def find_inputs(images: Any) -> Any:
    """Images to predict: the files of a path, a folder, a pattern, or a list of these; a set is returned.

    Returns:
        An image set, or a sequence of files and Pillow images.
    """
    if isinstance(images, ImageSet):
        return images
    items = (images,) if isinstance(images, str | os.PathLike) else as_images(images)
    if all(isinstance(item, str | os.PathLike) for item in items):
        return find_images([os.fspath(item) for item in items])  # type: ignore[arg-type]
    return items


def _as_image(item: Any, index: int) -> ImageLike:
    if isinstance(item, Image.Image | str | os.PathLike):
        return item
    if isinstance(item, bytes | bytearray | memoryview):
        try:
            return open_image(bytes(item))
        except InputError as error:
            raise InputError(f"image {index}: {error}") from None
    if isinstance(item, np.ndarray | Tensor):
        return from_array(item, f"image {index}")
    raise InputError(
        f"image {index} must be a file, bytes, a Pillow image, an array, or a tensor, got "
        f"{type(item).__name__}"
    )


def check_labels(y: Any, count: int) -> np.ndarray[Any, Any]:
    """Labels as an array, one per image; missing labels and labels of several types are refused.

    Raises:
        InputError: names the first missing label, or the types.
    """
    values = y.tolist() if hasattr(y, "tolist") else list(y)  # before NumPy converts all of them to text
    missing = missing_labels(values)
    if missing:
        raise InputError(f"label {missing[0]} is missing; add it, or leave out the image")
    kinds = {_label_kind(label) for label in values}
    if len(kinds) > 1:
        raise InputError(f"labels must have one type, got several ({', '.join(sorted(kinds))})")
    try:
        labels = np.array(values)
    except ValueError:
        raise InputError("labels must be a list with one label per image, got nested lists") from None
    if labels.ndim != 1:
        raise InputError(
            f"labels must be a list with one label per image, got the shape {list(labels.shape)}"
        )
    if len(labels) != count:
        raise InputError(f"labels must have {count} entries, one per image, got {len(labels)} labels")
    return labels


def as_indicators(y: Any) -> np.ndarray[Any, Any] | None:
    """An indicator matrix as bool [n, C]; None where y is no matrix.

    Raises:
        InputError: the matrix contains other numbers than 0 and 1, or has one column.

    >>> as_indicators([[1, 0], [1, 1]]).tolist(), as_indicators(["cat", "dog"])
    ([[True, False], [True, True]], None)
    """
    values = y.toarray() if hasattr(y, "toarray") else y
    try:
        matrix = np.asarray(values)
    except ValueError:
        raise InputError("labels must be one per image, or rows of 0 and 1 of equal length") from None
    if matrix.ndim != 2:
        return None
    if matrix.dtype.kind not in "biuf" or not np.isin(matrix, (0, 1)).all():
        invalid = next(value for value in matrix.ravel().tolist() if value not in (0, 1))
        raise InputError(
            f"several labels per image must be an indicator matrix of 0 and 1, got {invalid!r}; "
            "scikit-learn's MultiLabelBinarizer builds one from lists of names"
        )
    if matrix.shape[1] < 2:
        raise InputError("an indicator matrix needs at least two columns, one per class, got 1")
    return matrix.astype(bool)


def missing_labels(labels: Sequence[Any]) -> list[int]:
    """Indices of labels that are None, NaN, or another mark of a missing value.

    >>> missing_labels(["cat", None, "dog", float("nan")])
    [1, 3]
    """
    return [index for index, label in enumerate(labels) if is_missing(label)]


def unlabeled_indices(labels: Any) -> list[int]:
    """Indices of images without a label: None among names, -1 among whole numbers.

    >>> unlabeled_indices(["cat", None]), unlabeled_indices([3, -1]), unlabeled_indices(["cat", "-1"])
    ([1], [1], [])
    """
    values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    present = [label for label in values if label is not None]
    are_numbers = all(
        isinstance(label, int | np.integer) and not isinstance(label, bool) for label in present
    )
    return [index for index, label in enumerate(values) if label is None or (are_numbers and label == -1)]


def is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, or another mark of a missing value.

    >>> [is_missing(value) for value in (None, float("nan"), 0, "")]
    [True, True, False, False]
    """
    if isinstance(value, np.ndarray):
        return False
    try:
        return value is None or bool(value != value)  # noqa: PLR0124 - NaN and NaT differ from themselves
    except TypeError:  # pandas.NA has no truth value
        return True
    except ValueError:  # a tensor
        return False


def _label_kind(label: Any) -> str:
    """The type of a label: "number" for whole and decimal numbers, "str", "bool", or another."""
    if isinstance(label, bool | np.bool_):
        return "bool"
    if isinstance(label, str):
        return "str"
    return "number" if isinstance(label, int | float | np.number) else type(label).__name__


def label_names(labels: Sequence[Any], names: Any) -> tuple[str, ...]:
    """The names of sorted labels: the labels as text, or those in `names`.

    `names` is a mapping from label to name, or names in the order of the labels.
    """
    if names is None:
        return tuple(str(label) for label in labels)
    if not hasattr(names, "keys"):
        if len(names) != len(labels):
            raise InputError(
                f"class_names must have {len(labels)} names, one per label, got {len(names)} class names"
            )
        texts = [str(name) for name in names]
    else:
        missing = [label for label in labels if label not in names]
        if missing:
            raise InputError(
                f"class_names must name each label, but has no name for the label {missing[0]!r}"
            )
        texts = [str(names[label]) for label in labels]
    for index, text in enumerate(texts):
        if texts.index(text) < index:
            raise InputError(
                f"the labels {labels[texts.index(text)]!r} and {labels[index]!r} are both named {text!r}; "
                "rename one or merge them"
            )
    return tuple(texts)
