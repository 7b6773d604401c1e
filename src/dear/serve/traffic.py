"""Limits of callers: requests at once, requests per second, and bytes of bodies held in memory."""

from __future__ import annotations

import time
from collections import Counter
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
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._tokens: dict[str, tuple[float, float]] = {}  # of a caller, and when they were counted

    @contextmanager
    def request(self, caller: Caller) -> Iterator[None]:
        """A request while it is answered."""
        most = self.limits.requests if caller.requests is None else caller.requests
        count = self._requests[caller.name]
        if count >= most:
            raise Refused(
                429, f"a key may have {most} requests at once, got {count + 1}; try again", retry_after=1
            )
        self._requests[caller.name] += 1
        try:
            yield
        finally:
            self._requests[caller.name] -= 1
            if not self._requests[caller.name]:
                del self._requests[caller.name]

    def count(self, caller: Caller) -> None:
        """Count a request against the caller's rate; what one second allows may be saved up."""
        rate = self.limits.rate if caller.rate is None else caller.rate
        if rate == float("inf"):
            return
        now, most = time.monotonic(), max(1.0, rate)
        tokens, since = self._tokens.get(caller.name, (most, now))
        tokens = min(most, tokens + rate * (now - since))
        if tokens < 1:
            wait = max(1, round((1 - tokens) / rate))
            raise Refused(429, f"this key may send {rate:g} requests per second; try again", wait)
        if len(self._tokens) >= _MOST_REMEMBERED:
            self._tokens.clear()
        self._tokens[caller.name] = (tokens - 1, now)

    def hold(self, caller: str, count: int) -> None:
        """Count bytes of a body that are held; negative: released.

        One caller may hold half of all; if others hold all, one that holds little may go on.
        """
        held, most = self._bytes.get(caller, 0) + count, self.limits.held_bytes
        full = sum(self._bytes.values()) + count > most
        share = most // (2 * len({*self._bytes, caller}))
        if count > 0 and (held > max(most // 2, self.limits.upload_bytes) or (full and held > share)):
            raise Refused(429, "too many bytes of requests are held; try again", retry_after=1)
        if held:
            self._bytes[caller] = held
        else:
            self._bytes.pop(caller, None)
