"""The mean wait against what is known in closed form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hetplan as hp
from hetplan.estimator.queueing import mg1_wait_s

USE = st.floats(0.0, 0.99)
MEAN = st.floats(1e-3, 1e3)


@given(USE, MEAN)
def test_exponential_service_is_mm1(use: float, mean: float) -> None:
    arrivals, rate = use / mean, 1 / mean
    # M/M/1: time in the system 1 / (mu - lambda).
    assert mg1_wait_s(arrivals, mean, 1.0) == pytest.approx(1 / (rate - arrivals) - mean, rel=1e-9, abs=1e-9 * mean)


@given(USE, MEAN)
def test_equal_service_is_md1(use: float, mean: float) -> None:
    # M/D/1: rho / (2 mu (1 - rho)).
    assert mg1_wait_s(use / mean, mean, 0.0) == pytest.approx(use * mean / (2 * (1 - use)), rel=1e-9)


def test_two_kinds_of_service_times() -> None:
    """P-K by second moments: half take 1 s, half 3 s; E[S^2] = 5, wait = lambda E[S^2] / (2 (1 - rho))."""
    assert mg1_wait_s(0.25, 2.0, 5 / 4 - 1) == pytest.approx(0.25 * 5 / (2 * 0.5))


def test_the_wait_simulated() -> None:
    """Lindley's recursion over 200,000 requests with Erlang-2 service (scv 1/2)."""
    rng = np.random.default_rng(0)
    gaps, service = rng.exponential(1 / 0.6, 200_000), rng.gamma(2, 0.5, 200_000)
    wait, total = 0.0, 0.0
    for gap, taken in zip(gaps, service, strict=True):
        total += wait
        wait = max(0.0, wait + taken - gap)
    assert total / len(gaps) == pytest.approx(float(mg1_wait_s(0.6, 1.0, 0.5)), rel=0.05)


def test_shapes_broadcast() -> None:
    found = mg1_wait_s([0.1, 0.5], [[1.0], [0.5]], 1.0)
    assert found.shape == (2, 2)
    assert found[0, 1] == pytest.approx(1.0)
    assert found[0, 0] < found[0, 1]


def test_nobody_waits_where_nobody_arrives() -> None:
    assert mg1_wait_s(0.0, 5.0, 3.0) == 0.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((1.0, 1.0, 1.0), "grows for ever"),
        (([0.1, 3.0], 0.5, 0.0), "3 arrivals/s of 0.5 s"),
        ((-1.0, 1.0, 1.0), "arrivals_per_s has -1"),
        ((0.5, -1.0, 1.0), "service_mean_s has -1"),
        ((0.5, 1.0, -0.5), "service_scv has -0.5"),
        ((float("nan"), 1.0, 1.0), "arrivals_per_s has nan"),
        (([1.0, 2.0], [0.1, 0.2, 0.3], 1.0), "one shape"),
    ],
)
def test_refusals(arguments: tuple[object, ...], said: str) -> None:
    with pytest.raises(hp.InvalidInputError, match=said):
        mg1_wait_s(*arguments)  # type: ignore[arg-type]
