"""Which held-out score is the threshold of "none of these"; exported models use it without PyTorch."""

from __future__ import annotations

import math

from dear.errors import UsageError


def threshold_rank(share: float, count: int) -> int:
    """The k of the k-th smallest of `count` held-out scores that rejects at most `share` of known images.

    >>> threshold_rank(0.05, 100), threshold_rank(0.05, 3)
    (5, 1)

    Raises:
        UsageError: the share is not above 0 and at most 0.5, or there are no scores.
    """
    if not 0 < share <= 0.5:
        raise UsageError(f"reject must be a share of known images above 0 and at most 0.5, got {share}")
    if count == 0:
        raise UsageError("the calibration holds no scores, so no threshold can be read from it")
    return max(1, math.floor(share * (count + 1) + 1e-9))
