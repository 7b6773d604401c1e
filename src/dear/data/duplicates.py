"""Images that are copies of each other: equal content, re-saved, resized, or mirrored.

Equal content is found by a hash of the file or of the pixels. Near duplicates agree in a difference hash of
64 bits, of the image or of its mirror image, and in their pixels at 32 x 32. How far pixels may differ
depends on the contrast: two flat images are not copies because both are flat.

Copies form one unit wherever images are held out (`dear.data.shots`, `dear.data.folds`): an image
whose copy was trained on is not held out.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dear.data.content import content_digest, file_digest, source_of
from dear.data.images import ImageSet
from dear.errors import InputError
from dear.images.open import ImageLike, open_image
from dear.utils.digest import of_parts
from dear.utils.feature_store import FeatureStore
from dear.utils.parallel import map_threads
from dear.utils.progress import Progress, silent

MAX_BITS = 10  #: of 64 in which the hashes of copies may differ
MAX_DISTANCE = 16.0  #: root mean square difference of copies at 32 x 32, in gray levels
CONTRAST = 0.4  #: the same as a fraction of the contrast, so that flat images must agree more closely
FLAT = 1.0  #: gray levels that may always differ
SIDE = 32  #: pixels of the small copy
MAX_IMAGES = 20_000  #: of a set whose near duplicates are searched before a split or a cross-validation
_HASH = 8  # bits per side of the hash
_BATCH = 256
_PAIRS = 1 << 21  # hashes compared at once
_AT_ONCE = 2048  # pairs of small copies compared at once
_HEAD = 4096  # bytes of a file that are read first
_VERSION = b"print 1"  # of the cached prints

IntArray = NDArray[np.int64]
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
    """Small copies and hashes of n images, by which copies are found."""

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
        """Uninitialized prints of `count` images, in a temporary file if they are many."""
        shape, hashes = (count, SIDE, SIDE, 3), np.empty((count, 2), np.uint64)
        if count <= MAX_IMAGES:
            return cls(np.empty(shape, np.uint8), hashes)
        # The mapping keeps the file until the array is deleted.
        with tempfile.TemporaryFile(prefix="dear-") as file:
            return cls(np.memmap(file, np.uint8, "w+", shape=shape), hashes)

    def put(self, index: int, part: Prints) -> None:
        """Store the prints of some images from `index` on."""
        rows = slice(index, index + len(part))
        self.small[rows], self.hashes[rows] = part.small, part.hashes

    def first(self, count: int) -> Prints:
        """The prints of the first `count` images."""
        return Prints(self.small[:count], self.hashes[:count])


def read_prints(images: ImageSet) -> tuple[IntArray, Prints]:
    """Indices [m] of the readable images of a set, and their prints."""
    return _stored_prints(np.arange(len(images)), lambda index: source_of(images, index))


def matching_pairs(
    first: Prints, second: Prints | None = None, progress: Progress = silent
) -> Iterator[tuple[IntArray, IntArray, Levels]]:
    """Pairs of near duplicates within one set, or between two.

    Yields them in parts: indices in `first` [p], indices in `second` [p] (above those in `first` if there is
    one set), and the root mean square difference of the small copies [p] in gray levels. The memory does not
    depend on the number of images. `progress` is called with ("near duplicates", images done, images in all).
    """
    other = first if second is None else second
    contrast, contrast_of_other = _contrast(first), _contrast(other)
    rows = max(1, _PAIRS // max(1, len(other)))
    for start in range(0, len(first), rows):
        begin = start if second is None else 0
        block = first.hashes[start : start + rows, :1]
        for mirrored in (0, 1):
            bits = np.bitwise_count(block ^ other.hashes[None, begin:, mirrored])
            i, j = (hits.astype(np.int64) for hits in np.nonzero(bits <= MAX_BITS))
            i, j = i + start, j + begin
            if second is None:
                i, j = i[i < j], j[i < j]
            for part in range(0, len(i), _AT_ONCE):
                a, b = i[part : part + _AT_ONCE], j[part : part + _AT_ONCE]
                limit = np.clip(CONTRAST * np.minimum(contrast[a], contrast_of_other[b]), FLAT, MAX_DISTANCE)
                distance = _distance(
                    first.small[a], other.small[b][:, :, ::-1] if mirrored else other.small[b]
                )
                same = distance <= limit
                if same.any():
                    yield a[same], b[same], distance[same]
        progress("near duplicates", min(start + rows, len(first)), len(first))


def _contrast(prints: Prints) -> Levels:
    """Standard deviation of each color of the small copies, root mean square over colors, [n]."""
    contrast = np.empty(len(prints), np.float32)
    for start in range(0, len(prints), _AT_ONCE):
        batch = prints.small[start : start + _AT_ONCE].astype(np.float32)
        contrast[start : start + _AT_ONCE] = np.sqrt(batch.var(axis=(1, 2)).mean(axis=1))
    return contrast


def _distance(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> Levels:
    """Root mean square difference of small copies [p, 32, 32, 3], in gray levels."""
    step = first.astype(np.float32) - second
    distance: Levels = np.sqrt(np.square(step, out=step).mean(axis=(1, 2, 3)))
    return distance


@dataclass(frozen=True, eq=False)
class Duplicates:
    """Which of n images are copies of each other."""

    units: IntArray  #: the unit of each image, [n]; the same for copies
    contents: tuple[bytes, ...]  #: hash of the content of each image
    copies: int = 0  #: images with the same content as an earlier one
    near: int = 0  #: other near duplicates of an earlier one
    searched: bool = True  #: whether near duplicates were searched

    def distinct(self, labels: Sequence[int]) -> list[int]:
        """One index per unit and label, ascending; which one depends on the contents of the images alone.

        >>> Duplicates(np.array([0, 1, 0]), (b"c", b"b", b"a"), near=1).distinct([5, 5, 5])
        [1, 2]
        """
        chosen: dict[tuple[int, int], int] = {}
        for index in sorted(range(len(self.units)), key=lambda index: (self.contents[index], index)):
            chosen.setdefault((int(self.units[index]), labels[index]), index)
        return sorted(chosen.values())

    def units_of(self, indices: Sequence[int] | IntArray) -> IntArray:
        """The units of images at some indices; each index from n on is a further image without copies.

        >>> Duplicates(np.array([4, 4, 7]), (b"a", b"a", b"b"), 1).units_of([1, 0, 2, 3, 4, 3]).tolist()
        [4, 4, 7, 8, 9, 8]
        """
        rows = np.asarray(indices, dtype=np.int64)
        further = rows - len(self.units) + 1 + self.units.max(initial=-1)
        return np.where(rows < len(self.units), self.units[np.minimum(rows, len(self.units) - 1)], further)

    def subset(self, indices: Sequence[int]) -> Duplicates:
        """The same for some images; the numbers of copies are those of all images."""
        rows = list(indices)
        return replace(self, units=self.units[rows], contents=tuple(self.contents[row] for row in rows))

    def join(self, keys: Sequence[str]) -> Duplicates:
        """Units that also hold all images of the same key [n], such as the boxes of one photo.

        >>> Duplicates(np.array([0, 1, 2]), (b"", b"", b"")).join(["p.jpg", "q.jpg", "p.jpg"]).units
        array([0, 1, 0])
        """
        indices, pairs = np.arange(len(keys)), []
        for values in (self.units.tolist(), keys):
            first: dict[Hashable, int] = {}
            first_indices = [first.setdefault(value, index) for index, value in enumerate(values)]
            pairs.append((indices, np.array(first_indices, np.int64)))
        return replace(self, units=_connect(len(keys), pairs))

    def to_dict(self) -> dict[str, int | bool]:
        """Plain values for JSON."""
        return {
            "images": len(self.units),
            "copies": self.copies,
            "near": self.near,
            "near_searched": self.searched,
        }

    def pair(self) -> tuple[int, int] | None:
        """Indices of the first two images that are copies of each other; None if there are no copies.

        >>> Duplicates(np.array([0, 1, 1]), (b"a", b"b", b"b"), copies=1).pair()
        (1, 2)
        """
        first: dict[int, int] = {}
        for index, unit in enumerate(self.units.tolist()):
            if unit in first:
                return first[unit], index
            first[unit] = index
        return None

    def sentence(self, key: Callable[[int], str]) -> str:
        """The numbers in words, and a pair as an example; "" where there are no copies.

        Args:
            key: returns the name of the image at an index.

        >>> from dear.data.world_images import world_task
        >>> task = world_task("textures", "test").subset([0, 1, 2, 0])
        >>> find_duplicates(task).sentence(task.key).partition(",")[0]
        '1 of 4 images is a copy of another (1 with equal content)'
        """
        if not self.copies + self.near:
            return ""
        parts = [f"{self.copies} with equal content"] * bool(self.copies)
        parts += [f"{self.near} re-saved, resized or mirrored"] * bool(self.near)
        total = self.copies + self.near
        verb = "is a copy of another" if total == 1 else "are copies of others"
        pair = self.pair()
        example = "" if pair is None else f", such as {key(pair[0])!r} and {key(pair[1])!r}"
        return f"{total} of {len(self.units)} images {verb} ({', '.join(parts)}){example}"


def find_duplicates(images: ImageSet) -> Duplicates:
    """The units of a set: images with equal content, and near duplicates.

    An image that cannot be read is a unit by itself. Of more than `MAX_IMAGES` images, only equal content is
    found.

    >>> from dear.data.world_images import world_task
    >>> task = world_task("textures", "test").subset([0, 1, 2, 0])
    >>> find_duplicates(task).units.tolist()
    [0, 1, 2, 0]
    """

    def content(index: int) -> bytes:
        try:
            return content_digest(images, index)
        except InputError:
            return of_parts(f"unreadable {index}")

    contents = tuple(map_threads(content, range(len(images))))
    return _group_copies(contents, lambda index: source_of(images, index))


def find_file_duplicates(paths: Sequence[str | os.PathLike[str]]) -> Duplicates:
    """The same for image files; recent searches are cached, because several splits need them."""
    return _search_files(tuple((os.path.abspath(path), _file_state(path)) for path in paths))


def count_shared_files(
    training: Sequence[str | os.PathLike[str]], test: Sequence[str | os.PathLike[str]]
) -> int:
    """Number of test files with the content of a training file; only files of equal size are read."""
    sizes, tests = ([(_file_state(path) or (None,))[0] for path in paths] for paths in (training, test))
    common = (set(sizes) & set(tests)) - {None}
    contents = {file_digest(path) for path, size in zip(training, sizes, strict=True) if size in common}
    return sum(
        size in common and file_digest(path) in contents for path, size in zip(test, tests, strict=True)
    )


def _file_state(path: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """Size, times and inode of a file, which change when it does; None if there is no file."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino


