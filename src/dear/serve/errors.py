"""Refusals of the service: a status and one sentence."""

from __future__ import annotations

from dear.errors import DearError


class Refused(DearError):  # noqa: N818 (a response, not a mistake)
    """A refused request: HTTP status, one sentence, and the seconds before a retry (`retry_after`)."""

    def __init__(self, http_status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.retry_after = retry_after


def shutting_down() -> Refused:
    """The refusal of requests that arrive, or still wait, when the service ends."""
    return Refused(503, "the service is shutting down; retry on another instance")
