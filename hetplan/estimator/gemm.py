"""Seconds of one matrix multiplication ``Y[m, n] = X[m, k] W[k, n]`` on one GPU.

A kernel launches, then cuts Y into tiles, one per streaming multiprocessor (SM) at a time, while weights and
activations stream in from memory::

    t = launch_s + (compute^p + memory^p)^(1/p)

Compute is the cheapest of a few tile shapes, whole or with k split over idle SMs; part of it comes in full waves of
tiles, part is limited by what the whole chip can draw. Long kernels run at the sustained clock. What the formula
misses near the calibration points (a library's choice of kernels) is a smooth factor interpolated from them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.catalog.kernels import GemmFit
from hetplan.estimator.correction import correction_factor
from hetplan.estimator.identity import Same

Floats = NDArray[np.float64]

# Rows x columns of Y in one thread block: the common tiles of cuBLAS and CUTLASS. More shapes (192, 96, 256 x 64) did
# not lower the error of any table.
TILE_ROWS = np.array([64.0, 64.0, 128.0, 128.0])
TILE_COLUMNS = np.array([64.0, 128.0, 128.0, 256.0])
SMALL_TILE = TILE_ROWS[-1] * TILE_COLUMNS[-1] > TILE_ROWS * TILE_COLUMNS
OUTPUT_BITS = 16  # every table writes 16-bit outputs
BITS_PER_BYTE = 8


class Shared(NamedTuple):
    """What all GPUs share; learnt by ``calibration/learn_gemm.py`` from A100, H100 and L40S tables."""

    overlap_power: float = 2.5
    """p of the overlap of compute and memory: 1 is one after the other, infinity a roofline."""
    tile_load: float = 25.0
    """Rows plus columns of operands whose loading costs as much as multiplying one element: small tiles load more."""
    small_tile_penalty: float = 0.2
    """Extra time of the smaller tiles once they need a second wave; libraries then pick the largest."""
    throttle_s: float = 1e-3
    """Length of a kernel whose clock is halfway from boost to sustained."""
    ramp_s: float = 1e-6
    """Time to fill the memory pipeline, reached by large transfers."""
    ramp_bytes: float = 1e7
    """Transfer at which half of ``ramp_s`` is lost."""


SHARED = Shared()


def gemm_seconds(
    fit: GemmFit,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    *,
    weight_bits: ArrayLike | None = None,
    activation_bits: float | None = None,
    groups: ArrayLike = 1.0,
) -> Floats:
    """Time of matrix multiplications of ``m`` tokens with ``k x n`` weights.

    Parameters
    ----------
    fit : GemmFit
        GPU, engine and number format.
    m, n, k : float arrays
        Tokens, outputs and inputs, >= 1; they broadcast.
    weight_bits : float array, optional
        Width other than that of ``fit``: 4-bit weights multiplied at the 16-bit rate read a quarter of the bytes.
    activation_bits : float, optional
        Likewise.
    groups : float array
        Weight matrices that are touched (experts of a mixture), over which the ``m`` tokens are spread; a fraction
        where it is an expectation.

    Returns
    -------
    float array
        Seconds, of the common shape.

    Examples
    --------
    >>> from hetplan.estimator.usual import usual_gemm
    >>> fit = usual_gemm(peak_flops=989e12, peak_bytes_per_s=3.35e12, sm_count=132)
    >>> decode, prefill = gemm_seconds(fit, [1, 8192], 8192, 8192)
    >>> bool(40e-6 < decode < 70e-6), bool(1.1e-3 < prefill < 1.9e-3)
    (True, True)
    """
    m, n, k, groups = (np.asarray(value, dtype=float) for value in (m, n, k, groups))
    bits = None if weight_bits is None else np.asarray(weight_bits, dtype=float)
    seconds = parametric_seconds(fit, m, n, k, bits, activation_bits, groups)
    if fit.correction is not None:
        # The groups' tiles, weights and FLOPs are those of one GEMM with their columns side by side.
        seconds *= correction_factor(fit.correction, m / groups, n * groups, k)
    return seconds


def parametric_seconds(
    fit: GemmFit,
    m: Floats,
    n: Floats,
    k: Floats,
    weight_bits: Floats | float | None = None,
    activation_bits: float | None = None,
    groups: Floats | float = 1.0,
    shared: Shared = SHARED,
) -> Floats:
    """`gemm_seconds` without the correction; what the calibration fits."""
    axes = (...,) + (None,) * max(np.ndim(m), np.ndim(n), np.ndim(k), np.ndim(groups))
    step_s, penalised_s = _shared_k_steps(Same(fit)) if shared is SHARED else _k_steps(fit, shared)
    step_s, penalised_s = step_s[axes], penalised_s[axes]
    if fit.dispatch_fraction:
        m_group = m / groups
        taller_s = fit.dispatch_fraction * fit.k_step_s * ((m_group > 64) + 2.0 * (m_group > 128))
        step_s, penalised_s = step_s + taller_s, penalised_s + taller_s
    # Tiles over SMs: waves of tiles, before rounding up.
    load = np.ceil((m / groups) / TILE_ROWS[axes]) * np.ceil(n / TILE_COLUMNS[axes]) * (groups / fit.sm_count)
    # k is cut in as many parts as leave no SM idle; with a full wave there is nothing to gain.
    split = (k * load + fit.fill_inputs) * step_s + fit.split_s
    whole = (k + fit.fill_inputs) * step_s
    one_wave = np.minimum(whole, split)
    compute = np.where(load > 1, np.ceil(load) * (k + fit.fill_inputs) * penalised_s, one_wave).min(axis=0)
    chip = (1 - fit.wave_fraction) * 2 / fit.boost_flops
    compute = compute + m * n * (k * chip)
    slowdown = fit.boost_flops / fit.sustained_flops - 1
    compute = compute * (1 + slowdown * compute / (compute + shared.throttle_s))

    weight_bits = fit.weight_bits if weight_bits is None else weight_bits
    activation_bits = fit.activation_bits if activation_bits is None else activation_bits
    moved = n * k * (groups * (weight_bits / BITS_PER_BYTE))
    moved = moved + m * (k * (activation_bits / BITS_PER_BYTE) + n * (OUTPUT_BITS / BITS_PER_BYTE))
    memory = moved * (1 / fit.bytes_per_s + shared.ramp_s / (moved + shared.ramp_bytes))

    power = fit.overlap_power or shared.overlap_power
    seconds: Floats = fit.launch_s + (compute**power + memory**power) ** (1 / power)
    if activation_bits < OUTPUT_BITS and fit.quantise_bytes_per_s is not None:
        row_bytes = k * (OUTPUT_BITS + activation_bits) / BITS_PER_BYTE
        seconds = seconds + m * (fit.quantise_row_s + row_bytes / fit.quantise_bytes_per_s)
    return seconds


@lru_cache(maxsize=256)
def _shared_k_steps(kept: Same) -> tuple[Floats, Floats]:
    return _k_steps(kept.value, SHARED)


def _k_steps(fit: GemmFit, shared: Shared) -> tuple[Floats, Floats]:
    """Seconds per element of k of a tile of each shape, in the only wave and in one of several."""
    wave_s = fit.wave_fraction * 2 * TILE_ROWS * TILE_COLUMNS * fit.sm_count / fit.boost_flops
    step_s = wave_s * (1 + shared.tile_load * (1 / TILE_ROWS + 1 / TILE_COLUMNS)) + fit.k_step_s
    return step_s, step_s * np.where(SMALL_TILE, 1 + shared.small_tile_penalty, 1.0)
