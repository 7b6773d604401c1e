"""Images that are copies of each other: equal content, re-saved, resized, or mirrored.

Equal content is found by a hash of the file or of the pixels. Near duplicates agree in a difference hash of
64 bits, of the image or of its mirror image, and in their pixels at 32 x 32. How far pixels may differ
depends on the contrast: two flat images are not copies because both are flat.

Copies form one unit in everything that holds images out (`dear.data.shots`, `dear.data.folds`): an image
whose copy was trained on is not held out.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dear.data.images import ImageLike, ImageSet, content_digest, file_digest, source_of
from dear.errors import InputError
from dear.images.open import open_image
from dear.utils.digest import of_parts
from dear.utils.feature_store import FeatureStore
from dear.utils.parallel import map_threads
from dear.utils.progress import Progress, silent

BITS = 6  #: of 64 in which the hashes of copies may differ
PIXELS = 12.0  #: root mean square difference of copies at 32 x 32, in gray levels, at most
CONTRAST = 0.25  #: the same as a share of the contrast, so that flat images must agree more closely
FLAT = 1.0  #: gray levels that may always differ
SIDE = 32  #: pixels of the small copy
MOST_IMAGES = 20_000  #: of a set whose near duplicates are searched before a split or a cross-validation
_HASH = 8  # bits per side of the hash
_BATCH = 256
_PAIRS = 1 << 21  # hashes compared at once
_AT_ONCE = 2048  # pairs of small copies compared at once
_HEAD = 4096  # bytes of a file that are read first
_STORED = b"print 1"  # version of what is kept of an image file

Places = NDArray[np.int64]
Levels = NDArray[np.float32]


def small_copy(image: Image.Image) -> NDArray[np.uint8]:
    """The image at 32 x 32, uint8 [32, 32, 3]."""
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX), dtype=np.uint8)


def difference_hash(image: Image.Image, mirrored: bool = False) -> int:
    """64 bits: whether each pixel of a copy of 9 x 8 is darker than its right neighbor.

    >>> ramp = Image.fromarray(np.arange(90, dtype=np.uint8).reshape(1, 90).repeat(80, axis=0))
    >>> difference_hash(ramp) == 2**64 - 1, difference_hash(ramp, mirrored=True)
    (True, 0)
    """
    small = np.asarray(image.convert("L").resize((_HASH + 1, _HASH), Image.Resampling.BOX), dtype=np.int16)
    small = small[:, ::-1] if mirrored else small
    return int(np.packbits((small[:, 1:] > small[:, :-1]).flatten()).view(">u8")[0])


@dataclass(frozen=True, eq=False)
class Prints:
    """What copies of n images are found by."""

    small: NDArray[np.uint8]  #: the images at 32 x 32, [n, 32, 32, 3]
    hashes: NDArray[np.uint64]  #: difference hashes of the images and of their mirror images, [n, 2]

    def __len__(self) -> int:
        return len(self.hashes)

    @classmethod
    def of(cls, images: Sequence[Image.Image]) -> Prints:
        """The prints of RGB images."""
        hashes = [[difference_hash(image, mirrored) for mirrored in (False, True)] for image in images]
        small = np.array([small_copy(image) for image in images], dtype=np.uint8)
        return cls(small.reshape(-1, SIDE, SIDE, 3), np.array(hashes, dtype=np.uint64).reshape(-1, 2))

    @classmethod
    def empty(cls, count: int) -> Prints:
        """Room for the prints of `count` images: of many in a temporary file, so that memory stays free."""
        shape, hashes = (count, SIDE, SIDE, 3), np.empty((count, 2), np.uint64)
        if count <= MOST_IMAGES:
            return cls(np.empty(shape, np.uint8), hashes)
        with tempfile.TemporaryFile(prefix="dear-") as file:  # the mapping keeps it until the array is gone
            return cls(np.memmap(file, np.uint8, "w+", shape=shape), hashes)

    def put(self, place: int, part: Prints) -> None:
        """Store the prints of some images from `place` on."""
        rows = slice(place, place + len(part))
        self.small[rows], self.hashes[rows] = part.small, part.hashes

    def first(self, count: int) -> Prints:
        """The prints of the first `count` images."""
        return Prints(self.small[:count], self.hashes[:count])


def read_prints(images: ImageSet) -> tuple[Places, Prints]:
    """Places [m] of the images of a set that can be read, and their prints."""
    return _stored_prints(np.arange(len(images)), lambda index: source_of(images, index))


def matching_pairs(
    first: Prints, second: Prints | None = None, progress: Progress = silent
) -> Iterator[tuple[Places, Places, Levels]]:
    """Pairs of near duplicates within one set, or between two: places in both, and gray levels apart.

    Yields them in parts: places in `first` [p], places in `second` [p] (above those in `first` where there is
    one set), and the root mean square difference of the small copies [p]. The memory does not depend on the
    number of images. `progress` is called with ("near duplicates", images done, images in all).
    """
    other = first if second is None else second
    contrast, contrast_of_other = _contrast(first), _contrast(other)
    rows = max(1, _PAIRS // max(1, len(other)))
    for start in range(0, len(first), rows):
        begin = start if second is None else 0
        block = first.hashes[start : start + rows, :1]
        for mirrored in (0, 1):
            bits = np.bitwise_count(block ^ other.hashes[None, begin:, mirrored])
            i, j = (hits.astype(np.int64) for hits in np.nonzero(bits <= BITS))
            i, j = i + start, j + begin
            if second is None:
                i, j = i[i < j], j[i < j]
            for part in range(0, len(i), _AT_ONCE):
                a, b = i[part : part + _AT_ONCE], j[part : part + _AT_ONCE]
                limit = np.clip(CONTRAST * np.minimum(contrast[a], contrast_of_other[b]), FLAT, PIXELS)
                apart = _apart(first.small[a], other.small[b][:, :, ::-1] if mirrored else other.small[b])
                same = apart <= limit
                if same.any():
                    yield a[same], b[same], apart[same]
        progress("near duplicates", min(start + rows, len(first)), len(first))


def _contrast(prints: Prints) -> Levels:
    """Standard deviation of each color of the small copies, root mean square over colors, [n]."""
    contrast = np.empty(len(prints), np.float32)
    for start in range(0, len(prints), _AT_ONCE):
        some = prints.small[start : start + _AT_ONCE].astype(np.float32)
        contrast[start : start + _AT_ONCE] = np.sqrt(some.var(axis=(1, 2)).mean(axis=1))
    return contrast


def _apart(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> Levels:
    """Root mean square difference of small copies [p, 32, 32, 3], in gray levels."""
    step = first.astype(np.float32) - second
    apart: Levels = np.sqrt(np.square(step, out=step).mean(axis=(1, 2, 3)))
    return apart


@dataclass(frozen=True, eq=False)
class Duplicates:
    """Which of n images are copies of each other."""

    units: Places  #: the unit of each image, [n]; copies have the same
    contents: tuple[bytes, ...]  #: hash of the content of each image
    copies: int = 0  #: images with the same content as another one that is counted
    near: int = 0  #: images that are nearly the same as another one that is counted
    searched: bool = True  #: whether near duplicates were searched

    def distinct(self, labels: Sequence[int]) -> list[int]:
        """One place per unit and label, ascending; which one depends on the contents of the images alone.

        >>> Duplicates(np.array([0, 1, 0]), (b"c", b"b", b"a"), near=1).distinct([5, 5, 5])
        [1, 2]
        """
        chosen: dict[tuple[int, int], int] = {}
        for place in sorted(range(len(self.units)), key=lambda place: (self.contents[place], place)):
            chosen.setdefault((int(self.units[place]), labels[place]), place)
        return sorted(chosen.values())

    def subset(self, places: Sequence[int]) -> Duplicates:
        """The same for the images at some places; the numbers of copies are those of all images."""
        rows = list(places)
        return replace(self, units=self.units[rows], contents=tuple(self.contents[row] for row in rows))

    def facts(self) -> dict[str, int | bool]:
        """Plain values for JSON."""
        return {
            "images": len(self.units),
            "copies": self.copies,
            "near": self.near,
            "near_searched": self.searched,
        }

    def sentence(self) -> str:
        """The numbers in words; "" where there are no copies.

        >>> Duplicates(np.zeros(9, np.int64), (b"",) * 9, copies=3, near=1).sentence()
        '4 of 9 images are copies of others (3 with equal content, 1 re-saved, resized or mirrored)'
        """
        if not self.copies + self.near:
            return ""
        parts = [f"{self.copies} with equal content"] * bool(self.copies)
        parts += [f"{self.near} re-saved, resized or mirrored"] * bool(self.near)
        total = self.copies + self.near
        verb = "is a copy of another" if total == 1 else "are copies of others"
        return f"{total} of {len(self.units)} images {verb} ({', '.join(parts)})"


def find_duplicates(images: ImageSet, near: bool = True) -> Duplicates:
    """The units of a set: images with equal content and, with `near`, near duplicates.

    An image that cannot be read is a unit by itself. Of more than `MOST_IMAGES` images, only equal content is
    found.

    >>> from dear.data.world_images import world_task
    >>> task = world_task("textures", "test").subset([0, 1, 2, 0])
    >>> find_duplicates(task).units.tolist()
    [0, 1, 2, 0]
    """
    contents = tuple(map_threads(lambda index: content_digest(images, index), range(len(images))))
    return _find(contents, lambda index: source_of(images, index), near)


def find_file_duplicates(paths: Sequence[str | os.PathLike[str]]) -> Duplicates:
    """The same of image files; the last search is remembered, because several splits need it."""
    return _search_files(tuple((os.path.abspath(path), _state(path)) for path in paths))


def count_shared_files(
    training: Sequence[str | os.PathLike[str]], test: Sequence[str | os.PathLike[str]]
) -> int:
    """How many test files have the content of a training file; only files of equal size are read."""
    sizes, tests = ([(_state(path) or (None,))[0] for path in paths] for paths in (training, test))
    common = (set(sizes) & set(tests)) - {None}
    contents = {file_digest(path) for path, size in zip(training, sizes, strict=True) if size in common}
    return sum(
        size in common and file_digest(path) in contents for path, size in zip(test, tests, strict=True)
    )


def _state(path: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """What changes when a file does; None: it is not there."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino


