"""Fit the attention models of `hetplan.estimator.attention` to at most 50 measured kernels each.

Which kernels are measured follows from their shapes alone. The fit weighs them against what other GPUs have shown
(dimensionless: shares of the datasheet's peaks), so that a parameter that they do not determine stays where it was;
a GPU without measurements gets those defaults. What the form misses at the points becomes a smooth correction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.catalog.kernels import DecodeAttentionFit, LogCorrection, PrefillAttentionFit
from hetplan.estimator.attention import REFERENCE_ROW_BYTES, decode_attention_seconds, prefill_attention_seconds
from hetplan.estimator.correction import fit_correction
from hetplan.estimator.usual import DECODE_PRIOR, PREFILL_PRIOR, Prior, decode_fields, prefill_fields

FloatArray = NDArray[np.float64]

POINTS = 50
# Decode points with more than this much KV, where its time matters to a step.
LARGE_KV_BYTES = 50e6
LARGE_KV_POINTS = 32
# Decode points have no more: some engines fall back to other kernels there (TensorRT-LLM's take 5 times as long).
MOST_QUERIES_PER_KV_HEAD = 32

# Relative errors from here on count by their size rather than their square: no shape bends the others.
ERROR_SCALE = 0.05
# Correction: how far the form is off between shapes, and how far one measurement is off.
# Tried on vLLM's six tables: from 0.10 to 0.15, and from 0.03 to 0.05, the held-out error changes by 0.4 points.
CORRECTION_SCALE, NOISE_SCALE = 0.1, 0.05
# Length scale of the correction, in logarithms: a factor of 4.5 in a size. Same tables; 2.2 differs by 0.4 points.
LENGTH_SCALE = 1.5
# Cache sizes that a decode fit starts from, A100's 40 MB to beyond RTX PRO 6000's 128: the gradient does not see a
# cache that no point is near.
CACHE_STARTS_BYTES = (2.4e7, 4.7e7, 9.5e7, 1.9e8)


@dataclass(frozen=True)
class AttentionTable:
    """Measured attention kernels of one engine on one GPU, one element per kernel.

    ``tokens``: new tokens of each sequence in prefill, cached ones in decode. ``prefix_tokens``: cached before them.
    """

    sequences: FloatArray
    tokens: FloatArray
    heads: FloatArray
    kv_heads: FloatArray
    seconds: FloatArray
    head_dim: FloatArray | float = 128.0
    prefix_tokens: FloatArray | float = 0.0
    kv_element_bytes: float = 2.0

    def rows(self, index: NDArray[np.intp]) -> AttentionTable:
        """Some of the kernels."""
        count = len(self.seconds)
        columns = {
            name: np.broadcast_to(np.asarray(value, dtype=np.float64), count)[index]
            for name, value in vars(self).items()
            if name != "kv_element_bytes"
        }
        return AttentionTable(**columns, kv_element_bytes=self.kv_element_bytes)

    @property
    def pairs(self) -> FloatArray:
        """Query-key pairs of one sequence, causal."""
        return np.asarray(self.tokens * (np.asarray(self.prefix_tokens) + 0.5 * self.tokens + 0.5))

    @property
    def kv_bytes(self) -> FloatArray:
        """KV that the sequences hold."""
        row = 2 * self.kv_heads * self.head_dim * self.kv_element_bytes
        return np.asarray(self.sequences * self.tokens * row)

    def prefill_seconds(self, fit: PrefillAttentionFit) -> FloatArray:
        """What a fit says of these kernels."""
        return prefill_attention_seconds(
            fit,
            sequences=self.sequences,
            tokens=self.tokens,
            context=self.tokens + self.prefix_tokens,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_head_dim=self.head_dim,
            kv_element_bytes=self.kv_element_bytes,
            # Queries and outputs keep 16 bits over a KV cache of 8.
            element_bytes=max(2.0, self.kv_element_bytes),
        )

    def decode_seconds(self, fit: DecodeAttentionFit) -> FloatArray:
        """What a fit says of these kernels."""
        return decode_attention_seconds(
            fit,
            sequences=self.sequences,
            context=self.tokens,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_head_dim=self.head_dim,
            kv_element_bytes=self.kv_element_bytes,
        )


def choose_prefill_points(table: AttentionTable, count: int = POINTS) -> NDArray[np.intp]:
    """Kernels to measure: far from one another in sequences, tokens, KV heads and queries per KV head."""
    sizes = (table.sequences, table.tokens, table.heads / table.kv_heads, table.kv_heads)
    # A table of one prefix length has a column without range, which changes nothing.
    return _spread((*sizes, 1.0 + np.broadcast_to(table.prefix_tokens, table.seconds.shape)), count)


def choose_decode_points(table: AttentionTable, count: int = POINTS) -> NDArray[np.intp]:
    """The same in KV bytes, context, KV heads and queries per KV head; two thirds where there is much KV to read."""
    usual = table.heads <= MOST_QUERIES_PER_KV_HEAD * table.kv_heads
    large = table.kv_bytes > LARGE_KV_BYTES
    most = min(count * LARGE_KV_POINTS // POINTS, int((usual & large).sum()))
    chosen: list[NDArray[np.intp]] = []
    for rows, share in ((np.flatnonzero(usual & large), most), (np.flatnonzero(usual & ~large), count - most)):
        if len(rows):
            part = table.rows(rows)
            sizes = (part.kv_bytes, part.tokens, part.heads / part.kv_heads, part.kv_heads)
            chosen.append(rows[_spread(sizes, share)])
    return np.concatenate(chosen)


def fit_prefill_attention(
    points: AttentionTable, *, peak_flops: float, peak_bytes_per_s: float, prior: Prior = PREFILL_PRIOR
) -> PrefillAttentionFit:
    """Fit prefill attention to measured kernels.

    Parameters
    ----------
    points : AttentionTable
        The kernels of `choose_prefill_points`.
    peak_flops, peak_bytes_per_s : float
        The datasheet's dense 16-bit FLOP/s and memory bandwidth.
    prior : mapping, optional
        Usual values of the parameters, and how far they vary.

    Returns
    -------
    PrefillAttentionFit
    """

    def seconds(values: dict[str, float]) -> FloatArray:
        fit = PrefillAttentionFit.model_construct(**prefill_fields(values, peak_flops, peak_bytes_per_s))
        return points.prefill_seconds(fit)

    values = _fit(seconds, points.seconds, prior, (prior["cache_bytes"][0],))
    fit = PrefillAttentionFit(**prefill_fields(values, peak_flops, peak_bytes_per_s))
    sizes = (points.heads, points.kv_heads, points.sequences, points.tokens)
    return fit.replace(correction=_correction(sizes, points.seconds / points.prefill_seconds(fit)))


def fit_decode_attention(
    points: AttentionTable,
    *,
    peak_flops: float,
    peak_bytes_per_s: float,
    prior: Prior = DECODE_PRIOR,
    cache_starts_bytes: tuple[float, ...] = CACHE_STARTS_BYTES,
) -> DecodeAttentionFit:
    """Fit decode attention to the kernels of `choose_decode_points`; parameters as in `fit_prefill_attention`.

    ``cache_starts_bytes``: cache sizes to start from, the best of which is kept; one alone is the prior's.
    """

    def seconds(values: dict[str, float]) -> FloatArray:
        fit = DecodeAttentionFit.model_construct(**decode_fields(values, peak_flops, peak_bytes_per_s))
        return points.decode_seconds(fit)

    values = _fit(seconds, points.seconds, prior, cache_starts_bytes)
    fit = DecodeAttentionFit(**decode_fields(values, peak_flops, peak_bytes_per_s))
    row = 2 * np.asarray(points.head_dim) * points.kv_element_bytes / REFERENCE_ROW_BYTES
    sizes = (points.heads, points.kv_heads, points.sequences, points.tokens * row)
    return fit.replace(correction=_correction(sizes, points.seconds / points.decode_seconds(fit)))


def _fit(
    seconds: Callable[[dict[str, float]], FloatArray],
    measured: FloatArray,
    prior: Prior,
    cache_starts: tuple[float, ...],
) -> dict[str, float]:
    """Least absolute-to-squared relative errors plus squared distance from the prior, in logarithms."""
    from scipy.optimize import least_squares

    names = list(prior)
    usual = np.log([prior[name][0] for name in names])
    spread = np.array([prior[name][1] for name in names])
    target = np.log(measured)
    cache = names.index("cache_bytes")
    best = None
    for start in cache_starts:
        centre, width = usual.copy(), spread.copy()
        centre[cache] = np.log(start)
        if len(cache_starts) > 1:  # each start looks around itself
            width[cache] = 0.05

        def residuals(x: FloatArray, centre: FloatArray = centre, width: FloatArray = width) -> FloatArray:
            error = (np.log(seconds(dict(zip(names, np.exp(x).tolist(), strict=True)))) - target) / ERROR_SCALE
            soft = np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error * error) - 1))
            return np.concatenate([soft, (x - centre) / width])

        found = least_squares(residuals, centre, max_nfev=40)
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None  # noqa: S101 - there is always a start
    return dict(zip(names, np.exp(best.x).tolist(), strict=True))


def _correction(sizes: tuple[ArrayLike, ...], ratio: FloatArray) -> LogCorrection:
    arrays = tuple(np.asarray(size, dtype=np.float64) for size in sizes)
    return fit_correction(arrays, np.log(ratio), reach=LENGTH_SCALE, spread=CORRECTION_SCALE, scatter=NOISE_SCALE)


def _spread(sizes: tuple[FloatArray, ...], count: int) -> NDArray[np.intp]:
    """Farthest-point choice in log sizes scaled to their range: the middle one, then always the one most apart."""
    places = np.log(np.stack(sizes, 1))
    places = (places - places.min(0)) / np.maximum(np.ptp(places, 0), 1e-9)
    chosen = [int(np.argmin(((places - 0.5) ** 2).sum(1)))]
    apart = ((places - places[chosen[0]]) ** 2).sum(1)
    while len(chosen) < min(count, len(places)):
        chosen.append(int(np.argmax(apart)))
        apart = np.minimum(apart, ((places - places[chosen[-1]]) ** 2).sum(1))
    return np.array(chosen, dtype=np.intp)
