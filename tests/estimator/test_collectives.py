"""All-reduce curves: exact at the points, sane beyond them."""

from __future__ import annotations

import numpy as np
import pytest

from hetplan.calibration.collectives import (
    POINTS,
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


@pytest.mark.parametrize("library", ["nccl-2.27.3", "vllm-custom", "trtllm-custom", "another"])
@pytest.mark.parametrize("tensor_parallel", [2, 4, 8, 16])
def test_at_most_eight_sizes_from_the_smallest_to_the_largest(library: str, tensor_parallel: int) -> None:
    chosen = choose_all_reduce_points(SIZES, library, tensor_parallel)
    assert len(chosen) <= POINTS
    assert SIZES[chosen[0]] == SIZES[0]
    assert SIZES[chosen[-1]] == SIZES[-1]
    assert np.all(np.diff(SIZES[chosen]) > 0)
    few = choose_all_reduce_points(SIZES[[3, 9, 15]], library, tensor_parallel)
    np.testing.assert_array_equal(few, [0, 1, 2])


def test_a_latency_and_a_bandwidth_come_back_at_every_size() -> None:
    curve = fitted("nccl-2.27.3", 10e-6, 1e11)
    np.testing.assert_allclose(curve_seconds(curve, SIZES), 10e-6 + SIZES / 1e11, rtol=1e-12)


def test_latency_is_constant_below_the_points_and_bandwidth_above() -> None:
    curve = fitted("nccl-2.27.3", 10e-6, 1e11)
    below, largest, above = curve_seconds(curve, [1.0, SIZES[-1], 4 * SIZES[-1]])
    assert below == curve.seconds[0]
    assert above == pytest.approx(4 * largest)


def test_an_engine_takes_the_faster_library_at_each_size() -> None:
    custom, nccl = fitted("vllm-custom", 4e-6, 5e10), fitted("nccl-2.27.3", 20e-6, 2e11)
    both = merge_all_reduces([custom, nccl])
    assert len(both.bytes) <= POINTS
    fastest = np.minimum(curve_seconds(custom, both.bytes), curve_seconds(nccl, both.bytes))
    np.testing.assert_allclose(both.seconds, fastest)
    assert curve_seconds(both, 256) == pytest.approx(curve_seconds(custom, 256))
    assert curve_seconds(both, 2**30) == pytest.approx(curve_seconds(nccl, 2**30))


def test_curves_of_different_groups_do_not_merge() -> None:
    with pytest.raises(InvalidInputError, match="one group only"):
        merge_all_reduces([fitted("vllm-custom", 4e-6, 5e10), fitted("nccl", 2e-5, 2e11, tensor_parallel=8)])
