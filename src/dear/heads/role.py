"""The role of one head, and the information of a role map."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from dear.errors import RoleError
from dear.heads.names import KINDS
from dear.utils.schema import Line, Strict, Word

CLEAR = 3.0  #: deviations by which the information of a map must exceed that of rotated heads


class Role(Strict, frozen=True):
    """What one head does."""

    kind: str  #: "core", "other", "generalization" or "mixed"
    concept: Word | None = None  #: the concept a specialized head belongs to; None where none leads
    #: Concept Entropy in bits; None where it was never measured (Table 2)
    entropy: Annotated[float, Meta(ge=0)] | None = None
    #: share of the head's phrases in each concept, largest first
    shares: dict[Word, Annotated[float, Meta(ge=0, le=1)]] = field(default_factory=dict)
    phrases: tuple[Line, ...] = ()  #: the phrases TEXTSPAN picked, in order

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RoleError(f"{self.kind!r} is not a kind of role; choose from {', '.join(KINDS)}")
        if self.kind in ("core", "other") and self.concept is None:
            raise RoleError(f"a head of kind {self.kind!r} needs a concept")


class Information(Strict, frozen=True):
    """Information of a role map in bits, and that of the same heads rotated at random.

    `dear.heads.information` measures it. `exceeds_chance` is the one rule for "close to chance".
    """

    bits: Annotated[float, Meta(ge=0)]
    rotated: Annotated[float, Meta(ge=0)]  #: mean over random rotations
    deviation: Annotated[float, Meta(ge=0)]  #: standard deviation over random rotations
    rotations: Annotated[int, Meta(ge=2)]

    @property
    def exceeds_chance(self) -> bool:
        """Whether the information of the heads exceeds that of rotated heads by `CLEAR` deviations.

        >>> Information(1.65, 1.21, 0.10, 8).exceeds_chance, Information(0.40, 0.39, 0.02, 8).exceeds_chance
        (True, False)
        """
        return self.bits > self.rotated + CLEAR * self.deviation
