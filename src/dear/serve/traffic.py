"""What callers use at once: requests, requests per second, and bytes of bodies held in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from dear.serve.errors import Refused
from dear.serve.keys import Caller
from dear.serve.settings import Limits

_MOST_REMEMBERED = 10_000  # callers whose rate is remembered


class Traffic:
    """Counts on the event loop; no locks."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._requests: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._tokens: dict[str, tuple[float, float]] = {}  # what is left of a caller's rate, and when

    @contextmanager
    def request(self, caller: Caller) -> Iterator[None]:
        """A request while it is answered."""
        most = self.limits.requests if caller.requests is None else caller.requests
        count = self._requests.get(caller.name, 0)
        if count >= most:
            raise Refused(429, f"{count} requests of this key are being answered; try again", retry_after=1)
        self._spend(caller)
        self._requests[caller.name] = count + 1
        try:
            yield
        finally:
            self._requests[caller.name] -= 1
            if not self._requests[caller.name]:
                del self._requests[caller.name]

    def _spend(self, caller: Caller) -> None:
        """Take one from what the caller's rate allows; a second's worth may be saved up."""
        rate = self.limits.rate if caller.rate is None else caller.rate
        if rate == float("inf"):
            return
        now, most = time.monotonic(), max(1.0, rate)
        left, since = self._tokens.get(caller.name, (most, now))
        left = min(most, left + rate * (now - since))
        if left < 1:
            wait = (1 - left) / rate
            raise Refused(429, f"more than {rate:g} requests per second", retry_after=max(1, round(wait)))
        if len(self._tokens) >= _MOST_REMEMBERED:
            self._tokens.clear()
        self._tokens[caller.name] = (left - 1, now)

    def hold(self, caller: str, count: int) -> None:
        """Note bytes of a body that are held; negative: given back.

        One caller may hold half of all; where others hold all, one that holds little may go on.
        """
        own, most = self._bytes.get(caller, 0) + count, self.limits.held_bytes
        full = sum(self._bytes.values()) + count > most
        share = most // (2 * len({*self._bytes, caller}))
        if count > 0 and (own > max(most // 2, self.limits.upload_bytes) or (full and own > share)):
            raise Refused(429, "too many bytes of requests are held; try again", retry_after=1)
        if own:
            self._bytes[caller] = own
        else:
            self._bytes.pop(caller, None)
