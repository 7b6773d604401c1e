"""Labels that look wrong (`dear.train.label_check`): `dear data check`, and labels of a dataset."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dear.clip.model import Clip
from dear.data.duplicates import find_duplicates
from dear.data.images import ImageSet, targets_of
from dear.data.open import named_split, open_data
from dear.errors import DataError
from dear.report.page import Table, percent, render
from dear.runs.feature_cache import FeatureCache
from dear.train.label_check import Suspect, suspects_of
from dear.utils.files import PathLike, write_atomic
from dear.utils.progress import Progress

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 20  #: suspects in notebooks


@dataclass(frozen=True)
class LabelCheck:
    """Labels of a set that look wrong."""

    images: int  #: in the set
    suspects: tuple[Suspect, ...]  #: the most suspicious first, without those that a person checked
    checked: int = 0  #: suspects whose label a person confirmed
    several: bool = False  #: images have several labels

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        checked = f"; {self.checked} others were checked and are fine" if self.checked else ""
        if self.several:
            return f"{len(self.suspects)} labels of {self.images} images look wrong or missing{checked}"
        return f"{len(self.suspects)} of {self.images} labels look wrong{checked}"

    def to_frame(self) -> pd.DataFrame:
        """One row per suspect: path, label, suggestion, confidence, label_probability, factor."""
        import pandas as pd

        columns = ["path", "label", "suggestion", "confidence", "label_probability", "factor"]
        rows = [
            (each.key, each.label, each.suggestion, each.confidence, each.label_probability, each.factor)
            for each in self.suspects
        ]
        return pd.DataFrame(rows, columns=columns)

    def write(self, out: PathLike) -> None:
        """Write the suspects as CSV: path, label, suggestion, confidence, label_probability, factor."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(("path", "label", "suggestion", "confidence", "label_probability", "factor"))
        for each in self.suspects:
            figures = (f"{each.confidence:.4f}", f"{each.label_probability:.4f}", f"{each.factor:.1f}")
            table.writerow((each.key, each.label, each.suggestion, *figures))
        write_atomic(out, text.getvalue())

    def report(self) -> dict[str, Any]:
        """Plain values for JSON."""
        suspects = [{**asdict(each), "factor": each.factor} for each in self.suspects]
        return {"images": self.images, "checked": self.checked, "suspects": suspects}

    def _repr_html_(self) -> str:
        """For notebooks."""
        rows = tuple(
            (each.key, each.label, f"{each.suggestion} ({percent(each.confidence)})")
            for each in self.suspects[:SHOWN]
        )
        table = Table(("image", "label", "looks like"), rows)
        return render("summary.html", verdict=self.verdict, tables=[table])


def check_labels(
    images: ImageSet, clip: Clip, checked: Collection[str] = (), progress: Progress | None = None
) -> LabelCheck:
    """Find images whose labels look wrong; of several labels per image also those that look missing.

    Args:
        images: with at least two classes, or several labels per image.
        clip: the backbone whose features count.
        checked: keys of images whose label a person confirmed (`Answers.checked`).
        progress: called with (stage, done, total).

    Raises:
        DataError: there is one class only.
    """
    if len(images.classes) < 2 and targets_of(images) is None:
        raise DataError(f"{images.name}: has one class only; labels are compared with other classes")
    features = FeatureCache().image_features(clip, images, progress)
    suspects = suspects_of(images, features, units=find_duplicates(images).units)
    fresh = tuple(each for each in suspects if each.key not in checked)
    several = targets_of(images) is not None
    return LabelCheck(len(images), fresh, len(suspects) - len(fresh), several)


def open_all(data: PathLike, root: PathLike | None = None) -> tuple[ImageSet, tuple[str, ...]]:
    """All images of a dataset, and the split of each."""
    every = open_data(data, "all", root=root)
    named = named_split(data)
    if named is not None:
        return every, (named,) * len(every)
    split_of: dict[str, str] = {}
    for split in ("train", "val", "test"):
        with suppress(DataError):  # not every dataset has every split
            images = open_data(data, split, root=root)
            for index in range(len(images)):
                split_of.setdefault(images.key(index), split)
    return every, tuple(split_of.get(every.key(index), "train") for index in range(len(every)))
