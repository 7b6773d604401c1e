"""`ImageSet`, the common form of every data source: images with labels, classes and a prompt template."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, overload, runtime_checkable

import torch
from PIL import Image
from torch import Tensor

from dear.errors import DataError, UsageError
from dear.images.open import ImageLike, open_image
from dear.images.views import Size, read_views

if TYPE_CHECKING:
    from typing import Self

TEMPLATE = "a photo of a {}."
UNLABELED = -1  #: label of an image without one, as in scikit-learn


@runtime_checkable
class ImageSet(Protocol):
    """One split of a dataset: n images, each with a label."""

    @property
    def name(self) -> str:
        """Name of the dataset; few-shot draws depend on it."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Readable class names; a label is an index into them."""

    @property
    def template(self) -> str:
        """The dataset's prompt, with `{}` for the class name."""

    @property
    def labels(self) -> Tensor:
        """int64 [n]."""

    @property
    def domains(self) -> tuple[str, ...] | None:
        """The domain of each image; None if the dataset has no domains."""

    def __len__(self) -> int:
        """Number of images."""

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        """The evaluation view, uint8 [b, 3, size, size]: short side to `size` bicubic, center crop."""

    def image(self, index: int) -> Image.Image:
        """A whole image, RGB."""

    def key(self, index: int) -> str:
        """A name of the image that does not depend on the other images."""

    def subset(self, indices: Sequence[int]) -> ImageSet:
        """The images at `indices`, in that order, with the same classes."""

    def select_classes(self, names: Sequence[str]) -> ImageSet:
        """The images of some classes; labels are indices into `names`."""


@dataclass(frozen=True)
class DataSource:
    """The arguments of `open_data` for a dataset, with absolute paths."""

    spec: str
    root: str | None = None


class BaseImageSet:
    """Base of image sets that are dataclasses with one entry per image in some of their fields."""

    per_image: ClassVar[tuple[str, ...]]  #: names of those fields, other than labels, domains and groups
    classes: tuple[str, ...]
    labels: Tensor
    #: bool [n, C] if images have several labels; `labels` then has one of them, for draws and folds
    targets: Tensor | None = None
    texts: Mapping[str, Sequence[str]] | None = None  #: several texts per class, if the data has them
    #: the parent of each class and of each inner node, if classes form a tree
    parents: Mapping[str, str] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        name = getattr(self, "name", "")
        return f"<{type(self).__name__} {name!r}: {len(self)} images of {len(self.classes)} classes>"

    @overload
    def __getitem__(self, index: int) -> tuple[Image.Image, int]: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> tuple[Image.Image, int] | Self:
        """An image, RGB, and its label, an index into `classes`; a slice returns a subset."""
        if isinstance(index, slice):
            return self.subset(range(len(self))[index])
        return _item(self, index)  # type: ignore[arg-type]

    def subset(self, indices: Sequence[int]) -> Self:
        """The images at `indices`, in that order, with the same classes."""
        order = [int(index) for index in indices]
        rows = torch.tensor(order, dtype=torch.int64)
        fields: dict[str, Any] = {"labels": self.labels[rows]}
        if self.targets is not None:
            fields["targets"] = self.targets[rows]
        for name in (*self.per_image, "domains", "groups"):
            values = getattr(self, name)
            fields[name] = None if values is None else tuple(values[index] for index in order)
        return replace(self, **fields)  # type: ignore[type-var]

    def select_labels(self, labels: Sequence[int]) -> Self:
        """The images of the classes with these labels, renumbered in this order."""
        names = tuple(self.classes[label] for label in labels)
        if self.targets is not None:
            targets = self.targets[:, list(labels)]
            rows = targets.any(dim=1).nonzero()[:, 0]
            fields = {"labels": main_labels(targets[rows]), "targets": targets[rows], "classes": names}
            return replace(self.subset(rows.tolist()), **fields)  # type: ignore[type-var]
        chosen, renumbered = renumber(self.labels, labels)
        return replace(self.subset(chosen.tolist()), labels=renumbered, classes=names)  # type: ignore[type-var]

    def select_classes(self, names: Sequence[str]) -> Self:
        """The images of some classes; labels are indices into `names`."""
        return self.select_labels(find_classes(self, names))  # type: ignore[arg-type]


class ImageSetWrapper:
    """Base of image sets that change something of another one, `images`.

    Subclasses define `subset` and `select_classes`: those of the other set would lose the change.
    """

    same_content: ClassVar[bool] = True  #: whether the images are those of the other set
    images: ImageSet

    @property
    def name(self) -> str:
        """See `ImageSet`."""
        return self.images.name

    @property
    def classes(self) -> tuple[str, ...]:
        """See `ImageSet`."""
        return self.images.classes

    @property
    def template(self) -> str:
        """See `ImageSet`."""
        return self.images.template

    @property
    def labels(self) -> Tensor:
        """See `ImageSet`."""
        return self.images.labels

    @property
    def domains(self) -> tuple[str, ...] | None:
        """See `ImageSet`."""
        return self.images.domains

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int | slice) -> Any:
        """An image, RGB, and its label; a slice returns a subset."""
        if isinstance(index, slice):
            return self.subset(range(len(self))[index])  # type: ignore[attr-defined]
        return _item(self, index)  # type: ignore[arg-type]

    def image(self, index: int) -> Image.Image:
        """See `ImageSet`."""
        return self.images.image(index)

    def key(self, index: int) -> str:
        """See `ImageSet`."""
        return self.images.key(index)


