"""Labels that look wrong (`dear.train.label_check`), as a list and as a page: `dear data check`."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from contextlib import suppress

from dear.clip.model import Clip
from dear.data.duplicates import find_duplicates
from dear.data.images import FileImages, ImageSet
from dear.data.open import open_data
from dear.errors import DataError
from dear.report.page import thumbnail
from dear.runs.feature_cache import FeatureCache
from dear.tasks.labels.page import LabelFacts, LabelRow, labels_page
from dear.train.label_check import FACTOR, Suspect, suspects_of
from dear.utils.files import PathLike, write_atomic
from dear.utils.progress import Progress

SHOWN = 200  #: suspects on the page, the most suspicious ones
MOST_ROWS = 200_000  #: of a table that a page can correct


def find_suspects(images: ImageSet, clip: Clip, progress: Progress | None = None) -> tuple[Suspect, ...]:
    """Images of a set whose labels look wrong, the most suspicious first."""
    if len(images.classes) < 2:
        raise DataError(f"{images.name}: has one class only; labels are compared with other classes")
    return suspects_of(
        images, FeatureCache().image_features(clip, images, progress), units=find_duplicates(images).units
    )


def open_all(data: str, root: str | None = None) -> tuple[ImageSet, tuple[str, ...]]:
    """All images of a dataset, and the split of each."""
    every = open_data(data, "all", root=root)
    found: dict[str, str] = {}
    for split in ("train", "val", "test"):
        with suppress(DataError):  # not every dataset has every split
            images = open_data(data, split, root=root)
            for index in range(len(images)):
                found.setdefault(images.key(index), split)
    return every, tuple(found.get(every.key(index), "train") for index in range(len(every)))


def write_label_page(
    images: FileImages, splits: Sequence[str], suspects: Sequence[Suspect], clip: Clip, out: PathLike
) -> None:
    """Write the page on which suspects are kept, changed or dropped.

    The page makes a corrected table of *all* images of the set, each in its split, to be saved in the folder
    of the images and given as data. Paths in it are relative to that folder.
    """
    if len(images) > MOST_ROWS:
        raise DataError(f"{images.name}: {len(images):,} images are too many for one page; use the CSV file")
    rows = tuple(
        LabelRow(
            index=suspect.index,
            image=thumbnail(images.image(suspect.index), 128),
            path=suspect.key,
            label=suspect.label,
            suggestion=suspect.suggestion,
            confidence=suspect.confidence,
            own=suspect.own,
        )
        for suspect in suspects[:SHOWN]
    )
    facts = LabelFacts(
        name=images.name,
        images=len(images),
        found=len(suspects),
        backbone=clip.name,
        factor=FACTOR,
        folder=str(images.root),
        rows=rows,
        classes=images.classes,
        paths=images.paths,
        labels=tuple(images.labels.tolist()),
        splits=tuple(splits),
    )
    write_atomic(out, labels_page(facts))


def write_suspects(suspects: Sequence[Suspect], out: PathLike) -> None:
    """Write suspects as CSV: path, label, suggestion, confidence, own, factor."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("path", "label", "suggestion", "confidence", "own", "factor"))
    for each in suspects:
        figures = (f"{each.confidence:.4f}", f"{each.own:.4f}", f"{each.factor:.1f}")
        table.writerow((each.key, each.label, each.suggestion, *figures))
    write_atomic(out, text.getvalue())
