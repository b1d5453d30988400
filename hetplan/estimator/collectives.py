"""Time of an all-reduce read off measured sizes, instead of a latency and a bandwidth.

Measured all-reduces follow no single line: libraries change protocol with size, and custom kernels give way to NCCL.
Between two measured sizes the time is affine in bytes, as a latency and a bandwidth of that stretch; below the
smallest it is constant, above the largest the bandwidth is.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.catalog.kernels import AllReduceCurve

FloatArray = NDArray[np.float64]


def curve_seconds(curve: AllReduceCurve, message_bytes: ArrayLike) -> FloatArray:
    """All-reduce time.

    Parameters
    ----------
    curve : AllReduceCurve
    message_bytes : array_like
        Bytes of one rank before the collective.

    Returns
    -------
    float array
        Seconds.
    """
    size = np.asarray(message_bytes, dtype=np.float64)
    bytes_, seconds = _points(curve)
    slope = (seconds[-1] - seconds[-2]) / (bytes_[-1] - bytes_[-2])
    beyond = np.maximum(size - bytes_[-1], 0.0) * slope
    return np.asarray(np.interp(size, bytes_, seconds) + beyond, dtype=np.float64)


@lru_cache(maxsize=256)
def _points(curve: AllReduceCurve) -> tuple[FloatArray, FloatArray]:
    return np.array(curve.bytes), np.array(curve.seconds)
