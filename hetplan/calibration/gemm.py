"""Fit `GemmFit` to at most fifty measured shapes, or make one from a datasheet."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.catalog.dtypes import Dtype
from hetplan.catalog.kernels import GemmFit
from hetplan.errors import InvalidInputError
from hetplan.estimator.correction import fit_correction
from hetplan.estimator.gemm import (
    BITS_PER_BYTE,
    SHARED,
    Floats,
    Shared,
    parametric_seconds,
)
from hetplan.estimator.usual import Default, gemm_defaults, gemm_fields, usual_gemm

MAX_POINTS = 50

# The correction's prior spread and the scatter of one point about a smooth surface, both in the log of the time:
# neighbours in the tables of A100, H100 and L40S differ by 3 to 7% from a line through them.
CORRECTION_REACH = 1.0  # in natural logarithms of m, n or k
CORRECTION_SPREAD = 0.06
POINT_SCATTER = 0.06
LOSS_SCALE = 0.1  # residuals beyond 10% count linearly: a library's odd kernel must not move the rates
LLOYD_ROUNDS = 100  # enough for 7,344 shapes to settle
FRACTIONS = ("wave_fraction", "dispatch_fraction")


def choose_gemm_points(shapes: ArrayLike, limit: int = MAX_POINTS) -> NDArray[np.intp]:
    """Shapes to measure: one for each of ``limit`` cells into which k-means cuts log (m, n, k).

    The cells start from points that lie farthest apart, so the rule is deterministic and sees nothing but shapes.

    Parameters
    ----------
    shapes : (S, 3) array
        m, n, k that could be measured.
    limit : int
        Most points to choose.

    Returns
    -------
    (P,) int array
        Rows of ``shapes``, P <= ``limit``, sorted.
    """
    table = np.asarray(shapes, dtype=float).reshape(-1, 3)
    _, first = np.unique(table, axis=0, return_index=True)
    if len(first) <= limit:
        return np.sort(first)
    x = np.log2(table[first])
    centres = x[_farthest(x, limit)]
    for _ in range(LLOYD_ROUNDS):
        nearest = (np.square(centres).sum(axis=1) - 2 * x @ centres.T).argmin(axis=1)
        size = np.bincount(nearest, minlength=limit)
        sums = np.stack([np.bincount(nearest, x[:, axis], limit) for axis in range(3)], axis=1)
        moved = np.where(size[:, None] > 0, sums / np.maximum(size, 1)[:, None], centres)
        if np.array_equal(moved, centres):
            break
        centres = moved
    chosen: list[int] = []
    for centre in centres:
        distance = np.square(x - centre).sum(axis=1)
        distance[chosen] = np.inf
        chosen.append(int(distance.argmin()))
    return np.sort(first[chosen])


def _farthest(x: Floats, count: int) -> list[int]:
    """Start at the row nearest the mean, then take the row farthest from all taken."""
    distance = np.square(x - x.mean(axis=0)).sum(axis=1)
    rows = [int(distance.argmin())]
    distance = np.full(len(x), np.inf)
    while len(rows) < count:
        distance = np.minimum(distance, np.square(x - x[rows[-1]]).sum(axis=1))
        rows.append(int(distance.argmax()))
    return rows


def fit_gemm(
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    latency_s: ArrayLike,
    *,
    peak_flops: float,
    peak_bytes_per_s: float,
    sm_count: int | None = None,
    engine: str = "any",
    dtype: Dtype = "bf16",
    weight_bits: float = 16,
    activation_bits: float = 16,
    source: str = "measured",
    correct: bool = True,
    defaults: Mapping[str, Default] | None = None,
    shared: Shared = SHARED,
) -> GemmFit:
    """Fit the physical parameters, drawn towards the shared defaults, then the correction.

    Parameters
    ----------
    m, n, k, latency_s : (P,) arrays
        Measured shapes and their times.
    correct : bool
        Whether to interpolate what the formula leaves at the points.
    source : str
        Where the points come from.
    peak_flops, peak_bytes_per_s, sm_count, engine, dtype, weight_bits, activation_bits, defaults
        As for `usual_gemm`.
    shared : Shared
        Constants other than the shipped ones.

    Raises
    ------
    InvalidInputError
        If no point is left after those that no memory of this bandwidth could have served.

    Notes
    -----
    A point that beats the datasheet's bandwidth found its operands in the L2, which one layer after another never
    does: it says nothing about serving and is left out.
    """
    shapes = np.stack([np.asarray(size, dtype=float) for size in (m, n, k)], axis=1)
    measured = np.asarray(latency_s, dtype=float)
    real = served_from_memory(shapes, measured, peak_bytes_per_s, weight_bits, activation_bits)
    if not real.any():
        raise InvalidInputError(
            f"none of {real.size} GEMM points can have come from memory at {peak_bytes_per_s / 1e9:g} GB/s; "
            "check latency_s (seconds) and peak_bytes_per_s"
        )
    shapes = shapes[real]
    tokens, outputs, inputs = shapes.T
    log_latency = np.log(measured[real])
    known = dict(defaults if defaults is not None else gemm_defaults(activation_bits))
    centre = np.array([_to_free(name, default.value) for name, default in known.items()])
    spread = np.array([default.spread for default in known.values()])
    start = usual_gemm(
        peak_flops, peak_bytes_per_s, sm_count=sm_count, engine=engine, dtype=dtype, weight_bits=weight_bits,
        activation_bits=activation_bits, defaults=known,
    )  # fmt: skip

    def at(free: Floats) -> GemmFit:
        values = {name: _from_free(name, value) for name, value in zip(known, free, strict=True)}
        return start.model_copy(update=gemm_fields(values, peak_flops, peak_bytes_per_s))

    def residuals(free: Floats) -> Floats:
        misfit = np.log(parametric_seconds(at(free), tokens, outputs, inputs, shared=shared)) - log_latency
        return np.concatenate([misfit, (free - centre) / spread * LOSS_SCALE])

    from scipy.optimize import least_squares

    # Within five spreads: a parameter that the points do not show must not run away.
    bounds = (centre - 5 * spread, centre + 5 * spread)
    best = least_squares(residuals, centre, bounds=bounds, loss="soft_l1", f_scale=LOSS_SCALE, max_nfev=60)
    fit = at(best.x).replace(source=source)
    if not correct:
        return fit
    left = log_latency - np.log(parametric_seconds(fit, tokens, outputs, inputs, shared=shared))
    correction = fit_correction(
        (tokens, outputs, inputs), left, reach=CORRECTION_REACH, spread=CORRECTION_SPREAD, scatter=POINT_SCATTER
    )
    return fit.replace(correction=correction)


def served_from_memory(
    shapes: Floats, latency_s: Floats, peak_bytes_per_s: float, weight_bits: float = 16, activation_bits: float = 16
) -> NDArray[np.bool_]:
    """Which points (rows m, n, k) read their operands no faster than the memory can."""
    m, n, k = shapes.T
    read = (n * k * weight_bits + m * k * activation_bits) / BITS_PER_BYTE
    real: NDArray[np.bool_] = (latency_s > 0) & (read <= peak_bytes_per_s * latency_s)
    return real


def _to_free(name: str, value: float) -> float:
    return float(np.log(value / (1 - value)) if name in FRACTIONS else np.log(value))


def _from_free(name: str, free: float) -> float:
    return float(1 / (1 + np.exp(-free)) if name in FRACTIONS else np.exp(free))
