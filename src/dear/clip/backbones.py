"""Public backbones by name, with architecture, license and published accuracy."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from dear.utils.schema import Strict, decode


class Backbone(Strict, frozen=True):
    """A public backbone."""

    family: str  #: "CLIP", "SigLIP", "SigLIP 2", "MetaCLIP 2" or "PE-Core"
    shape: str  #: its architecture, see `ClipConfig.named`
    trained_on: str  #: the dataset
    image_size: int  #: side of the images it reads
    license: str  #: of the weights
    commercial: bool  #: whether the license allows commercial use
    #: zero-shot accuracy on ImageNet in percent as published, not measured here; None: unknown
    imagenet: float | None = None
    resize: str = "crop"  #: "crop" or "squash"
    note: str = ""  #: further remarks


@cache
def backbones() -> dict[str, Backbone]:
    """The public backbones by hub name, read from `backbones.json`.

    >>> backbones()["openai/clip-vit-base-patch16"].imagenet
    68.3
    """
    path = Path(__file__).with_name("backbones.json")
    return decode(path.read_text(encoding="utf-8"), dict[str, Backbone], str(path), "list of backbones")


def best_per_cost() -> tuple[str, ...]:
    """For each size of architecture, the backbone with the highest published accuracy."""
    best: dict[tuple[str, int], tuple[float, str]] = {}
    for name, entry in backbones().items():
        if entry.imagenet is not None:
            size = _size(entry.shape)
            best[size] = max(best.get(size, (0.0, "")), (entry.imagenet, name))
    return tuple(name for _, name in best.values())


def _size(shape: str) -> tuple[str, int]:
    """The tower's letter and the patch size, which determine the cost."""
    parts = shape.removeprefix("ViT-").removeprefix("PE-Core-").split("-")
    return parts[0], int(parts[1])
