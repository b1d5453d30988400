"""Demand that drifts: an allocation that stays beside one that is solved again."""

from __future__ import annotations

import numpy as np
import pytest

import hetplan as hp
from hetplan.problem.allocation import AllocationProblem
from hetplan.solvers.allocation.rolling import rolling, walk
from tests.solvers.allocation.small_problems import small_problem


@pytest.mark.parametrize("solver", ["gh", "agh", "milp"])
def test_where_nothing_drifts_nothing_is_switched_and_the_static_cost_is_paid(solver):
    problem = AllocationProblem.canonical(seed=1)
    result = rolling(problem, solver=solver, windows=6, sigma=0.0, trials=2)
    assert (result.switches == 0).all()
    assert (result.switching_usd == 0).all()
    np.testing.assert_array_equal(result.rolling_usd, result.static_usd)
    np.testing.assert_allclose(result.static_usd, hp.optimize(problem, solver=solver).objective, rtol=1e-7)


def drifting(**options: object):
    return rolling(AllocationProblem.canonical(seed=2), solver="agh", windows=8, sigma=0.5, trials=2, **options)


def test_solving_again_saves_where_demand_drifts_far():
    # The heuristic drops types of this instance, so that other rates lead it to quite other answers.
    result = drifting()
    assert (result.switches > 0).any()
    assert (result.switching_usd[result.switches > 0] > 0).any()
    assert result.rolling_usd.mean() < result.static_usd.mean()


def test_the_same_seed_gives_the_same_costs_and_another_others():
    one, again, other = drifting(seed=1), drifting(seed=1), drifting(seed=2)
    np.testing.assert_array_equal(one.rolling_usd, again.rolling_usd)
    assert (one.static_usd != other.static_usd).any()


def test_dear_switching_is_left():
    free, dear = drifting(switching_usd_per_gb=0.0), drifting(switching_usd_per_gb=1e6)
    assert (free.switching_usd == 0).all()
    # What needs no weights loaded, such as other routes on what is there, may still be adopted.
    assert (dear.switching_usd == 0).all()
    assert dear.switches.sum() <= free.switches.sum()


def test_slower_loading_costs_more():
    fast, slow = drifting(load_gb_per_s=10.0), drifting(load_gb_per_s=0.5)
    assert fast.switching_usd.sum() < slow.switching_usd.sum()


def test_without_solving_again_only_the_static_cost_is_there():
    result = drifting(resolve=False)
    assert np.isnan(result.rolling_usd).all()
    np.testing.assert_array_equal(result.static_usd, drifting().static_usd)


def test_a_problem_with_given_configurations_rolls():
    problem = small_problem(1, AllocationProblem.canonical().decisions, estimated=True)
    result = rolling(problem, solver="milp", windows=4, sigma=0.2, trials=1)
    assert np.isfinite(result.rolling_usd).all()


def test_a_walk_begins_at_the_problem_and_stretches_with_sigma():
    one, twice = walk(3, 50, 0.02, 0, 0), walk(3, 50, 0.04, 0, 0)
    assert (one[0] == 1).all()
    np.testing.assert_allclose(2 * np.log(one), np.log(twice))
    steps = np.diff(np.log(walk(100, 101, 0.03, 1, 0)), axis=0)
    assert steps.std() == pytest.approx(0.03, rel=0.05)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"windows": 0}, "windows"),
        ({"trials": 1.5}, "trials"),
        ({"sigma": -0.1}, "sigma is a number from 0"),
        ({"load_gb_per_s": 0.0}, "load_gb_per_s"),
        ({"switching_usd_per_gb": -1.0}, "switching_usd_per_gb is a number from 0"),
        ({"solver": "even"}, "even"),
    ],
)
def test_what_cannot_be_is_refused_with_its_value(values, said):
    with pytest.raises(hp.HetplanError, match=said):
        rolling(AllocationProblem.canonical(seed=1), **values)


def test_progress_counts_trials():
    seen = []
    problem = AllocationProblem.canonical(seed=1)
    rolling(problem, windows=2, trials=2, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