def _item(images: ImageSet, index: int) -> tuple[Image.Image, int]:
    """An image, RGB, and its label; a negative index counts from the end."""
    try:
        index = operator.index(index)
    except TypeError:
        raise UsageError(
            f"index must be a whole number or a slice, got {index!r}; dear.open_data(path, split) opens a "
            "split"
        ) from None
    count = len(images)
    if count == 0:
        raise IndexError(f"the set has no images, got the index {index}")
    if not -count <= index < count:
        raise IndexError(f"index must be from {-count} to {count - 1}, got {index}")
    index %= count
    return images.image(index), int(images.labels[index])


@dataclass(frozen=True, eq=False, repr=False)
class FileImages(BaseImageSet):
    """Images in files, decoded when they are needed."""

    per_image: ClassVar[tuple[str, ...]] = ("paths",)
    name: str  #: of the dataset
    classes: tuple[str, ...]  #: readable names, one per label
    template: str  #: prompt with `{}`
    root: Path  #: the folder of relative `paths`
    paths: tuple[str, ...]  #: one per image, relative to `root`, with `/`
    labels: Tensor  #: int64 [n]
    domains: tuple[str, ...] | None = None  #: one per image, or None
    #: another value per image, such as its background, or None; see `values_of`
    groups: tuple[str, ...] | None = None
    source: DataSource | None = None  #: None if the dataset was not opened by `open_data`
    targets: Tensor | None = None
    texts: Mapping[str, Sequence[str]] | None = None
    parents: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if len(self.labels) != len(self.paths):
            raise DataError(
                f"{self.name}: labels must be {len(self.paths)}, one per image, got {len(self.labels)}"
            )
        invalid = next((path for path in self.paths if not is_utf8(path)), None)
        if invalid is not None:
            raise DataError(f"{self.name}: the file name {invalid!r} is not UTF-8; rename the file")
        if self.domains is not None and len(self.domains) != len(self.paths):
            raise DataError(
                f"{self.name}: domains must be {len(self.paths)}, one per image, got {len(self.domains)}"
            )
        if self.groups is not None and len(self.groups) != len(self.paths):
            raise DataError(
                f"{self.name}: groups must be {len(self.paths)}, one per image, got {len(self.groups)}"
            )

    def path(self, index: int) -> Path:
        """The file of an image."""
        return self.root / self.paths[index]

    def image(self, index: int) -> Image.Image:
        """A whole image, RGB, upright."""
        return open_image(self.path(index))

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        """CLIP's view of some images, decoded by several threads.

        Returns:
            uint8 [b, 3, size, size].
        """
        return read_views([self.path(int(index)) for index in indices], size)

    def key(self, index: int) -> str:
        """The path relative to the dataset's folder."""
        return self.paths[index]


def main_labels(targets: Tensor) -> Tensor:
    """One label [n] of each image of bool [n, C]: that of its classes with the fewest images.

    Draws, folds, and splits treat an image as one of that class, so that rare classes are in every part. An
    image without a label gets the most frequent class. Among classes with the same number of images, the one
    whose images have fewer and rarer labels is chosen, so that the order of classes does not matter.

    >>> main_labels(torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 1], [0, 0, 0]]).bool())
    tensor([1, 0, 2, 0])
    """
    has = targets.long()
    counts, per_image = has.sum(dim=0), has.sum(dim=1)  # [C], [n]
    frequency = has @ counts  # sum over an image's labels [n]
    keys = torch.stack([counts, per_image.square() @ has, frequency @ has])  # [3, C]
    rank = keys.unique(dim=1, return_inverse=True)[1]  # of each class, in lexical order
    labels = torch.where(targets, rank, len(rank)).argmin(dim=1)
    return torch.where(targets.any(dim=1), labels, rank.argmax())


def targets_of(images: ImageSet) -> Tensor | None:
    """Which classes each image shows, bool [n, C]; None where every image has one label."""
    targets: Tensor | None = getattr(images, "targets", None)
    return targets


def label_text(images: ImageSet, index: int, separator: str = ", ") -> str:
    """The class or classes of an image; "none" for an image without one."""
    targets = targets_of(images)
    if targets is None:
        return images.classes[int(images.labels[index])]
    has = targets[index].tolist()
    return separator.join(name for name, shown in zip(images.classes, has, strict=True) if shown) or "none"


def require_one_label(images: ImageSet, task: str) -> None:
    """Raise a DataError where images have several labels, which `task` does not support."""
    if targets_of(images) is not None:
        raise DataError(
            f"{images.name}: {task} needs one label per image, but this dataset has several (labels)"
        )


