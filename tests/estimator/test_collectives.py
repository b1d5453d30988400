"""All-reduce curves: exact at the points, sane beyond them."""

from __future__ import annotations

import numpy as np
import pytest

from hetplan.calibration.collectives import (
    POWERS,
    choose_all_reduce_points,
    fit_all_reduce,
    merge_all_reduces,
)
from hetplan.catalog.kernels import AllReduceCurve
from hetplan.errors import InvalidInputError
from hetplan.estimator.collectives import curve_seconds

SIZES = 2.0 ** np.arange(8, 31)


def fitted(library: str, latency_s: float, bytes_per_s: float, tensor_parallel: int = 4) -> AllReduceCurve:
    return fit_all_reduce(
        SIZES, latency_s + SIZES / bytes_per_s,
        host="host", tensor_parallel=tensor_parallel, library=library, source="assumed", reference="a line",
    )  # fmt: skip


def test_eight_sizes_by_a_rule_or_all_there_are() -> None:
    chosen = choose_all_reduce_points(SIZES)
    assert SIZES[chosen].tolist() == [2.0**power for power in POWERS]
    assert len(POWERS) == 8
    np.testing.assert_array_equal(choose_all_reduce_points(SIZES[[3, 9, 15]]), [0, 1, 2])


def test_one_slow_measurement_does_not_stand_for_its_neighbours() -> None:
    times = 10e-6 + SIZES / 1e11
    spiked = np.where(SIZES == 2.0**15, 10 * times, times)
    curve = fit_all_reduce(
        SIZES, spiked, host=None, tensor_parallel=2, library="nccl", source="assumed", reference="a line with a spike"
    )
    assert curve_seconds(curve, 2.0**15) < 1.5 * times[SIZES == 2.0**15].item()


def test_a_latency_and_a_bandwidth_come_back_at_every_size() -> None:
    curve = fitted("nccl-2.27.3", 10e-6, 1e11)
    inside = SIZES[curve.bytes[0] <= SIZES]
    np.testing.assert_allclose(curve_seconds(curve, inside), 10e-6 + inside / 1e11, rtol=1e-12)


def test_latency_is_constant_below_the_points_and_bandwidth_above() -> None:
    curve = fitted("nccl-2.27.3", 10e-6, 1e11)
    below, largest, above = curve_seconds(curve, [1.0, curve.bytes[-1], 4 * curve.bytes[-1]])
    assert below == curve.seconds[0]
    assert above - largest == pytest.approx(3 * curve.bytes[-1] / 1e11)


def test_an_engine_takes_the_faster_library_at_each_size() -> None:
    custom, nccl = fitted("vllm-custom", 4e-6, 5e10), fitted("nccl-2.27.3", 20e-6, 2e11)
    both = merge_all_reduces([custom, nccl])
    assert both.bytes == custom.bytes
    fastest = np.minimum(curve_seconds(custom, both.bytes), curve_seconds(nccl, both.bytes))
    np.testing.assert_allclose(both.seconds, fastest)
    assert curve_seconds(both, 256) == pytest.approx(curve_seconds(custom, 256))
    assert curve_seconds(both, 2**30) == pytest.approx(curve_seconds(nccl, 2**30))


def test_curves_of_different_groups_do_not_merge() -> None:
    with pytest.raises(InvalidInputError, match="one group only"):
        merge_all_reduces([fitted("vllm-custom", 4e-6, 5e10), fitted("nccl", 2e-5, 2e11, tensor_parallel=8)])
