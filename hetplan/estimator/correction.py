"""The smooth factor that calibration points leave on a kernel's formula."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hetplan.catalog.kernels import LogCorrection
from hetplan.estimator.identity import Same

FloatArray = NDArray[np.float64]


def correction_factor(correction: LogCorrection, *sizes: FloatArray | float) -> FloatArray:
    """Factor at some shapes: one array or number per size, broadcasting; it fades to 1 far from the measured ones."""
    scale, products, weights = _bound(Same(correction))
    places = [_log(size) * scale for size in sizes]
    square: FloatArray | float = 0.0
    for place in places:
        square = square + place * place
    rows = np.empty((*np.shape(square), 2 + len(places)))
    rows[..., 0] = square
    rows[..., 1] = 1.0
    for index, place in enumerate(places, 2):
        rows[..., index] = place
    distances = rows @ products
    return np.asarray(np.exp(np.reciprocal(distances, out=distances) @ weights), dtype=np.float64)


def fit_correction(
    sizes: tuple[FloatArray, ...], log_ratio: FloatArray, *, reach: float, spread: float, scatter: float
) -> LogCorrection:
    """Gaussian-process mean of log ratios of measured to computed times.

    Parameters
    ----------
    sizes : tuple of (P,) float arrays
    log_ratio : (P,) float array
    reach : float
        Length scale in natural logarithms of a size.
    spread, scatter : float
        Expected size of the surface, and of one point about it, in the log.
    """
    places = np.log(np.stack([np.broadcast_to(np.asarray(s, dtype=np.float64), log_ratio.shape) for s in sizes], 1))
    steps = (places[:, None] - places[None]) / reach
    covariance = spread**2 / (1 + 0.5 * (steps**2).sum(-1))
    weights = spread**2 * np.linalg.solve(covariance + scatter**2 * np.eye(len(log_ratio)), log_ratio)
    return LogCorrection(reach=reach, shape=tuple(map(tuple, places.tolist())), weights=tuple(weights.tolist()))


@lru_cache(maxsize=256)
def _bound(kept: Same) -> tuple[float, FloatArray, FloatArray]:
    """Scale of a log size, the matrix that makes 1 + distance**2 / 2 of (x.x, 1, x), and the weights."""
    correction: LogCorrection = kept.value
    scale = math.sqrt(0.5) / correction.reach
    centres = np.array(correction.shape).T * scale
    squares = np.ones_like(centres[:1])
    products = np.concatenate([squares, (centres * centres).sum(0, keepdims=True) + 1.0, -2.0 * centres])
    return scale, products, np.array(correction.weights)


def _log(value: FloatArray | float) -> FloatArray | float:
    """`math.log` of a number: numpy's takes longer for one."""
    return math.log(value) if isinstance(value, (int, float)) else np.log(value)
