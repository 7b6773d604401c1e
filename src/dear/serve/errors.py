"""Refusals of a service: a status and one sentence."""

from __future__ import annotations

from dear.errors import DearError


class Refused(DearError):  # noqa: N818 (a response, not a mistake)
    """A request that is not answered.

    Args:
        http_status: of the response.
        message: one sentence that says what is wrong and what to do.
        retry_after: seconds after which the same request may be answered.
    """

    def __init__(self, http_status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.retry_after = retry_after
