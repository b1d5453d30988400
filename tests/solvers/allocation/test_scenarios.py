"""The two-stage evaluation: what a plan costs when delays, errors and arrivals are not as planned."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.optimize import linprog

import hetplan as hp
from hetplan.problem.allocation import AllocationProblem, Decisions
from hetplan.solvers.allocation.scenarios import Operations, Placement, evaluate, placement_of
from hetplan.solvers.allocation.studies import ablation, budget_study, stress_study, sweep
from hetplan.solvers.base import get_allocation_solver
from tests.solvers.allocation.small_problems import readings, small_problem

NOTHING_DRAWN = {"delay_spread": 0.0, "error_spread": 0.0, "arrival_spread": 0.0}


def canonical_plan(seed: int = 1, solver: str = "milp", **options: object) -> hp.Plan:
    return hp.optimize(AllocationProblem.canonical(seed=seed, **options), solver=solver)


@pytest.mark.parametrize("seed", range(3))
def test_with_nothing_drawn_an_optimal_plan_costs_what_it_says(seed):
    plan = canonical_plan(seed)
    result = evaluate(plan, scenarios=2, **NOTHING_DRAWN)
    assert plan.status == "optimal"
    assert result.mean_usd == pytest.approx(plan.objective, abs=1e-6)
    assert result.violation_rate == 0.0


@pytest.mark.parametrize("decisions", readings(), ids=str)
@pytest.mark.parametrize("estimated", [False, True])
def test_with_nothing_drawn_no_plan_costs_more_than_it_says(decisions, estimated):
    # It may cost less: its second stage has neither budget nor storage to keep, and may find better shares.
    problem = small_problem(1, decisions, estimated=estimated, ttft=True)
    plan = hp.optimize(problem, solver="milp")
    result = evaluate(plan, scenarios=1, **NOTHING_DRAWN)
    left_out = sum(q.storage_kb_per_token * 1e-6 * q.tokens * q.requests_per_hour for q in problem.query_types)
    storage_usd = left_out * problem.storage_usd_per_gb_hour * problem.horizon_hours
    # What is stored beside that is not in what the second stage minimises.
    assert result.mean_usd <= plan.objective + storage_usd + 1e-6
    assert result.delay_usd[0] + result.unserved_usd[0] <= plan.objective


def test_a_solution_and_its_plan_are_evaluated_alike():
    problem = AllocationProblem.canonical(seed=3)
    found = get_allocation_solver("agh").solve(problem)
    one = evaluate(found, scenarios=30)
    other = evaluate(hp.optimize(problem, solver="agh"), scenarios=30)
    np.testing.assert_array_equal(one.usd, other.usd)


def test_violations_and_costs_rise_with_stress():
    plan = canonical_plan()
    results = [evaluate(plan, scenarios=200, stress=stress) for stress in (1.0, 1.2, 1.5)]
    rates = [result.violation_rate for result in results]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]
    # Under the same draws, each scenario is no better.
    for easier, harder in itertools.pairwise(results):
        assert (harder.unserved_usd + harder.delay_usd >= easier.unserved_usd + easier.delay_usd - 1e-6).all()


def test_the_same_seed_gives_the_same_numbers_and_another_others():
    plan = canonical_plan()
    one, again, other = (evaluate(plan, scenarios=40, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.usd, again.usd)
    assert (one.usd != other.usd).any()


def test_all_plans_of_a_problem_meet_the_same_scenarios():
    # More of what is there already can only help, scenario by scenario, when the draws are the same.
    plan = canonical_plan(2)
    first = placement_of(plan)
    more = Placement(first.options, first.replicas + 1, np.ones_like(first.placed), first.rent_usd, first.stored_usd)
    few, many = evaluate(first, scenarios=100), evaluate(more, scenarios=100)
    assert (many.unserved_usd + many.delay_usd <= few.unserved_usd + few.delay_usd + 1e-6).all()
    assert many.mean_usd < few.mean_usd


def test_types_may_be_sent_to_all_that_is_bought():
    plan = canonical_plan(3)
    placed = evaluate(plan, scenarios=100)
    anywhere = evaluate(plan, scenarios=100, reroute="any")
    assert anywhere.mean_usd < placed.mean_usd
    assert anywhere.rent_usd == placed.rent_usd


def test_the_interval_narrows_with_scenarios():
    plan = canonical_plan()
    assert evaluate(plan, scenarios=1).half_width_usd == np.inf
    assert evaluate(plan, scenarios=400).half_width_usd < evaluate(plan, scenarios=50).half_width_usd


@pytest.mark.parametrize("decisions", readings(), ids=str)
@pytest.mark.parametrize("ttft", [False, True])
def test_shares_are_the_best_of_another_solver(decisions, ttft):
    problem = small_problem(2, decisions, types=3, ttft=ttft)
    placement = placement_of(hp.optimize(problem, solver="milp"), reroute="any")
    operations = Operations(placement)
    stream = np.random.default_rng(5)
    types, bought = placement.placed.shape
    for _ in range(5):
        arrivals = stream.uniform(0.5, 1.5, types)
        delays, errors = stream.uniform(0.6, 1.5, (2, types, bought))
        found = operations.solve(arrivals, delays, errors)
        assert found.delay_usd + found.unserved_usd == pytest.approx(
            by_scipy(placement, decisions, arrivals, delays, errors), rel=1e-6, abs=1e-6
        )
        np.testing.assert_allclose(found.shares.sum(axis=1) + found.unserved, 1.0, atol=1e-6)


def by_scipy(placement, decisions: Decisions, arrivals, delays, errors) -> float:
    """The least delay and unserved cost, from (12) written out with dense matrices."""
    o = placement.options
    types, bought = placement.placed.shape
    count = types * bought
    times = arrivals if decisions.penalties == "per_request" else np.ones(types)
    delay_usd = (o.unit_usd - o.storage_usd[:, None]) * delays * times[:, None]
    rows, limits = [], []
    kinds = [o.delay * delays, o.error * errors] + ([] if o.ttft is None else [o.ttft * delays])
    for i in range(types):
        for kind, shares in enumerate(kinds):
            if decisions.delay == "each" and kind != 1:
                continue
            row = np.zeros((types, bought + 1))
            row[i, :bought] = shares[i]
            row[i, bought] = 1.0 if decisions.slo_on == "served" else 0.0
            rows.append(row)
            limits.append(1.0)
    for b in range(bought):
        for name in ("load", "cache"):
            if name == "cache" and decisions.kv_memory == "residence":
                continue
            row = np.zeros((types, bought + 1))
            row[:, b] = getattr(o, name)[:, b] * arrivals * (delays[:, b] if name == "cache" else 1.0)
            rows.append(row)
            limits.append(float(placement.replicas[b]))
    most = np.ones((types, bought + 1))
    most[:, :bought] *= placement.placed
    if decisions.delay == "each":
        for kind in (0, 2)[: 1 if o.ttft is None else 2]:
            most[:, :bought] *= kinds[kind] <= 1 + 1e-9
    costs = np.concatenate([delay_usd, (o.unserved_usd * times)[:, None]], axis=1)
    demand = np.kron(np.eye(types), np.ones(bought + 1))
    assert count == demand.shape[1] - types
    return float(
        linprog(
            costs.ravel(), A_ub=np.array([row.ravel() for row in rows]), b_ub=limits, A_eq=demand, b_eq=np.ones(types),
            bounds=np.stack([np.zeros(most.size), most.ravel()], axis=1), method="highs",
        ).fun
    )  # fmt: skip


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"scenarios": 0}, "scenarios is a whole number"),
        ({"delay_spread": 1.0}, "delay_spread is a number from 0 to below 1"),
        ({"error_spread": -0.1}, "error_spread"),
        ({"arrival_spread": True}, "arrival_spread"),
        ({"stress": 0.0}, "stress is a number above 0"),
        ({"seed": -1}, "seed is a whole number from 0"),
        ({"reroute": "some"}, "reroute is 'placed' or 'any'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_value(values, said):
    with pytest.raises(hp.InvalidInputError, match=said):
        evaluate(canonical_plan(1, "gh"), **values)


def test_a_plan_that_places_one_model_is_refused():
    plan = hp.optimize(
        model="llama-3.1-8b",
        cluster={"g6.xlarge": 1},
        workload=hp.Workload(input_tokens=763, output_tokens=232),
        solver="even",
    )
    with pytest.raises(hp.InvalidInputError, match="allocation problems"):
        evaluate(plan)


def test_progress_counts_scenarios():
    seen = []
    evaluate(canonical_plan(1, "gh"), scenarios=3, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_studies_are_rows_of_plain_values():
    problem = AllocationProblem.canonical(seed=1)
    stressed = stress_study(problem, solvers=("gh", "milp"), stresses=(1.0, 1.5), scenarios=20)
    assert [(row["solver"], row["stress"]) for row in stressed] == [
        ("gh", 1.0), ("gh", 1.5), ("milp", 1.0), ("milp", 1.5),
    ]  # fmt: skip
    free = stress_study(problem, solvers=("gh",), stresses=(1.0,), scenarios=20, reroute="any")
    assert free[0]["mean_usd"] < stressed[0]["mean_usd"]
    for row in stressed:
        parts = ("rent_usd", "stored_usd", "storage_usd", "delay_usd", "unserved_usd")
        assert row["mean_usd"] == pytest.approx(sum(row[part] for part in parts))
    budgets = budget_study(problem, solvers=("milp",), scenarios=5)
    assert [row["budget_usd"] for row in budgets] == [100, 75, 72, 75, 72]
    # With less to spend and more to lose, the optimum is no lower.
    usd = [row["nominal_usd"] for row in budgets]
    assert usd[0] <= usd[1] + 1e-4 <= usd[2] + 2e-4
    assert usd[1] <= usd[3] + 1e-4
    assert usd[2] <= usd[4] + 1e-4


def test_the_ablation_keeps_all_limits():
    rows = ablation(AllocationProblem.canonical(seed=1))
    assert [row["mechanisms"] for row in rows] == ["all", "without m1", "without m2", "without m3"]
    assert all(hp.verify(row["plan"]) == [] for row in rows)


def test_the_optimum_falls_as_limits_widen_and_rises_with_prices():
    problem = AllocationProblem.canonical(seed=1)
    wider = [row["nominal_usd"] for row in sweep(problem, solver="milp", delay_limits=(0.8, 1.0, 1.3))]
    assert wider == sorted(wider, reverse=True)
    dearer = [row["nominal_usd"] for row in sweep(problem, solver="milp", prices=(0.8, 1.0, 1.2))]
    assert dearer == sorted(dearer)
