"""Photos of a dataset in small draws of classes, for `research/shortcuts/photos.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dear.data import open_data
from dear.data.images import ListedImages
from dear.shortcuts.find import find_shortcuts
from dear.shortcuts.properties import ImageMeasurements, measure_properties

CLASSES, MOST = 10, 30
LEARN, TEST = 16, 12
NAMES = tuple(str(number) for number in range(CLASSES))


class Photos:
    """All images of a dataset, without the classes that stand out as they are."""

    def __init__(self, source: str) -> None:
        parts = [open_data(source, split) for split in ("train", "test")]
        self.name, self.parts = Path(source).parent.name, parts
        self.images = [(part, index) for part in parts for index in range(len(part))]
        self.labels = torch.cat([part.labels for part in parts]).numpy()
        self.classes = parts[0].classes
        first = measure_properties(parts[0])
        self.suspicious = {
            one.class_name for one in find_shortcuts(first, parts[0].labels.tolist(), self.classes)
        }
        self._first: ImageMeasurements | None = first

    @property
    def measured(self) -> ImageMeasurements:
        """What was measured of all images, once."""
        if self._first is not None:
            self._measured = joined(self._first, measure_properties(self.parts[1]))
            self._first = None
        return self._measured

    def image(self, place: int) -> Image.Image:
        """One image."""
        part, index = self.images[place]
        return part.image(index)

    def draw(self, count: int, most: int, rng: np.random.Generator) -> list[list[int]]:
        """Images of some classes, at most `count` of each."""
        usable = [label for label, name in enumerate(self.classes) if name not in self.suspicious]
        chosen = rng.choice(usable, count, replace=False)
        return [rng.permutation(np.flatnonzero(self.labels == label))[:most].tolist() for label in chosen]


def joined(*parts: ImageMeasurements) -> ImageMeasurements:
    """What was measured of several sets; facts of files are left out."""
    values, small, hashes = (
        np.concatenate([getattr(one, name) for one in parts]) for name in ("values", "small", "hashes")
    )
    return ImageMeasurements(values, small, hashes, (None,) * len(values))


def listed(images: Sequence[Image.Image], labels: Sequence[int], names: Sequence[str]) -> ListedImages:
    """Images in memory as a set."""
    return ListedImages(tuple(images), torch.tensor(list(labels), dtype=torch.int64), tuple(names))


class Sets:
    """Eight classes of a dataset to learn from and to test on."""

    names = tuple(f"class {number}" for number in range(8))

    def __init__(self, photos: Photos, seed: int) -> None:
        drawn = photos.draw(8, LEARN + TEST, np.random.default_rng(seed))
        self.name, self.seed = photos.name, seed
        self.classes = tuple(photos.classes[int(photos.labels[places[0]])] for places in drawn)
        self.images = [photos.image(place) for places in drawn for place in places[:LEARN]]
        self.labels = np.repeat(np.arange(8), LEARN)
        test = [(place, label) for label, places in enumerate(drawn) for place in places[LEARN:]]
        self.test = [photos.image(place) for place, _ in test]
        self.truth = np.array([label for _, label in test])
        self.others = [image for image, label in zip(self.test, self.truth, strict=True) if label != 0]
