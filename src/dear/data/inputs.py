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
from dear.images.views import open_image

ImageLike = str | os.PathLike[str] | Image.Image


def is_frame(data: object) -> bool:
    """Whether data is a pandas or polars frame."""
    return hasattr(data, "columns") and hasattr(data, "dtypes")


def as_images(X: Any) -> tuple[ImageLike, ...]:
    """A tuple of files and Pillow images.

    X holds files, bytes of image files, Pillow images, arrays, or tensors in any sequence; or is a pandas or
    polars frame with a column `path` or `image`, one Pillow image, one image's bytes, one array, or a batch
    [n, H, W, 3] or [n, 3, H, W].

    Raises:
        InputError: names the first item that is not an image.
    """
    if isinstance(X, str | os.PathLike):
        raise InputError(f"images must come in a list: [{os.fspath(X)!r}] instead of {os.fspath(X)!r}")
    if is_frame(X):
        column = next((name for name in ("path", "image") if name in X.columns), None)
        if column is None:
            raise InputError(
                f"a frame of images needs a column path or image, got {', '.join(map(str, X.columns))}"
            )
        X = X[column]
    if isinstance(X, Image.Image | bytes | bytearray):
        return (_one(X, 0),)
    numeric = isinstance(X, Tensor) or (isinstance(X, np.ndarray) and X.dtype.kind in "biuf")
    if numeric and X.ndim in (2, 3):
        return (from_array(X, "the image"),)
    try:
        items = list(X)
    except TypeError:
        raise InputError(f"images must come in a list, got {type(X).__name__}") from None
    return tuple(_one(item, place) for place, item in enumerate(items))


def find_inputs(images: Any) -> Any:
    """Images to predict: the files of a path, a folder, a pattern, or a list of these; a set as it is.

    Returns:
        An image set, or a sequence of files and Pillow images.
    """
    if isinstance(images, ImageSet):
        return images
    items = (images,) if isinstance(images, str | os.PathLike) else as_images(images)
    if all(isinstance(item, str | os.PathLike) for item in items):
        return find_images([os.fspath(item) for item in items])  # type: ignore[arg-type]
    return items


def _one(item: Any, place: int) -> ImageLike:
    if isinstance(item, Image.Image | str | os.PathLike):
        return item
    if isinstance(item, bytes | bytearray | memoryview):
        try:
            return open_image(bytes(item))
        except InputError as error:
            raise InputError(f"image {place}: {error}") from None
    if isinstance(item, np.ndarray | Tensor):
        return from_array(item, f"image {place}")
    raise InputError(
        f"image {place} must be a file, bytes, a Pillow image, an array, or a tensor, got "
        f"{type(item).__name__}"
    )


def check_labels(y: Any, count: int) -> np.ndarray[Any, Any]:
    """Labels as an array, one per image; missing labels and labels of several kinds are refused.

    Raises:
        InputError: names the first label that is missing, or the kinds.
    """
    values = y.tolist() if hasattr(y, "tolist") else list(y)  # before NumPy makes text of all of them
    missing = missing_labels(values)
    if missing:
        raise InputError(f"label {missing[0]} is missing; give every image a label or leave it out")
    kinds = {_label_kind(label) for label in values}
    if len(kinds) > 1:
        raise InputError(f"labels are of several kinds ({', '.join(sorted(kinds))}); use one")
    try:
        labels = np.array(values)
    except ValueError:
        raise InputError("labels must be a list with one label per image; got nested lists") from None
    if labels.ndim != 1:
        raise InputError(
            f"labels must be a list with one label per image; got the shape {list(labels.shape)}"
        )
    if len(labels) != count:
        raise InputError(f"{count} images but {len(labels)} labels; give one label per image")
    return labels


def as_indicators(y: Any) -> np.ndarray[Any, Any] | None:
    """An indicator matrix as bool [n, C]; None where y is no matrix.

    Raises:
        InputError: the matrix holds other numbers than 0 and 1, or only one column.

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
        odd = next(value for value in matrix.ravel().tolist() if value not in (0, 1))
        raise InputError(
            f"several labels per image must be an indicator matrix of 0 and 1, got {odd!r}; "
            "scikit-learn's MultiLabelBinarizer builds one from lists of names"
        )
    if matrix.shape[1] < 2:
        raise InputError("an indicator matrix needs at least two columns, one per class, got 1")
    return matrix.astype(bool)


def missing_labels(labels: Sequence[Any]) -> list[int]:
    """Places of labels that are None, NaN, or a table's mark for a missing value.

    >>> missing_labels(["cat", None, "dog", float("nan")])
    [1, 3]
    """
    return [place for place, label in enumerate(labels) if _is_missing(label)]


def unlabeled_places(labels: Any) -> list[int]:
    """Places of images without a label: None among names, -1 among whole numbers.

    >>> unlabeled_places(["cat", None]), unlabeled_places([3, -1]), unlabeled_places(["cat", "-1"])
    ([1], [1], [])
    """
    values = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    present = [label for label in values if label is not None]
    whole = all(isinstance(label, int | np.integer) and not isinstance(label, bool) for label in present)
    return [place for place, label in enumerate(values) if label is None or (whole and label == -1)]


def _is_missing(label: Any) -> bool:
    try:
        return label is None or bool(label != label)  # noqa: PLR0124 - NaN and NaT differ from themselves
    except TypeError:  # pandas.NA has no truth value
        return True
    except ValueError:  # an array
        return False


def _label_kind(label: Any) -> str:
    """The kind of a label: whole and decimal numbers are one kind, texts and truth values others."""
    if isinstance(label, bool | np.bool_):
        return "bool"
    if isinstance(label, str):
        return "str"
    return "number" if isinstance(label, int | float | np.number) else type(label).__name__


def named(labels: Sequence[Any], names: Any) -> tuple[str, ...]:
    """The words for the different labels, sorted: the labels themselves as text, or `names`.

    These are a mapping from label to name, or names in the order of the labels.
    """
    if names is None:
        return tuple(str(label) for label in labels)
    if not hasattr(names, "keys"):
        if len(names) != len(labels):
            raise InputError(
                f"{len(labels)} different labels but {len(names)} class names; give one for each"
            )
        words = [str(name) for name in names]
    else:
        missing = [label for label in labels if label not in names]
        if missing:
            raise InputError(f"class_names has no name for the label {missing[0]!r}")
        words = [str(names[label]) for label in labels]
    for place, word in enumerate(words):
        if words.index(word) < place:
            raise InputError(
                f"the labels {labels[words.index(word)]!r} and {labels[place]!r} are both named {word!r}; "
                "rename one or merge them"
            )
    return tuple(words)
