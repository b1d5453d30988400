"""How long starts take, and what leases cost."""

from __future__ import annotations

import numpy as np
import pytest

from hetplan.errors import InvalidInputError, UnknownNameError
from hetplan.simulator.billing import Billing
from hetplan.simulator.start_times import StartTimes


def test_the_papers_total_is_the_mean_of_a_maximum() -> None:
    """111.3 s in the paper: within the error of its 20 runs of both components and 18 of the first."""
    times = StartTimes()
    totals = [times.draw(rng).together_s for rng in [np.random.default_rng(0)] for _ in range(4000)]
    assert np.mean(totals) == pytest.approx(times.expected_together_s(), abs=0.6)
    error = np.hypot(7.54 / np.sqrt(18), 9 / np.sqrt(20))
    assert abs(times.expected_together_s() - 111.3) < error


def test_draws_have_the_means_and_deviations_stated() -> None:
    rng = np.random.default_rng(1)
    drawn = np.array(
        [(d.node_ready_s, d.store_load_s, d.engine_init_s) for d in (StartTimes().draw(rng) for _ in range(4000))]
    )
    assert drawn.mean(axis=0) == pytest.approx([41.55, 61.85, 64.51], rel=0.01)
    assert drawn.std(axis=0) == pytest.approx([7.54, 9.59, 9.25], rel=0.05)
    assert drawn.min() > 0


def test_phases_overlap_only_with_a_store() -> None:
    exact = StartTimes(node_ready_deviation_s=0, store_load_deviation_s=0, engine_init_deviation_s=0)
    draw = exact.draw(np.random.default_rng(0))
    assert draw.together_s == exact.expected_together_s() == pytest.approx(41.55 + 64.51)
    assert draw.one_by_one_s == exact.expected_one_by_one_s() == pytest.approx(41.55 + 61.85 + 64.51)


def test_loading_follows_the_bytes() -> None:
    times = StartTimes(store_load_deviation_s=0, load_bytes_per_s=1e9)
    assert times.draw(np.random.default_rng(0), weight_bytes=70 * 10**9).store_load_s == 70
    with pytest.raises(InvalidInputError, match="weight_bytes"):
        times.draw(np.random.default_rng(0))


def test_overlapping_machines_are_both_paid() -> None:
    bill = Billing({("a", "spot"): 3600.0, ("b", "on_demand"): 7200.0})
    bill.start("1", "a", "spot", 0)
    bill.start("2", "b", "on_demand", 100)
    bill.stop("1", 300)
    assert bill.cost_usd(200) == 200 + 200
    assert bill.cost_usd(1100) == 300 + 2000
    assert bill.by_pool(1100) == {"a": 300, "b": 2000}
    assert bill.by_market(1100) == {"spot": 300, "on_demand": 2000}
    assert bill.machine_s(1100) == {("a", "spot"): 300, ("b", "on_demand"): 1000}
    assert bill.cost_usd(0) == 0


def test_seconds_are_whole_and_at_least_a_minute() -> None:
    bill = Billing({("a", "spot"): 3600.0})
    bill.start("1", "a", "spot", 0.1)
    bill.stop("1", 0.1 + 70.2)
    bill.start("2", "a", "spot", 0)
    bill.stop("2", 5)
    assert bill.cost_usd(1000) == 71 + 60
    # 0.1 + 0.2 is above 0.3, but no second more.
    exact = Billing({("a", "spot"): 3600.0}, least_s=0)
    exact.start("1", "a", "spot", 0.1)
    exact.stop("1", 70.1 + 1e-9)
    assert exact.cost_usd(1000) == 70


def test_wrong_leases_are_refused() -> None:
    bill = Billing({("a", "spot"): 1.0})
    with pytest.raises(UnknownNameError):
        bill.start("1", "a", "on_demand", 0)
    bill.start("1", "a", "spot", 10)
    with pytest.raises(InvalidInputError, match="already"):
        bill.start("1", "a", "spot", 20)
    with pytest.raises(InvalidInputError, match="begins at"):
        bill.stop("1", 5)
    bill.stop("1", 20)
    with pytest.raises(InvalidInputError, match="already"):
        bill.stop("1", 30)
    with pytest.raises(UnknownNameError):
        bill.stop("2", 30)
    with pytest.raises(InvalidInputError):
        Billing({("a", "spot"): -1.0})
    with pytest.raises(InvalidInputError):
        Billing({}, least_s=-1)
