"""What a dataset contains and lacks, and labels that look wrong: `dear data check`."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dear.clip.model import Clip
from dear.data.check import DatasetCheck, SplitCheck, check_dataset, check_splits
from dear.data.duplicates import find_duplicates
from dear.data.images import ImageSet, targets_of
from dear.data.open import find_benchmark, open_data
from dear.errors import DataError, UsageError
from dear.report.page import Table, percent, render
from dear.runs.feature_cache import FeatureCache
from dear.tasks.labeling.answers import AnswerFile
from dear.tasks.load import load_backbone
from dear.train.label_check import Suspect, find_wrong_labels
from dear.utils.files import PathLike, check_output, write_atomic
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

    def to_dict(self) -> dict[str, Any]:
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
    suspects = find_wrong_labels(images, features, units=find_duplicates(images).units)
    fresh = tuple(each for each in suspects if each.key not in checked)
    several = targets_of(images) is not None
    return LabelCheck(len(images), fresh, len(suspects) - len(fresh), several)


def check(
    name: PathLike,
    *,
    data_root: PathLike | None = None,
    backbone: PathLike | Clip | None = None,
    out: PathLike | None = None,
    checked: PathLike | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> DatasetCheck | SplitCheck | LabelCheck:
    """Check a dataset.

    A benchmark's layout is compared with what was published; of a folder, a table or a world task every image
    is read. With a backbone, labels that look wrong are listed instead.

    Args:
        name: a benchmark, a folder, a table, or `world:NAME`.
        data_root: folder of the benchmarks, or the folder that relative paths of a table start from.
        backbone: what `load` takes, or a loaded backbone, to look for wrong labels.
        out: `.csv` file to write suspected labels to.
        checked: table of labels of the labeling page; labels that were checked there are not suspected.
        device: "auto", "cpu", "cuda", …
        progress: called with (stage, done, total).

    Raises:
        DearError: anything a user can correct.

    Example:
        >>> check("world:vehicles").complete
        True
    """
    source = os.fspath(name)
    if backbone is None:
        for option, value in (("out", out), ("checked", checked)):
            if value is not None:
                raise UsageError(f"{option} is for labels that look wrong, which need a backbone; name one")
        if find_benchmark(source) is not None and not Path(source).is_dir():
            return check_dataset(source, data_root or ".")
        return check_splits(source, None if data_root is None else os.fspath(data_root))
    if out is not None and Path(out).suffix.lower() != ".csv":
        raise UsageError(f"out must end in .csv, got {out}")
    if checked is not None and not Path(checked).is_file():
        raise UsageError(f"checked must be a table of labels, and {checked} is no file")
    check_output(out)
    images = open_data(source, "all", root=data_root)
    confirmed = () if checked is None else AnswerFile(checked).read().checked
    result = check_labels(images, load_backbone(backbone, device), confirmed, progress)
    if out is not None:
        result.write(out)
    return result