def is_utf8(name: str) -> bool:
    """Whether a file's name is valid UTF-8; Python writes other bytes as lone surrogates."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def find_classes(images: ImageSet, names: Sequence[str]) -> list[int]:
    """Labels of class names."""
    labels_by_name: dict[str, list[int]] = {}
    for label, name in enumerate(images.classes):
        labels_by_name.setdefault(name, []).append(label)
    labels = []
    for name in names:
        matches = labels_by_name.get(name, [])
        if not matches:
            first = ", ".join(map(repr, images.classes[:5]))
            raise DataError(f"{images.name}: has no class {name!r}; its classes start with {first}")
        if len(matches) > 1:
            raise DataError(
                f"{images.name}: {len(matches)} classes have the name {name!r}; choose them by label"
            )
        labels.append(matches[0])
    return labels


def renumber(labels: Tensor, selected: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Indices of the images with a label in `selected`, and the positions of their labels in it.

    >>> renumber(torch.tensor([4, 2, 4, 7]), [7, 4])
    (tensor([0, 2, 3]), tensor([1, 1, 0]))
    """
    position = {int(label): number for number, label in enumerate(selected)}
    matches = [(index, position[label]) for index, label in enumerate(labels.tolist()) if label in position]
    pairs = torch.tensor(matches, dtype=torch.int64).view(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def select_domains(images: ImageSet, names: Iterable[str]) -> ImageSet:
    """The images of some domains."""
    selected, domains = set(names), images.domains or ()
    unknown = sorted(selected - set(domains))
    if unknown:
        known = ", ".join(sorted(set(domains))) or "none"
        raise DataError(f"{images.name}: has no domain {unknown[0]!r}; its domains are {known}")
    return images.subset([index for index, domain in enumerate(domains) if domain in selected])


def evenly_spaced(total: int, count: int) -> list[int]:
    """At most `count` of `total` indices, evenly spaced.

    >>> evenly_spaced(10, 4), evenly_spaced(3, 4)
    ([0, 2, 5, 7], [0, 1, 2])
    """
    count = min(count, total)
    return [number * total // count for number in range(count)]


def even_subset(images: ImageSet, count: int) -> ImageSet:
    """At most `count` images, evenly spaced over the set."""
    return images if len(images) <= count else images.subset(evenly_spaced(len(images), count))


def values_of(images: ImageSet) -> tuple[str, ...] | None:
    """The value of each image besides its class: its group if the set has groups, else its domain.

    >>> from dear.data.world_images import world_task
    >>> values_of(world_task("shortcut-place", "train"))[:2]
    ('beach', 'beach')
    """
    groups: tuple[str, ...] | None = getattr(images, "groups", None)
    return images.domains if groups is None else groups


def group_names(images: ImageSet) -> tuple[str, ...] | None:
    """The group of each image, class and value; None if no values are known.

    >>> from dear.data.world_images import world_task
    >>> group_names(world_task("shortcut-place", "train"))[0]
    'dog, beach'
    """
    values = values_of(images)
    if values is None:
        return None
    labels = images.labels.tolist()
    return tuple(f"{images.classes[label]}, {value}" for label, value in zip(labels, values, strict=True))


@dataclass(frozen=True, eq=False, repr=False)
class ListedImages(BaseImageSet):
    """An image set of files (or Pillow images) and labels in lists."""

    per_image: ClassVar[tuple[str, ...]] = ("items",)
    items: tuple[ImageLike, ...]  #: files, bytes of files, or Pillow images
    labels: Tensor  #: int64 [n]
    classes: tuple[str, ...]  #: names of the classes
    template: str = TEMPLATE  #: prompt with `{}`
    name: str = "images"
    domains: tuple[str, ...] | None = None
    groups: tuple[str, ...] | None = None  #: another value per image, or None
    targets: Tensor | None = None
    texts: Mapping[str, Sequence[str]] | None = None
    parents: Mapping[str, str] | None = None

    def image(self, index: int) -> Image.Image:
        """A whole image, RGB, upright."""
        return open_image(self.items[index])

    def pixels(self, indices: Sequence[int], size: Size) -> Tensor:
        """CLIP's view of some images, uint8 [b, 3, size, size]."""
        return read_views([self.items[int(index)] for index in indices], size)

    def key(self, index: int) -> str:
        """The path of a file, unchanged; the position in the list for an image in memory."""
        item = self.items[index]
        return Path(item).as_posix() if isinstance(item, str | os.PathLike) else f"item {index}"


def unlabeled_images(items: Sequence[ImageLike]) -> ListedImages:
    """A list of files and Pillow images as a set without labels and classes.

    >>> unlabeled_images(["a.jpg", "b.jpg"]).labels
    tensor([-1, -1])
    """
    labels = torch.full((len(items),), UNLABELED, dtype=torch.int64)
    return ListedImages(tuple(items), labels, ())
