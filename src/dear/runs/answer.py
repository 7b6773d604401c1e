"""The prediction for one image; needs no PyTorch, so that exported models return the same type."""

from __future__ import annotations

from dataclasses import dataclass

REJECT_SHARE = 0.05  #: default share of images of known classes that may be rejected
NONE_OF_THESE = "none of these"  #: the answer for an image of no class of the list


@dataclass(frozen=True)
class Answer:
    """Class names with probabilities, likeliest first."""

    image: str  #: the file, or the name of an image in memory
    classes: tuple[tuple[str, float], ...]  #: empty where the image could not be read
    error: str | None = None  #: why the image could not be read
    rejected: bool | None = None  #: the image is none of the classes; None: rejection is off
    #: of a run with a tree: the deepest certain node and its probability; None: no node is certain
    node: tuple[str, float] | None = None
    labels: tuple[str, ...] | None = None  #: all classes that it has, of a run with several labels


def share_of_rejected(reject: bool | float | None, default: float = REJECT_SHARE) -> float | None:
    """The share of images of known classes that may be rejected; None: none may.

    >>> share_of_rejected(True), share_of_rejected(0.1), share_of_rejected(False), share_of_rejected(None)
    (0.05, 0.1, None, None)
    """
    if reject is None or reject is False:
        return None
    return default if reject is True else float(reject)
