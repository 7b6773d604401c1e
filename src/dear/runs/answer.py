"""What a model says of one image; needs no PyTorch, so that an exported model answers with the same."""

from __future__ import annotations

from dataclasses import dataclass

NONE_OF_THESE = "none of these"  #: the answer for an image of no class of the list


@dataclass(frozen=True)
class Answer:
    """Class names with probabilities, likeliest first."""

    image: str  #: the file, or how an image in memory is called
    classes: tuple[tuple[str, float], ...]  #: empty where the image could not be read
    error: str | None = None  #: why the image could not be read
    rejected: bool | None = None  #: the image is none of the classes; None: not asked for
