"""L-BFGS-B of scipy for losses that PyTorch computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Point = NDArray[np.float64]


def minimize_lbfgs(
    loss: Callable[[Point], tuple[float, Point]],
    start: Point,
    bounds: Sequence[tuple[float, float]] | None = None,
    **options: Any,
) -> Point:
    """The point [n] at which the search of a minimum ends.

    scipy's products are small, yet its library of matrix products starts a thread per core, and these and
    PyTorch's wait for each other: with two cores a fit takes up to 50 times as long. So it gets one thread.

    Args:
        loss: from a point to the loss and its gradient [n].
        start: the first point.
        bounds: lowest and highest value of each coordinate.
        options: of scipy's L-BFGS-B.

    >>> minimize_lbfgs(lambda x: (float((x - 1) @ (x - 1)), 2 * (x - 1)), np.zeros(2)).round(6)
    array([1., 1.])
    """
    from scipy.optimize import minimize
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1, user_api="blas"):
        result = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    point: Point = result.x
    return point
