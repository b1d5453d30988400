"""Attention kernels: what the model must get right beyond the shapes it was fitted to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetplan.calibration.attention import (
    LARGE_KV_BYTES,
    MOST_QUERIES_PER_KV_HEAD,
    POINTS,
    AttentionTable,
    choose_decode_points,
    choose_prefill_points,
    fit_decode_attention,
    fit_prefill_attention,
)
from hetplan.estimator.attention import decode_attention_seconds, prefill_attention_seconds
from hetplan.estimator.correction import correction_factor
from hetplan.estimator.usual import usual_decode_attention, usual_prefill_attention

# H100 SXM: dense bf16 and HBM3, from NVIDIA's datasheet.
PEAK_FLOPS, PEAK_BYTES_PER_S = 989e12, 3.35e12
PREFILL = usual_prefill_attention(PEAK_FLOPS, PEAK_BYTES_PER_S)
DECODE = usual_decode_attention(PEAK_FLOPS, PEAK_BYTES_PER_S)
LLAMA_70B: dict[str, Any] = {"heads": 64, "kv_heads": 8, "head_dim": 128, "value_head_dim": 128}


def prefill(tokens: Any, context: Any = None, sequences: Any = 1, fit: Any = PREFILL, **shape: Any) -> Any:
    reach = tokens if context is None else context
    return prefill_attention_seconds(fit, sequences=sequences, tokens=tokens, context=reach, **(LLAMA_70B | shape))


def decode(context: Any, sequences: Any = 1, fit: Any = DECODE, **shape: Any) -> Any:
    return decode_attention_seconds(fit, sequences=sequences, context=context, **(LLAMA_70B | shape))


def grid(decode_phase: bool) -> AttentionTable:
    """A table of the shapes that kernels are usually measured at, with times that a GPU unlike the default takes."""
    rows = [
        (b, t, h, k)
        for b in (1, 2, 8, 32, 128, 512)
        for t in (2, 32, 128, 512, 2048, 8192, 16384)
        for h in (1, 8, 16, 32, 64)
        for k in (1, 8, 32)
        if k <= h and b * t * h <= 2**22
    ]
    sequences, tokens, heads, kv_heads = np.array(rows, dtype=float).T
    table = AttentionTable(sequences, tokens, heads, kv_heads, np.ones(len(rows)))
    if decode_phase:
        slow = usual_decode_attention(0.7 * PEAK_FLOPS, 0.6 * PEAK_BYTES_PER_S)
        seconds = table.decode_seconds(slow.replace(launch_s=5e-6, cache_bytes=9e7))
    else:
        fit = usual_prefill_attention(0.5 * PEAK_FLOPS, 0.8 * PEAK_BYTES_PER_S)
        seconds = table.prefill_seconds(fit.replace(launch_s=5e-6))
    return AttentionTable(sequences, tokens, heads, kv_heads, seconds)


def test_long_prompts_run_near_the_fitted_rate_and_long_contexts_near_the_bandwidth() -> None:
    flops = 2 * 256 * 64 * 131072**2 / 2
    assert prefill(131072) == pytest.approx(flops / PREFILL.compute_flops, rel=0.05)
    kv = 64 * 131072 * 8 * 256 * 2
    assert decode(131072, sequences=64) == pytest.approx(kv / DECODE.memory_bytes_per_s, rel=0.1)


def test_a_chunk_costs_its_pairs_and_chunks_together_at_least_the_whole_prompt() -> None:
    starts = np.arange(0, 16384, 2048)
    assert prefill(2048, starts + 2048).sum() >= prefill(16384)
    assert prefill(2048, 16384) < prefill(16384)
    assert prefill(2048, 16384) > prefill(2048)


def test_a_sliding_window_costs_less_than_the_whole_context() -> None:
    window = 1024
    assert prefill(16384, window, pairs=16384 * window) < 0.3 * prefill(16384)
    assert decode(window, sequences=64) < 0.2 * decode(16384, sequences=64)


def test_an_eight_bit_cache_halves_long_decode_and_changes_long_prefill_little() -> None:
    halved = decode(32768, sequences=64, kv_element_bytes=1.0)
    assert halved == pytest.approx(0.5 * decode(32768, sequences=64), rel=0.1)
    assert prefill(16384, kv_element_bytes=1.0) == pytest.approx(prefill(16384), rel=0.05)


@pytest.mark.parametrize("head_dim", [64, 80, 192, 256])
def test_other_head_sizes_scale_with_their_work(head_dim: int) -> None:
    shape = {"head_dim": head_dim, "value_head_dim": head_dim}
    assert prefill(32768, **shape) == pytest.approx(head_dim / 128 * prefill(32768), rel=0.1)
    assert decode(32768, sequences=64, **shape) == pytest.approx(head_dim / 128 * decode(32768, sequences=64), rel=0.1)


def test_latent_attention_reads_the_latent_once_and_computes_for_every_head() -> None:
    shape = {"heads": 128, "kv_heads": 1, "head_dim": 576, "value_head_dim": 512, "kv_bytes": 576 * 2}
    seconds = decode(8192, sequences=64, **shape)
    assert seconds >= 64 * 8192 * 1152 / DECODE.memory_bytes_per_s
    assert seconds >= 64 * 8192 * 128 * 2 * (576 + 512) / DECODE.compute_flops
    assert seconds < 10 * 64 * 8192 * 1152 / PEAK_BYTES_PER_S


@given(
    sequences=st.floats(1, 512), tokens=st.floats(1, 131072), more=st.floats(1, 4), heads=st.sampled_from([8, 32, 64])
)
def test_more_work_never_takes_less(sequences: float, tokens: float, more: float, heads: int) -> None:
    for phase in (prefill, decode):
        seconds = phase(tokens, sequences=sequences, heads=heads)
        assert 0 < seconds < np.inf
        assert phase(tokens * more, sequences=sequences, heads=heads) >= seconds * (1 - 1e-9)
        assert phase(tokens, sequences=sequences * more, heads=heads) >= seconds * (1 - 1e-9)


def test_arrays_broadcast_as_single_calls() -> None:
    tokens, sequences = np.array([[100.0], [3000.0]]), np.array([1.0, 2.5, 70.0])
    for phase in (prefill, decode):
        together = phase(tokens, sequences=sequences)
        apart = [[float(phase(float(t), sequences=float(b))) for b in sequences] for t in tokens[:, 0]]
        np.testing.assert_allclose(together, apart, rtol=1e-12)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_fifty_points_find_an_unlike_gpu_and_the_choice_sees_no_times(phase: str) -> None:
    table = grid(phase == "decode")
    choose = choose_decode_points if phase == "decode" else choose_prefill_points
    chosen = choose(table)
    assert len(set(chosen.tolist())) == len(chosen) <= POINTS
    blind = AttentionTable(table.sequences, table.tokens, table.heads, table.kv_heads, np.ones(len(table.seconds)))
    np.testing.assert_array_equal(chosen, choose(blind))
    points = table.rows(chosen)
    peaks = {"peak_flops": PEAK_FLOPS, "peak_bytes_per_s": PEAK_BYTES_PER_S}
    if phase == "decode":
        predicted = table.decode_seconds(fit_decode_attention(points, **peaks))
    else:
        predicted = table.prefill_seconds(fit_prefill_attention(points, **peaks))
    known = table.heads <= MOST_QUERIES_PER_KV_HEAD * table.kv_heads
    rows = known & (table.kv_bytes > LARGE_KV_BYTES) if phase == "decode" else known
    assert np.abs(predicted / table.seconds - 1)[rows].mean() < 0.05


def test_the_correction_fades_away_from_the_points() -> None:
    table = grid(decode_phase=True)
    fit = fit_decode_attention(
        table.rows(choose_decode_points(table)),
        peak_flops=PEAK_FLOPS, peak_bytes_per_s=PEAK_BYTES_PER_S,
    )  # fmt: skip
    assert fit.correction is not None
    far = correction_factor(fit.correction, 1e6, 1e6, 1e9, 1e12)
    assert far == pytest.approx(1.0, abs=0.03)