@lru_cache(maxsize=4)
def _search_files(files: tuple[tuple[str, tuple[int, ...] | None], ...]) -> Duplicates:
    sizes = Counter(None if state is None else state[0] for _, state in files)

    def head(file: tuple[str, tuple[int, ...] | None]) -> bytes:
        """Hash of the size and the first bytes of a file."""
        path, state = file
        if state is not None and sizes[state[0]] > 1:
            with suppress(OSError), open(path, "rb") as content:
                return of_parts(f"{state[0]} ", content.read(_HEAD))
        return of_parts(os.fsencode(path))

    heads = map_threads(head, files)
    counts = Counter(heads)  # only files whose start occurs twice are read completely
    contents = tuple(
        start if counts[start] == 1 else file_digest(path)
        for start, (path, _) in zip(heads, files, strict=True)
    )
    return _group_copies(contents, lambda index: files[index][0])


def _group_copies(contents: tuple[bytes, ...], source: Callable[[int], ImageLike]) -> Duplicates:
    first_index: dict[bytes, int] = {}
    first = np.array(
        [first_index.setdefault(content, index) for index, content in enumerate(contents)], np.int64
    )
    distinct = np.unique(first)
    copies = len(contents) - len(distinct)
    if len(distinct) > MAX_IMAGES:
        return Duplicates(first, contents, copies, searched=False)
    nodes, prints = _stored_prints(distinct, source)
    pairs = [(nodes[a], nodes[b]) for a, b, _ in matching_pairs(prints)]
    units = _connect(len(contents), pairs)[first]
    return Duplicates(units, contents, copies, len(distinct) - len(np.unique(units)))


