"""How good a role map is, in sentences."""

from __future__ import annotations

from collections.abc import Mapping

from dear.heads.focus import few_specialized_note
from dear.heads.roles import RoleMap
from dear.heads.stability import ENOUGH_IMAGES
from dear.report.page import percent
from dear.tasks.roles.evidence import HeadEvidence


def specialization_notice(roles: RoleMap) -> str:
    """A sentence where the map is close to chance, or most heads have no attribute; else empty."""
    if caveat := roles.caveat():
        return caveat
    mixed = few_specialized_note(roles)
    return (
        "" if mixed is None else f"{mixed}: they are hardly specialized, and what they show is mostly noise."
    )


def map_quality(roles: RoleMap, evidence: HeadEvidence) -> list[tuple[str, bool]]:
    """How good a map is, from what its discovery and this page measured: sentences, and which are doubtful.

    >>> map_quality(RoleMap.table2(), HeadEvidence())[0]
    ('This map does not say on which images it was made, so its quality is unknown.', True)
    """
    sentences: list[tuple[str, bool]] = []
    count = roles.evidence.get("image_count")
    if roles.evidence.get("source") == "weights":
        sentences.append(("It was made from weights alone, without images.", False))
    elif not count:
        sentences.append(
            ("This map does not say on which images it was made, so its quality is unknown.", True)
        )
    elif count < ENOUGH_IMAGES:
        sentence = (
            f"It was made from {count:,} images. With fewer than {ENOUGH_IMAGES:,} varied images, "
            "another set of images would give other roles to many heads."
        )
        sentences.append((sentence, True))
    else:
        sentences.append((f"It was made from {count:,} images.", False))
    stability = roles.evidence.get("stability")  # what a bootstrap over images or phrases reports
    share = stability.get("share") if isinstance(stability, Mapping) else stability
    if isinstance(share, int | float):
        over = stability.get("over", "images") if isinstance(stability, Mapping) else "images"
        chance = stability.get("chance") if isinstance(stability, Mapping) else None
        by_chance = f" ({percent(float(chance))} by chance)" if isinstance(chance, int | float) else ""
        sentence = f"{percent(float(share))} of the heads keep their role when the {over} are drawn again"
        near_chance = isinstance(chance, int | float) and share < chance + 0.1
        sentences.append((f"{sentence}{by_chance}.", share < 0.7 or near_chance))
    explained = roles.evidence.get("explained") or {}
    shares = [float(value) for row in explained.values() for value in row]
    if shares:
        mean = sum(shares) / len(shares)
        sentence = f"The phrases explain {percent(mean)} of the variance of a head on average."
        sentences.append((sentence, mean < 0.3))
    linear = roles.evidence.get("linear_share")  # of towers with attention pooling
    if isinstance(linear, int | float):
        sentence = (
            f"This tower pools by attention: {percent(float(linear))} of the image feature is split among "
            "heads; the rest passes the pooling MLP and belongs to none, so what heads do is known to that "
            "extent only."
        )
        sentences.append((sentence, linear < 0.5))
    if not roles.caveat():  # else the page shows no roles
        counts = roles.counts()
        shielded = counts["other"] + counts["generalization"]
        sentence = (
            f"{shielded} of {len(roles)} heads are shielded from new tokens and {counts['core']} read only "
            "the token of their own attribute."
        )
        sentence += "" if shielded else " Training may change what every head adds for other classes."
        sentences.append((sentence, shielded == 0))
    core = [row for row in evidence.roles if row["kind"] == "core" and not row["concept"]]
    if core and evidence.accuracy is not None:  # labels were given
        cost = 100 * (evidence.accuracy - core[0]["accuracy"])
        control = 100 * (evidence.accuracy - core[0]["control"])
        sentence = (
            f"Replacing the {core[0]['heads']} core heads by their mean costs {cost:.1f} points of zero-shot "
            f"accuracy; as many random heads of the same layers cost {control:.1f}."
        )
        sentences.append((sentence, cost <= control))
    return sentences