@lru_cache(maxsize=4)
def _search_files(files: tuple[tuple[str, tuple[int, ...] | None], ...]) -> Duplicates:
    sizes = Counter(None if state is None else state[0] for _, state in files)

    def head(file: tuple[str, tuple[int, ...] | None]) -> bytes:
        """What files of equal content have in common, and others hardly ever."""
        path, state = file
        if state is not None and sizes[state[0]] > 1:
            with suppress(OSError), open(path, "rb") as content:
                return of_parts(f"{state[0]} ", content.read(_HEAD))
        return of_parts(os.fsencode(path))

    heads = map_threads(head, files)
    counts = Counter(heads)  # few files are read to their end
    contents = tuple(
        one if counts[one] == 1 else file_digest(path) for one, (path, _) in zip(heads, files, strict=True)
    )
    return _find(contents, lambda index: files[index][0], near=True)


def _find(contents: tuple[bytes, ...], source: Callable[[int], ImageLike], near: bool) -> Duplicates:
    place: dict[bytes, int] = {}
    first = np.array([place.setdefault(content, index) for index, content in enumerate(contents)], np.int64)
    distinct = np.unique(first)
    copies = len(contents) - len(distinct)
    if not near or len(distinct) > MOST_IMAGES:
        return Duplicates(first, contents, copies, searched=False)
    nodes, prints = _stored_prints(distinct, source)
    units = np.arange(len(contents))
    pairs = [(nodes[a], nodes[b]) for a, b, _ in matching_pairs(prints)]
    if pairs:
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components

        rows, columns = (np.concatenate(part) for part in zip(*pairs, strict=True))
        graph = coo_matrix((np.ones(len(rows), np.bool_), (rows, columns)), shape=(len(units), len(units)))
        _, component = connected_components(graph, directed=False)
        units = np.unique(component, return_index=True)[1][component]
    units = units[first]
    return Duplicates(units, contents, copies, len(distinct) - len(np.unique(units)))


