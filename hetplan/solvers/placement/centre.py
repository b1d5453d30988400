"""The point of a polyhedron that is farthest from all its sides: where column generation asks next."""

from __future__ import annotations

import numpy as np

from hetplan.estimator.base import FloatArray

_STEPS, _HALVINGS = 60, 40
# Newton's decrement at which a point is central enough, and the share of a step's promise that it has to keep.
_CENTRAL, _KEPT = 1e-6, 0.1


def analytic_centre(rows: FloatArray, limits: FloatArray, weights: FloatArray, start: FloatArray) -> FloatArray:
    """The z that maximises sum of weights log(rows z - limits), by Newton's method.

    Parameters
    ----------
    rows : (M, N) float
    limits, weights : (M,) float
        Weights above 0.
    start : (N,) float
        With rows z > limits.

    Returns
    -------
    (N,) float
        Strictly inside as well; about central where rounding stops the search.
    """
    point, slack = start, rows @ start - limits
    value = float(weights @ np.log(slack))
    for _ in range(_STEPS):
        scaled = rows * (np.sqrt(weights) / slack)[:, np.newaxis]
        gradient = rows.T @ (weights / slack)
        try:
            step = np.linalg.solve(scaled.T @ scaled, gradient)
        except np.linalg.LinAlgError:
            break
        promise, length = float(gradient @ step), 1.0
        if not promise > _CENTRAL:
            break
        for _ in range(_HALVINGS):
            further = point + length * step
            left = rows @ further - limits
            if left.min() > 0:
                reached = float(weights @ np.log(left))
                if reached >= value + _KEPT * length * promise:
                    break
            length *= 0.5
        else:
            break
        point, slack, value = further, left, reached
    return point
