"""Groups of images: class x value of something beside the class, where the value is known for every image."""

from __future__ import annotations

from dear.data.images import ImageSet


def values_of(images: ImageSet) -> tuple[str, ...] | None:
    """The value that each image has beside its class: its group where the set has groups, else its domain.

    >>> from dear import world
    >>> values_of(world.task("shortcut-place", "train"))[:2]
    ('beach', 'beach')
    """
    groups: tuple[str, ...] | None = getattr(images, "groups", None)
    return images.domains if groups is None else groups


def group_names(images: ImageSet) -> tuple[str, ...] | None:
    """The group of each image, class and value; None where no values are known.

    >>> from dear import world
    >>> group_names(world.task("shortcut-place", "train"))[0]
    'dog, beach'
    """
    values = values_of(images)
    if values is None:
        return None
    labels = images.labels.tolist()
    return tuple(f"{images.classes[label]}, {value}" for label, value in zip(labels, values, strict=True))
