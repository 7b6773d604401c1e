"""Opens the dataset of a run from its configuration."""

from __future__ import annotations

import os

from dear.data.images import ImageSet
from dear.data.open import open_data
from dear.errors import DataError, UsageError
from dear.train import read_config


def run_images(run: str | os.PathLike[str], split: str = "test") -> ImageSet:
    """A split of the dataset a run was trained on.

    Raises:
        UsageError: the run does not say where its images are.
        DataError: they are no longer there.
    """
    data = read_config(run).data
    spec, root = data.spec(), data.root
    if spec is None:
        raise UsageError(f"{run}: does not say where its images are; name them", hint="report-data")
    try:
        return open_data(spec, split, root=root)
    except DataError as error:
        raise DataError(f"{run}: its images cannot be opened again ({error})", hint="report-data") from None
