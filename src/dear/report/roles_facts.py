"""What was measured about a role map beyond the map itself; `dear.workflows.head_evidence` measures it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dear.heads.focus import hardly_specialized
from dear.heads.roles import RoleMap
from dear.heads.stability import ENOUGH_IMAGES
from dear.report.page import percent

Key = tuple[int, int]


@dataclass(frozen=True)
class Seen:
    """One image of a head: its number, its score, and the attention map as digits, row by row."""

    image: int
    score: float
    attention: str


@dataclass(frozen=True)
class HeadEvidence:
    """Everything measured for the page; parts that could not be measured are empty."""

    thumbnails: Mapping[int, str] = field(default_factory=dict)  #: data URLs by image number
    names: Mapping[int, str] = field(default_factory=dict)  #: what to call each image
    #: most and least exciting images of each head, and the phrase that gave the direction
    heads: Mapping[Key, tuple[str | None, tuple[Seen, ...], tuple[Seen, ...]]] = field(default_factory=dict)
    side: int = 0  #: patches per side of an attention map
    layers: tuple[Mapping[str, float], ...] = ()  #: rows of `layer_effects`; empty without labels
    roles: tuple[Mapping[str, Any], ...] = ()  #: rows of `role_effects`; empty without labels
    accuracy: float | None = None  #: zero-shot accuracy with nothing ablated
    images: int = 0  #: how many images were looked at
    #: phrase to its place in the plane
    plane: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class QualityNote:
    """One sentence about the quality of a map; `doubtful` ones are marked."""

    sentence: str
    doubtful: bool = False


def specialization_notice(roles: RoleMap) -> str:
    """A sentence where most heads have no attribute of their own; else empty."""
    mixed = hardly_specialized(roles)
    return (
        "" if mixed is None else f"{mixed}: they are hardly specialized, and what they show is mostly noise."
    )


def map_quality(roles: RoleMap, evidence: HeadEvidence) -> list[QualityNote]:
    """How good a map is, in sentences, from what its discovery and this page measured.

    >>> map_quality(RoleMap.table2(), HeadEvidence())[0].doubtful
    True
    """
    found: list[QualityNote] = []
    count = roles.evidence.get("image_count")
    if not count:
        found.append(
            QualityNote("This map does not say on which images it was made, so its quality is unknown.", True)
        )
    elif count < ENOUGH_IMAGES:
        found.append(
            QualityNote(
                f"It was made from {count:,} images. With fewer than {ENOUGH_IMAGES:,} varied images, "
                "another set of images would give other roles to many heads.",
                True,
            )
        )
    else:
        found.append(QualityNote(f"It was made from {count:,} images."))
    found += _stability(roles.evidence.get("stability"))
    explained = roles.evidence.get("explained") or {}
    shares = [float(value) for row in explained.values() for value in row]
    if shares:
        mean = sum(shares) / len(shares)
        found.append(
            QualityNote(
                f"The phrases explain {percent(mean)} of the variance of a head on average.", mean < 0.3
            )
        )
    found += _linear_share(roles.evidence.get("linear_share"))
    counts = roles.counts()
    shielded = counts["other"] + counts["generalization"]
    found.append(
        QualityNote(
            f"{shielded} of {len(roles)} heads are shielded from new tokens and {counts['core']} read only "
            "the token of their own attribute."
            + ("" if shielded else " A map that shields nothing keeps nothing."),
            shielded == 0,
        )
    )
    return found + _ablation(evidence)


def _linear_share(share: Any) -> list[QualityNote]:
    """How much of the feature was split among heads, for towers with attention pooling."""
    if not isinstance(share, int | float):
        return []
    sentence = (
        f"This tower pools by attention: {percent(float(share))} of the image feature is split among heads; "
        "the rest passes the pooling MLP and belongs to none, so what heads do is known to that extent only."
    )
    return [QualityNote(sentence, share < 0.5)]


def _stability(stability: Any) -> list[QualityNote]:
    """What a bootstrap over images found, where the map has it."""
    share = stability.get("share") if isinstance(stability, Mapping) else stability
    if not isinstance(share, int | float):
        return []
    sentence = f"{percent(float(share))} of the heads keep their role when the images are drawn again."
    return [QualityNote(sentence, share < 0.7)]


def _ablation(evidence: HeadEvidence) -> list[QualityNote]:
    """Whether the core heads matter more than random ones, where labels were given."""
    core = [row for row in evidence.roles if row["kind"] == "core" and not row["concept"]]
    if not core or evidence.accuracy is None:
        return []
    cost = 100 * (evidence.accuracy - core[0]["accuracy"])
    control = 100 * (evidence.accuracy - core[0]["control"])
    return [
        QualityNote(
            f"Replacing the {core[0]['heads']} core heads by their mean costs {cost:.1f} points of zero-shot "
            f"accuracy; as many random heads of the same layers cost {control:.1f}.",
            cost <= control,
        )
    ]
