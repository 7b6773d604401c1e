"""Properties of images, one number each, and small copies and hashes to find marks and duplicates.

Light, color and the edge are measured on a copy of 128 x 128 pixels, sharpness on one of 256 x 256, and the 8
x 8 blocks of JPEG on the original pixels, because resizing would blur them.
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
from dear.shortcuts.metadata import FileMetadata, read_metadata
from dear.utils.parallel import map_threads
from dear.utils.progress import Progress, silent

Floats = NDArray[np.float64]
SIDE, FINE, EDGE = 128, 256, 4  #: pixels
BLOCK = 8  #: pixels of a JPEG block
_BATCH = 64
_MAX_SIDE = 1024  #: blocks are measured in at most this many rows and columns
CORNERS = ("top left", "top right", "bottom left", "bottom right")
_RADIUS_VECTORS = (np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2) / (SIDE / 2)  # [2, SIDE, SIDE]: y, x


@dataclass(frozen=True)
class Property:
    """A numeric property of images."""

    name: str
    low: str  #: appearance of images with a low value; empty: low values are not reported
    high: str  #: appearance of images with a high value; empty: high values are not reported
    edit: str = ""  #: kind of edit that changes it (`dear.shortcuts.edits`); empty: a model cannot see it
    limit: float = 0.95  #: minimum score of a finding; lower if natural classes hardly differ in it

    @property
    def title(self) -> str:
        """Its name for people; the measures of a color cast share one, and `low` and `high` say more."""
        return "color cast" if self.edit == "cast" else self.name


PROPERTIES: tuple[Property, ...] = (
    Property("brightness", "dark", "bright", "brightness"),
    Property("contrast", "low in contrast", "high in contrast", "contrast"),
    Property("darkest pixels", "with black areas", "without dark areas", "contrast"),
    Property("brightest pixels", "without bright areas", "with white areas", "brightness"),
    Property("saturation", "gray", "colorful", "saturation"),
    Property("red", "with little red", "reddish", "cast"),
    Property("blue", "with little blue", "bluish", "cast"),
    Property("black tint", "with a blue tint in dark areas", "with a red tint in dark areas", "cast", 0.90),
    Property(
        "green black tint",
        "with a purple tint in dark areas",
        "with a green tint in dark areas",
        "cast",
        0.90,
    ),
    Property(
        "white tint", "with a blue tint in bright areas", "with a yellow tint in bright areas", "cast", 0.93
    ),
    Property(
        "green gray tint", "with a purple tint in gray areas", "with a green tint in gray areas", "cast", 0.90
    ),
    Property("vignette", "darker toward the corners", "brighter toward the corners", "vignette", 0.88),
    Property("sharpness", "blurred", "sharp", "sharpness"),
    Property("edge red", "with little red at the edge", "with much red at the edge", "edge"),
    Property("edge green", "with little green at the edge", "with much green at the edge", "edge"),
    Property("edge blue", "with little blue at the edge", "with much blue at the edge", "edge"),
    Property("edge brightness", "with a dark edge", "with a bright edge", "edge"),
    Property("edge spread", "with an edge of one color", "with a varied edge", "edge"),
    Property("brightest corner", "with black corners", "", "edge"),
    Property("darkest corner", "", "with white corners", "edge"),
    *(Property(f"spot {name}", "", f"with a colored spot at the {name}", "mark", 0.90) for name in CORNERS),
    Property("blocks", "without compression blocks", "with compression blocks", "compression"),
    Property("width", "small", "large", "size"),
    Property("aspect", "tall", "wide", "aspect"),
)


@dataclass(frozen=True, eq=False)
class ImageMeasurements:
    """Measurements of n images."""

    values: Floats  #: [n, P], one column per entry of `PROPERTIES`
    small: NDArray[np.uint8]  #: the images at 32 x 32, uint8 [n, 32, 32, 3]
    hashes: NDArray[np.uint64]  #: difference hashes of the images and of their mirror images, uint64 [n, 2]
    files: tuple[FileMetadata | None, ...]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def prints(self) -> Prints:
        """Small copies and hashes, by which duplicates are found."""
        return Prints(self.small, self.hashes)

    def column(self, name: str) -> Floats:
        """The values [n] of one property."""
        return self.values[:, property_column(name)]

    def find_column(self, name: str) -> Floats | None:
        """The values [n] of a property; None for a mark or metadata of files."""
        return self.column(name) if name in {each.name for each in PROPERTIES} else None

    def subset(self, indices: Sequence[int]) -> ImageMeasurements:
        """The measurements of the images at `indices`."""
        rows = np.asarray(indices, dtype=np.int64)
        return ImageMeasurements(
            self.values[rows], self.small[rows], self.hashes[rows], tuple(self.files[row] for row in rows)
        )


def property_column(name: str) -> int:
    """Column of a property in `ImageMeasurements.values`."""
    names = [each.name for each in PROPERTIES]
    if name not in names:
        raise UsageError(f"property must be one of {', '.join(names)}, got {name!r}")
    return names.index(name)


def measure_properties(images: ImageSet, progress: Progress = silent) -> ImageMeasurements:
    """Properties, small copies, hashes and file metadata of all images of a set."""
    if not len(images):
        raise UsageError(f"{images.name} must have at least one image, got none")

    def measure(index: int) -> tuple[Floats, Prints, FileMetadata | None]:
        image = images.image(index)
        return properties_of(image), Prints.of([image]), read_metadata(images, index)

    values, prints = np.empty((len(images), len(PROPERTIES))), Prints.empty(len(images))
    files: list[FileMetadata | None] = []
    for start in range(0, len(images), _BATCH):
        batch = range(start, min(start + _BATCH, len(images)))
        for row, image_prints, metadata in map_threads(measure, batch):
            values[len(files)] = row
            prints.put(len(files), image_prints)
            files.append(metadata)
        progress("image properties", len(files), len(images))
    return ImageMeasurements(values, prints.small, prints.hashes, tuple(files))


def properties_of(image: Image.Image) -> Floats:
    """The properties [P] of one image (RGB), in the order of `PROPERTIES`."""
    pixels = _resize(image, SIDE)
    light = pixels.mean(axis=2)
    edge = edge_pixels(pixels)
    low, high = np.percentile(light, (1, 99))
    fine = _resize(image, FINE)
    return np.array(
        (
            light.mean(),
            light.std(),
            low,
            high,
            (pixels.max(axis=2) - pixels.min(axis=2)).mean(),
            pixels[..., 0].mean() - light.mean(),
            pixels[..., 2].mean() - light.mean(),
            *tints(pixels),
            vignette(light),
            np.log(laplacian(fine.mean(axis=2)).var() + 1e-3),
            *edge.mean(axis=0),
            edge.mean(),
            edge.std(axis=0).mean(),
            *corner_extremes(image),
            *spots(fine),
            blockiness(image),
            image.width,
            image.width / image.height,
        ),
        dtype=np.float64,
    )


def _resize(image: Image.Image, side: int) -> Floats:
    """Float64 [side, side, 3], values 0 to 255."""
    small = image.resize((side, side), Image.Resampling.BILINEAR, reducing_gap=2.0)
    return np.asarray(small, dtype=np.float64)


def edge_pixels(pixels: Floats) -> Floats:
    """The outer pixels [m, 3] of an image [h, w, 3]."""
    inner = np.zeros(pixels.shape[:2], dtype=bool)
    inner[EDGE:-EDGE, EDGE:-EDGE] = True
    return pixels[~inner]


def tints(pixels: Floats) -> tuple[float, float, float, float]:
    """Color of what is usually neutral in an image [h, w, 3], in gray levels.

    Red minus blue and green minus their mean, of the darkest pixels; red minus blue of the brightest ones;
    green minus the mean of both, of the least colorful tenth. Photos of any subject have some nearly neutral
    blacks, whites and grays, so these hardly depend on the class.
    """
    channels = np.sort(pixels.reshape(-1, 3), axis=0)  # [h, w, 3] -> [h * w, 3]
    count = len(channels)
    dark, bright = channels[count // 100], channels[-1 - count // 100]
    spread = pixels.max(axis=2) - pixels.min(axis=2)
    neutral = pixels[spread <= np.quantile(spread, 0.1)].mean(axis=0)
    return (
        float(dark[0] - dark[2]),
        float(dark[1] - (dark[0] + dark[2]) / 2),
        float(bright[0] - bright[2]),
        float(neutral[1] - (neutral[0] + neutral[2]) / 2),
    )


def vignette(light: Floats) -> float:
    """Mean radial slope of the logarithm of light [n, n] in the smooth outer parts; negative: dark corners.

    Without a vignette, smooth surfaces become brighter outward as often as darker.
    """
    logarithm = np.log(light + 8.0)
    down, right = np.gradient(logarithm)
    y, x = _RADIUS_VECTORS
    radius = np.hypot(x, y)
    smooth = (radius**2 > 0.5) & (np.hypot(down, right) < 0.05) & (light > 10)
    if smooth.sum() < 30:
        return 0.0
    return float(((right * x + down * y) / radius)[smooth].mean())


def corner_extremes(image: Image.Image) -> tuple[float, float]:
    """Brightest and darkest color value (0 to 255) among the outermost pixels of the four corners."""
    pixels = np.asarray(image)
    side = max(1, round(0.012 * min(image.size)))
    rows, columns = (np.r_[:side, size - side : size] for size in pixels.shape[:2])
    corners = pixels[np.ix_(rows, columns)]
    return float(corners.max()), float(corners.min())


def spots(fine: Floats) -> tuple[float, ...]:
    """Largest spread of the three colors in each corner of an image [n, n, 3], in the order of `CORNERS`."""
    spread = fine.max(axis=2) - fine.min(axis=2)
    return tuple(float(spread[corner_region(name, len(fine))].max()) for name in CORNERS)


def corner_region(name: str, side: int) -> tuple[slice, slice]:
    """The corner of a square image that `spots` examines: an eighth of its height, a quarter of its width."""
    height, width = side // 8, side // 4
    rows = slice(height) if name.startswith("top") else slice(side - height, side)
    return rows, slice(width) if name.endswith("left") else slice(side - width, side)


def laplacian(light: Floats) -> Floats:
    """Sum of the four neighbors minus four times the pixel, inside the edge."""
    second: Floats = (
        light[:-2, 1:-1] + light[2:, 1:-1] + light[1:-1, :-2] + light[1:-1, 2:] - 4 * light[1:-1, 1:-1]
    )
    return second


def blockiness(image: Image.Image) -> float:
    """Mean step between neighbors at borders of 8 x 8 blocks over the mean step; 1 where there are none.

    The grid may start at any pixel: the image may have been cropped or turned since it was compressed.
    """
    window = image.crop((0, 0, min(image.width, _MAX_SIDE), min(image.height, _MAX_SIDE)))
    light = np.asarray(window.convert("L"), dtype=np.float64)
    ratios = []
    for axis in (0, 1):
        steps = np.abs(np.diff(light, axis=axis)).mean(axis=1 - axis)
        if len(steps) < 2 * BLOCK:
            continue
        starts = [steps[start::BLOCK].mean() for start in range(BLOCK)]
        ratios.append(max(starts) / (np.mean(starts) + 1e-6))
    return float(np.mean(ratios)) if ratios else 1.0