def _connect(count: int, pairs: Sequence[tuple[IntArray, IntArray]]) -> IntArray:
    """The smallest index [count] to which each of `count` indices is connected by pairs."""
    if not pairs:
        return np.arange(count)
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    rows, columns = (np.concatenate(part) for part in zip(*pairs, strict=True))
    graph = coo_matrix((np.ones(len(rows), np.bool_), (rows, columns)), shape=(count, count))
    _, component = connected_components(graph, directed=False)
    first: IntArray = np.unique(component, return_index=True)[1][component]
    return first


def _stored_prints(indices: IntArray, source: Callable[[int], ImageLike]) -> tuple[IntArray, Prints]:
    """Indices of the readable ones among some images, and their prints, which are cached for files."""
    store, readable, stored = FeatureStore(), list[int](), Prints.empty(len(indices))
    for start in range(0, len(indices), _BATCH):
        sources: dict[int, ImageLike] = {}
        for index in indices[start : start + _BATCH].tolist():
            with suppress(InputError):  # a box or a cell that cannot be read
                sources[index] = source(index)
        keys = {index: key for index, image in sources.items() if (key := _stored_key(image)) is not None}
        known = store.get(keys.values())
        prints = {index: _unpack(known[key]) for index, key in keys.items() if key in known}
        missing = [index for index in sources if prints.get(index) is None]  # not cached, or damaged
        fresh = dict(
            zip(missing, map_threads(_read_print, [sources[index] for index in missing]), strict=True)
        )
        store.put({keys[index]: _pack(part) for index, part in fresh.items() if part and index in keys})
        for index, stored_print in sorted((prints | fresh).items()):
            if stored_print is not None:
                stored.put(len(readable), stored_print)
                readable.append(index)
    return np.array(readable, np.int64), stored.first(len(readable))


def _read_print(source: ImageLike) -> Prints | None:
    """The print of one image; None if it cannot be read."""
    try:
        return Prints.of([open_image(source)])
    except InputError:
        return None


def _stored_key(source: ImageLike) -> bytes | None:
    """The key of a file's print: it changes whenever the file does; None: no file."""
    state = None if isinstance(source, Image.Image | bytes) else _file_state(source)
    if state is None or isinstance(source, Image.Image | bytes):
        return None
    return of_parts(_VERSION, f"{os.path.abspath(source)} {state}")


def _pack(prints: Prints) -> bytes:
    return prints.hashes.astype("<u8").tobytes() + prints.small.tobytes()


def _unpack(data: bytes) -> Prints | None:
    """The stored print; None if the bytes are damaged."""
    if len(data) != 16 + 3 * SIDE * SIDE:
        return None
    hashes = np.frombuffer(data[:16], "<u8").astype(np.uint64).reshape(1, 2)
    return Prints(np.frombuffer(data[16:], np.uint8).reshape(1, SIDE, SIDE, 3), hashes)
