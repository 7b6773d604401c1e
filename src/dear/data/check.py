"""Finds every picture that cannot be read, in one pass."""

from __future__ import annotations

from dataclasses import dataclass

from dear.data.pictures import PictureSet, threaded
from dear.errors import DataError, InputError, UsageError

_SHOWN = 20


@dataclass(frozen=True)
class Unreadable:
    """A picture that cannot be read, and why."""

    key: str
    reason: str


@dataclass(frozen=True)
class PictureReport:
    """What a pass over all pictures found.

    Attributes:
        checked: how many pictures were decoded.
        unreadable: those that could not be.
        kept: the set without them.
    """

    checked: int
    unreadable: tuple[Unreadable, ...]
    kept: PictureSet

    def __str__(self) -> str:
        if not self.unreadable:
            return f"all {self.checked} pictures can be read"
        lines = [f"{len(self.unreadable)} of {self.checked} pictures cannot be read:"]
        lines += [f"  {picture.reason}" for picture in self.unreadable[:_SHOWN]]
        if len(self.unreadable) > _SHOWN:
            lines.append(f"  and {len(self.unreadable) - _SHOWN} more")
        return "\n".join(lines)


def check_pictures(pictures: PictureSet, policy: str = "stop") -> PictureReport:
    """Decode every picture of a set once, by several threads.

    Args:
        pictures: the set.
        policy: "stop" raises if any picture cannot be read; "skip" leaves those out of `kept`.

    Raises:
        DataError: under "stop", listing all of them; under "skip", if no picture is left.
        UsageError: an unknown policy.
    """
    if policy not in ("stop", "skip"):
        raise UsageError(f"unreadable pictures: the policy is stop or skip, not {policy!r}")

    def problem(index: int) -> Unreadable | None:
        try:
            pictures.picture(index)
        except InputError as error:
            return Unreadable(pictures.key(index), str(error))
        return None

    problems = threaded(problem, range(len(pictures)))
    bad = tuple(found for found in problems if found is not None)
    good = [index for index, found in enumerate(problems) if found is None]
    report = PictureReport(len(pictures), bad, pictures.subset(good) if bad else pictures)
    if bad and policy == "stop":
        raise DataError(f"{pictures.name}: {report}\nmend or remove them, or skip them (--unreadable skip)")
    if bad and not good:
        raise DataError(
            f"{pictures.name}: none of its {len(pictures)} pictures can be read; the first: {bad[0].reason}"
        )
    return report
