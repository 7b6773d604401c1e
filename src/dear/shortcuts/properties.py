"""One number per property and image, and what marks and duplicates are found by: a small copy and a hash.

Light, color and the edge are measured on a copy of 128 x 128 pixels, sharpness on one of 256 x 256, the 8 x 8
blocks of JPEG on the pixels as they are: resizing would blur them away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dear.data.duplicates import Prints
from dear.data.images import ImageSet
from dear.errors import UsageError
from dear.images.views import threaded
from dear.shortcuts.files import FileFacts, file_facts
from dear.utils.progress import Progress, silent

Floats = NDArray[np.float64]
SIDE, FINE, EDGE = 128, 256, 4  #: pixels
BLOCK = 8  #: pixels of a JPEG block
_BATCH = 64
_NATIVE = 1024  #: blocks are looked for in at most this many rows and columns


@dataclass(frozen=True)
class Property:
    """A number that every image has."""

    name: str
    low: str  #: what an image with a low value is called, and with a high one
    high: str
    edit: str = ""  #: which edit changes it (`dear.shortcuts.edits`); empty: none, as a model does not see it


PROPERTIES: tuple[Property, ...] = (
    Property("brightness", "dark", "bright", "brightness"),
    Property("contrast", "low in contrast", "high in contrast", "contrast"),
    Property("darkest pixels", "with deep blacks", "without blacks", "contrast"),
    Property("brightest pixels", "without highlights", "with white areas", "brightness"),
    Property("saturation", "gray", "colorful", "saturation"),
    Property("red", "without red", "reddish", "cast"),
    Property("blue", "without blue", "bluish", "cast"),
    Property("sharpness", "blurred", "sharp", "sharpness"),
    Property("edge red", "with an edge low in red", "with an edge high in red", "edge"),
    Property("edge green", "with an edge low in green", "with an edge high in green", "edge"),
    Property("edge blue", "with an edge low in blue", "with an edge high in blue", "edge"),
    Property("edge brightness", "with a dark edge", "with a bright edge", "edge"),
    Property("edge spread", "with an edge of one color", "with a varied edge", "edge"),
    Property("blocks", "without compression blocks", "with compression blocks", "compression"),
    Property("width", "small", "large", "size"),
    Property("aspect", "tall", "wide", "aspect"),
)


@dataclass(frozen=True, eq=False)
class Measured:
    """What was measured of n images."""

    values: Floats  #: [n, P], one column per entry of `PROPERTIES`
    small: NDArray[np.uint8]  #: the images at 32 x 32, uint8 [n, 32, 32, 3]
    hashes: NDArray[np.uint64]  #: difference hashes of the images and of their mirror images, uint64 [n, 2]
    files: tuple[FileFacts | None, ...]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def prints(self) -> Prints:
        """What copies are found by."""
        return Prints(self.small, self.hashes)

    def column(self, name: str) -> Floats:
        """The values [n] of one property."""
        return self.values[:, property_place(name)]

    def find_column(self, name: str) -> Floats | None:
        """The values [n] of a property; None for a mark or a fact of the files."""
        return self.column(name) if name in {each.name for each in PROPERTIES} else None

    def subset(self, places: Sequence[int]) -> Measured:
        """The same of some images."""
        rows = np.asarray(places, dtype=np.int64)
        return Measured(
            self.values[rows], self.small[rows], self.hashes[rows], tuple(self.files[row] for row in rows)
        )


def property_place(name: str) -> int:
    """Column of a property."""
    names = [each.name for each in PROPERTIES]
    if name not in names:
        raise UsageError(f"no property of images is called {name!r}; there are {', '.join(names)}")
    return names.index(name)


def measure(images: ImageSet, progress: Progress = silent) -> Measured:
    """Properties, small copies, hashes and file facts of all images of a set."""
    if not len(images):
        raise UsageError(f"{images.name}: has no images")

    def one(index: int) -> tuple[Floats, Prints, FileFacts | None]:
        image = images.image(index)
        return properties_of(image), Prints.of([image]), file_facts(images, index)

    values, prints = np.empty((len(images), len(PROPERTIES))), Prints.empty(len(images))
    files: list[FileFacts | None] = []
    for start in range(0, len(images), _BATCH):
        for row, print_of_image, facts in threaded(one, range(start, min(start + _BATCH, len(images)))):
            values[len(files)] = row
            prints.put(len(files), print_of_image)
            files.append(facts)
        progress("image properties", len(files), len(images))
    return Measured(values, prints.small, prints.hashes, tuple(files))


def properties_of(image: Image.Image) -> Floats:
    """The properties [P] of one image (RGB), in the order of `PROPERTIES`."""
    pixels = _resized(image, SIDE)
    light = pixels.mean(axis=2)
    edge = edge_pixels(pixels)
    low, high = np.percentile(light, (1, 99))
    return np.array(
        (
            light.mean(),
            light.std(),
            low,
            high,
            (pixels.max(axis=2) - pixels.min(axis=2)).mean(),
            pixels[..., 0].mean() - light.mean(),
            pixels[..., 2].mean() - light.mean(),
            np.log(laplacian(_resized(image, FINE).mean(axis=2)).var() + 1e-3),
            *edge.mean(axis=0),
            edge.mean(),
            edge.std(axis=0).mean(),
            blockiness(image),
            image.width,
            image.width / image.height,
        ),
        dtype=np.float64,
    )


def _resized(image: Image.Image, side: int) -> Floats:
    """Float64 [side, side, 3], values 0 to 255."""
    small = image.resize((side, side), Image.Resampling.BILINEAR, reducing_gap=2.0)
    return np.asarray(small, dtype=np.float64)


def edge_pixels(pixels: Floats) -> Floats:
    """The outer pixels [m, 3] of an image [h, w, 3]."""
    inner = np.zeros(pixels.shape[:2], dtype=bool)
    inner[EDGE:-EDGE, EDGE:-EDGE] = True
    return pixels[~inner]


def laplacian(light: Floats) -> Floats:
    """Sum of the four neighbors minus four times the pixel, inside the edge."""
    found: Floats = (
        light[:-2, 1:-1] + light[2:, 1:-1] + light[1:-1, :-2] + light[1:-1, 2:] - 4 * light[1:-1, 1:-1]
    )
    return found


def blockiness(image: Image.Image) -> float:
    """Mean step between neighbors at borders of 8 x 8 blocks over the mean step; 1 where there are none.

    The grid may start at any pixel: the image may have been cropped or turned since it was compressed.
    """
    window = image.crop((0, 0, min(image.width, _NATIVE), min(image.height, _NATIVE)))
    light = np.asarray(window.convert("L"), dtype=np.float64)
    found = []
    for axis in (0, 1):
        steps = np.abs(np.diff(light, axis=axis)).mean(axis=1 - axis)
        if len(steps) < 2 * BLOCK:
            continue
        starts = [steps[start::BLOCK].mean() for start in range(BLOCK)]
        found.append(max(starts) / (np.mean(starts) + 1e-6))
    return float(np.mean(found)) if found else 1.0
