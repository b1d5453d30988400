"""Kernels of a CPU: the GPU's forms with what a CPU does not have switched off.

A few cores work through a matrix without tiles that wait for one another, and stream weights and multiply in turn:
``t = launch_s + flops / rate + bytes / bandwidth``, `GemmFit` with an overlap power of 1. Nothing is drawn to usual
values: CPUs differ by factors of a hundred, and the points show all three numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hetplan.calibration.attention import AttentionTable, FloatArray, fit_decode_attention, fit_prefill_attention
from hetplan.catalog.dtypes import DTYPE_BITS, Dtype
from hetplan.catalog.kernels import DecodeAttentionFit, GemmFit, PrefillAttentionFit
from hetplan.errors import InvalidInputError
from hetplan.estimator.correction import fit_correction
from hetplan.estimator.gemm import BITS_PER_BYTE, OUTPUT_BITS, parametric_seconds
from hetplan.estimator.usual import Prior

# In the log: a length scale of m, n or k, how far the three terms are off between shapes, and one measurement. Points
# of one shape differ by a tenth between runs on a machine that others use.
CORRECTION_REACH = 1.0
CORRECTION_SPREAD = 0.12
POINT_SCATTER = 0.08
# Points pull by their error in the log, beyond this linearly.
LOSS_SCALE = 0.1
# A rate that the points do not bound: as many times the largest that they show.
UNBOUND = 1e3

_OFF = 1e-9
_SURE = 0.01
_OPEN = 1.5
# Shares of the GEMMs' rates. There are no blocks that one processor works through while others idle, no second kernel
# after a split, no cache that outlasts the layers between two uses: those terms are switched off.
PREFILL_PRIOR: Prior = {
    "launch_s": (5e-5, _OPEN),
    "compute": (0.5, _OPEN),
    "block_alone": (1 / _OFF, _SURE),
    "block_overhead_flops": (_OFF, _SURE),
    "padding_tokens": (30.0, _OPEN),
    "memory": (1.0, _OPEN),
    "kv": (1.0, _OPEN),
    "cache_gain": (_OFF, _SURE),
    "cache_bytes": (1.0, _SURE),
}
DECODE_PRIOR: Prior = {
    "launch_s": (5e-5, _OPEN),
    "split_s": (_OFF, _SURE),
    "memory": (1.0, _OPEN),
    "cache_gain": (_OFF, _SURE),
    "cache_bytes": (1.0, _SURE),
    "unsplit": (1 / _OFF, _SURE),
    "split": (1 / _OFF, _SURE),
    "unit_s": (1e-6, _OPEN),
    "head_s": (1e-6, _OPEN),
    "compute": (0.5, _OPEN),
}


def fit_serial_gemm(
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    latency_s: ArrayLike,
    *,
    threads: int,
    dtype: Dtype,
    engine: str,
    source: str,
) -> GemmFit:
    """Launch, FLOP/s and bytes/s of matrix multiplications that do not overlap the two, and a correction.

    Parameters
    ----------
    m, n, k, latency_s : (P,) arrays
        Measured shapes and their times.
    threads : int
        Cores that work on one product.
    dtype, engine, source : str
        Labels.

    Raises
    ------
    InvalidInputError
        For fewer than three points.
    """
    tokens, outputs, inputs = (np.asarray(size, dtype=np.float64) for size in (m, n, k))
    seconds = np.asarray(latency_s, dtype=np.float64)
    if len(seconds) < 3:
        raise InvalidInputError(
            f"{len(seconds)} GEMM points in {dtype}: launch, FLOP/s and bytes/s need three at least"
        )
    width = DTYPE_BITS[dtype]
    flops = 2 * tokens * outputs * inputs
    moved = (outputs * inputs + tokens * inputs) * (width / BITS_PER_BYTE) + tokens * outputs * (
        OUTPUT_BITS / BITS_PER_BYTE
    )
    launch_s, flop_s, byte_s = _not_negative(np.stack([np.ones_like(flops), flops, moved], 1), seconds)
    rate = 1 / flop_s if flop_s > 0 else UNBOUND * float((flops / seconds).max())
    bandwidth = 1 / byte_s if byte_s > 0 else UNBOUND * float((moved / seconds).max())
    fit = GemmFit(
        engine=engine,
        dtype=dtype,
        source=source,
        sm_count=threads,
        boost_flops=rate,
        sustained_flops=rate,
        bytes_per_s=bandwidth,
        launch_s=launch_s,
        wave_fraction=0.0,
        k_step_s=0.0,
        fill_inputs=0.0,
        split_s=0.0,
        weight_bits=width,
        activation_bits=width,
        overlap_power=1.0,
    )
    left = np.log(seconds / parametric_seconds(fit, tokens, outputs, inputs))
    return fit.replace(
        correction=fit_correction(
            (tokens, outputs, inputs), left, reach=CORRECTION_REACH, spread=CORRECTION_SPREAD, scatter=POINT_SCATTER
        )
    )


def _not_negative(terms: FloatArray, seconds: FloatArray) -> list[float]:
    """Coefficients of the terms, none below zero, that miss the logs of the times least; large misses count less."""
    from scipy.optimize import least_squares, nnls

    start, _ = nnls(terms / seconds[:, None], np.ones_like(seconds))
    kept = start > 0

    def misses(logs: FloatArray) -> FloatArray:
        return np.asarray(np.log(terms[:, kept] @ np.exp(logs)) - np.log(seconds), dtype=np.float64)

    found = least_squares(misses, np.log(start[kept]), loss="soft_l1", f_scale=LOSS_SCALE)
    coefficients = np.zeros_like(start)
    coefficients[kept] = np.exp(found.x)
    return [float(value) for value in coefficients]


def fit_serial_prefill(points: AttentionTable, gemm: GemmFit) -> PrefillAttentionFit:
    """Prefill attention of a CPU; rates start from those of its GEMMs."""
    return fit_prefill_attention(
        points, peak_flops=gemm.sustained_flops, peak_bytes_per_s=gemm.bytes_per_s, prior=PREFILL_PRIOR
    )


def fit_serial_decode(points: AttentionTable, gemm: GemmFit) -> DecodeAttentionFit:
    """Decode attention of a CPU; rates start from those of its GEMMs."""
    return fit_decode_attention(
        points,
        peak_flops=gemm.sustained_flops,
        peak_bytes_per_s=gemm.bytes_per_s,
        prior=DECODE_PRIOR,
        cache_starts_bytes=(DECODE_PRIOR["cache_bytes"][0],),
    )