def _stored_prints(places: Places, source: Callable[[int], ImageLike]) -> tuple[Places, Prints]:
    """Those of some images that can be read, and their prints, which the user's cache keeps for files."""
    store, readable, stored = FeatureStore(), list[int](), Prints.empty(len(places))
    for start in range(0, len(places), _BATCH):
        sources = {place: source(place) for place in places[start : start + _BATCH].tolist()}
        keys = {place: key for place, one in sources.items() if (key := _stored_key(one)) is not None}
        known = store.get(keys.values())
        prints = {place: _unpack(known[key]) for place, key in keys.items() if key in known}
        missing = [place for place in sources if prints.get(place) is None]  # not there, or damaged
        fresh = dict(
            zip(missing, map_threads(_read_print, [sources[place] for place in missing]), strict=True)
        )
        store.put({keys[place]: _pack(one) for place, one in fresh.items() if one and place in keys})
        for place, one in sorted((prints | fresh).items()):
            if one is not None:
                stored.put(len(readable), one)
                readable.append(place)
    return np.array(readable, np.int64), stored.first(len(readable))


def _read_print(source: ImageLike) -> Prints | None:
    """The print of one image; None where it cannot be read."""
    try:
        return Prints.of([open_image(source)])
    except InputError:
        return None


def _stored_key(source: ImageLike) -> bytes | None:
    """The key of a file's print: it changes whenever the file does; None: no file."""
    state = None if isinstance(source, Image.Image | bytes) else _state(source)
    if state is None or isinstance(source, Image.Image | bytes):
        return None
    return of_parts(_STORED, f"{os.path.abspath(source)} {state}")


def _pack(prints: Prints) -> bytes:
    return prints.hashes.astype("<u8").tobytes() + prints.small.tobytes()


def _unpack(data: bytes) -> Prints | None:
    """The print that was stored; None if the bytes are damaged."""
    if len(data) != 16 + 3 * SIDE * SIDE:
        return None
    hashes = np.frombuffer(data[:16], "<u8").astype(np.uint64).reshape(1, 2)
    return Prints(np.frombuffer(data[16:], np.uint8).reshape(1, SIDE, SIDE, 3), hashes)
