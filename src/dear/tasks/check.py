"""What a dataset contains and lacks, and labels that look wrong: `dear data check`."""

from __future__ import annotations

import os
from pathlib import Path

from dear.clip.model import Clip
from dear.data.check import DatasetCheck, SplitCheck, check_dataset, check_splits
from dear.data.open import find_benchmark
from dear.errors import UsageError
from dear.tasks.labeling.answers import AnswerFile
from dear.tasks.labeling.check import LabelCheck, check_labels, open_all
from dear.tasks.load import load_backbone
from dear.utils.files import PathLike, check_output
from dear.utils.progress import Progress


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
    images = open_all(source, data_root)[0]
    confirmed = () if checked is None else AnswerFile(checked).read().checked
    result = check_labels(images, load_backbone(backbone, device), confirmed, progress)
    if out is not None:
        result.write(out)
    return result
