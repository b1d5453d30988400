"""Matrix multiplications: the limits that physics sets, and what a fit must find again in its own predictions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hetplan.calibration.gemm import MAX_POINTS, choose_gemm_points, fit_gemm
from hetplan.catalog.kernels import GemmFit
from hetplan.errors import InvalidInputError
from hetplan.estimator.gemm import gemm_seconds
from hetplan.estimator.usual import peaks_behind, usual_gemm

PEAK_FLOPS, PEAK_BYTES_PER_S, SM_COUNT = 989e12, 3.35e12, 132
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 160, 256, 512, 1024, 2048, 4096, 8192, 32768]
SIDES = [256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384]
SHAPES = np.array(list(itertools.product(TOKENS, SIDES, SIDES)), dtype=float)


def make(**changes: float) -> GemmFit:
    fit = usual_gemm(PEAK_FLOPS, PEAK_BYTES_PER_S, sm_count=SM_COUNT)
    return fit.replace(**changes)


def measured(fit: GemmFit, scatter: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    shapes = SHAPES[choose_gemm_points(SHAPES)]
    noise = np.random.default_rng(1).normal(0, scatter, len(shapes))
    return shapes, gemm_seconds(fit, *shapes.T) * np.exp(noise)


def refit(shapes: np.ndarray, seconds: np.ndarray, correct: bool = True) -> GemmFit:
    return fit_gemm(
        *shapes.T, seconds, peak_flops=PEAK_FLOPS, peak_bytes_per_s=PEAK_BYTES_PER_S, sm_count=SM_COUNT, correct=correct
    )


def test_arguments_broadcast_to_the_same_numbers_as_one_by_one() -> None:
    fit = refit(*measured(make(), scatter=0.1))
    m, n, k = np.array([[1.0], [300.0], [9000.0]]), np.array([4096.0, 28672.0]), np.array([4096.0, 1024.0])
    together = gemm_seconds(fit, m, n, k)
    assert together.shape == (3, 2)
    for row, column in np.ndindex(together.shape):
        alone = float(gemm_seconds(fit, m[row, 0], n[column], k[column]))
        assert together[row, column] == pytest.approx(alone, rel=1e-5)


def test_fewer_stored_bytes_take_less_time_and_never_more_tokens() -> None:
    fit = make()
    by_width = gemm_seconds(fit, 8, 8192, 8192, weight_bits=16), gemm_seconds(fit, 8, 8192, 8192, weight_bits=4.25)
    assert 2.5 < by_width[0] / by_width[1] < 16 / 4.25
    for shape in [(4096, 4096), (128256, 8192), (16384, 53248), (64, 4096)]:
        over_tokens = gemm_seconds(fit, np.array(TOKENS, dtype=float), *shape)
        assert (np.diff(over_tokens) > -0.12 * over_tokens[1:]).all()  # a wave of larger tiles may win a little back
        assert over_tokens[-1] > over_tokens[0]


def test_large_multiplications_run_at_the_sustained_rate_and_large_reads_at_the_bandwidth() -> None:
    fit = make()
    m = n = k = 65536.0
    rate = 2 * m * n * k / gemm_seconds(fit, m, n, k)
    assert 0.75 * fit.sustained_flops < rate < fit.sustained_flops  # the main loops' latency remains
    free = make(wave_fraction=0.0, k_step_s=0.0)
    assert 2 * m * n * k / gemm_seconds(free, m, n, k) == pytest.approx(fit.sustained_flops, rel=0.02)
    assert 131072 * 65536 * 2 / gemm_seconds(fit, 1, 131072, 65536) == pytest.approx(fit.bytes_per_s, rel=0.02)


@pytest.mark.parametrize("scatter", [0.0, 0.1])
def test_efficiency_settles_beyond_the_calibrated_range(scatter: float) -> None:
    fit = refit(*measured(make(), scatter))
    rate = [2 * m * 28672 * 8192 / float(gemm_seconds(fit, m, 28672, 8192)) for m in (32768, 65536, 131072)]
    assert rate[1] == pytest.approx(rate[0], rel=0.03)
    assert rate[2] == pytest.approx(rate[1], rel=0.03)
    assert max(rate) < PEAK_FLOPS
    head = 128256 * 8192 * 2 / float(gemm_seconds(fit, 16, 128256, 8192))
    assert 0.6 * PEAK_BYTES_PER_S < head < PEAK_BYTES_PER_S


def test_launch_bounds_the_smallest_and_time_is_finite_everywhere() -> None:
    fit = refit(*measured(make()))
    tiny = gemm_seconds(fit, 1, [1, 8, 64, 128], [1, 64, 8, 128])
    assert np.isfinite(tiny).all()
    assert (tiny > 0.8 * fit.launch_s).all()
    assert (tiny < 3 * fit.launch_s).all()


def test_experts_are_read_once_each() -> None:
    fit = make()
    one, eight = (float(gemm_seconds(fit, 8, 14336, 4096, groups=groups)) for groups in (1, 8))
    assert 6.5 < eight / one < 8.5
    # Enough tokens for every expert: the work is the same, wherever the weights come from.
    dense, spread = (float(gemm_seconds(fit, 65536, 14336, 4096, groups=groups)) for groups in (1, 8))
    assert spread == pytest.approx(dense, rel=0.1)


def test_widths_and_groups_may_differ_by_matrix() -> None:
    fit = make()
    n, bits, groups = np.array([[4096.0], [14336.0]]), np.array([[16.0], [4.0]]), np.array([[1.0], [7.9]])
    together = gemm_seconds(fit, np.array([8.0, 64.0, 512.0]), n, 4096, weight_bits=bits, groups=groups)
    assert together.shape == (2, 3)
    alone = gemm_seconds(fit, 64, 14336, 4096, weight_bits=4, groups=7.9)
    assert together[1, 1] == pytest.approx(float(alone), rel=1e-6)


def test_a_fit_finds_the_rates_that_made_its_points() -> None:
    truth = make(boost_flops=0.8 * PEAK_FLOPS, sustained_flops=0.7 * PEAK_FLOPS, bytes_per_s=0.9 * PEAK_BYTES_PER_S)
    fit = refit(*measured(truth), correct=False)
    assert fit.sustained_flops == pytest.approx(truth.sustained_flops, rel=0.06)
    assert fit.bytes_per_s == pytest.approx(truth.bytes_per_s, rel=0.05)
    assert fit.launch_s == pytest.approx(truth.launch_s, rel=0.15)
    off = gemm_seconds(fit, *SHAPES.T) / gemm_seconds(truth, *SHAPES.T) - 1
    assert np.abs(off).mean() < 0.03


def test_the_correction_follows_a_library_that_is_slow_in_one_region() -> None:
    def slow(shapes: np.ndarray) -> np.ndarray:
        return 1 + 0.25 * np.exp(-0.5 * (np.square((np.log2(shapes) - [8, 12, 12]) / 2).sum(axis=1)))

    truth = gemm_seconds(make(), *SHAPES.T) * slow(SHAPES)
    points = choose_gemm_points(SHAPES)
    plain, corrected = (
        np.abs(gemm_seconds(refit(SHAPES[points], truth[points], correct), *SHAPES.T) / truth - 1).mean()
        for correct in (False, True)
    )
    assert corrected < 0.75 * plain


def test_points_are_few_and_depend_on_shapes_alone() -> None:
    points = choose_gemm_points(SHAPES)
    assert len(set(points.tolist())) == len(points) == MAX_POINTS
    shuffled = np.random.default_rng(0).permutation(len(SHAPES))
    again = choose_gemm_points(SHAPES[shuffled])
    assert {tuple(row) for row in SHAPES[points]} == {tuple(row) for row in SHAPES[shuffled][again]}
    for axis, sizes in enumerate((TOKENS, SIDES, SIDES)):
        chosen = SHAPES[points, axis]
        assert chosen.min() <= sizes[2]
        assert chosen.max() >= sizes[-3]
    assert choose_gemm_points(SHAPES[:7]).tolist() == list(range(7))


def test_points_out_of_the_cache_do_not_count() -> None:
    shapes, seconds = measured(make())
    warm = seconds.copy()
    cached = np.flatnonzero(shapes[:, 0] <= 16)[::3]
    warm[cached] = shapes[cached, 1] * shapes[cached, 2] * 2 / (2 * PEAK_BYTES_PER_S)
    without = np.delete(np.arange(len(shapes)), cached)
    assert refit(shapes, warm) == refit(shapes[without], seconds[without])
    with pytest.raises(InvalidInputError, match="3350 GB/s"):
        refit(shapes, seconds * 1e-6)


def test_peaks_behind_measured_rates_give_them_back() -> None:
    fit = usual_gemm(*peaks_behind(55e12, 248e9))
    assert 2 * 4096 * 8192 * 8192 / float(gemm_seconds(fit, 4096, 8192, 8192)) == pytest.approx(55e12, rel=0.01)
    assert 2 * 8192 * 32768 / float(gemm_seconds(fit, 1, 32768, 8192)) == pytest.approx(248e9, rel=0.01)


def test_quantised_activations_pay_for_their_quantisation() -> None:
    eight = usual_gemm(2 * PEAK_FLOPS, PEAK_BYTES_PER_S, sm_count=SM_COUNT, weight_bits=8, activation_bits=8)
    half = make()
    assert gemm_seconds(eight, 32768, 256, 256) > gemm_seconds(half, 32768, 256, 256)
    assert gemm_seconds(eight, 8192, 16384, 16384) < gemm_seconds(half, 8192, 16384, 16384)
    assert gemm_seconds(eight, 1, 16384, 16384) < 0.7 * gemm_seconds(half, 1, 16384, 16384)


def test_fifty_points_predict_the_rest_of_the_measured_table(data_dir: object) -> None:
    import pandas as pd

    frame = pd.read_csv(f"{data_dir}/aiconfigurator/gemm_H100-SXM.csv")
    frame = frame[(frame.engine == "vllm") & (frame.dtype == "bfloat16")]
    shapes, seconds = frame[["m", "n", "k"]].to_numpy(float), frame.latency_us.to_numpy(float) * 1e-6
    points = choose_gemm_points(shapes)
    others = np.delete(np.arange(len(shapes)), points)
    off = gemm_seconds(refit(shapes[points], seconds[points]), *shapes[others].T) / seconds[others] - 1
    assert np.abs(off).mean() < 0.075
