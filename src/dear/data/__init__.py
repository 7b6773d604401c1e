"""Images and labels from folders, tables, benchmark layouts and the attribute world."""

from dear.data.check import DatasetCheck, check_dataset
from dear.data.images import FileImages, ImageSet, select_domains
from dear.data.names import readable
from dear.data.open import list_datasets, open_data
from dear.data.shots import draw_shots, few_shot, halves, read_draw
from dear.data.unreadable import ImageReport, check_images

__all__ = [
    "DatasetCheck",
    "FileImages",
    "ImageReport",
    "ImageSet",
    "check_dataset",
    "check_images",
    "draw_shots",
    "few_shot",
    "halves",
    "list_datasets",
    "open_data",
    "read_draw",
    "readable",
    "select_domains",
]
