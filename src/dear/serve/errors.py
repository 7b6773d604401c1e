"""Refusals of a service: a status and one sentence."""

from __future__ import annotations

from dear.errors import DearError


class Refused(DearError):  # noqa: N818 (a response, not a mistake)
    """A request that is not answered; `retry_after` so many seconds it may be."""

    def __init__(self, http_status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.retry_after = retry_after


def stopping() -> Refused:
    """What is said to those who come, or still wait, when the service ends."""
    return Refused(503, "the service is stopping; ask another one")
