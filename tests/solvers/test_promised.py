"""Promised percentiles: kept when simulated, told in the plan, confirmed by the checker, or refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import hetplan as hp
from hetplan.solvers.base import get_solver
from hetplan.verification import verify_plan
from tests.builders import make_cluster, make_gpu, make_machine, make_pool, problem_of, tiny_llama, verified

SLOW = make_machine("slow", gpu=make_gpu("S1", gb_per_s=30, tflops=10))
FAST = make_machine("fast", gpu=make_gpu("F1", gb_per_s=600, tflops=120))
CLUSTER = make_cluster((SLOW, make_pool(SLOW, 3, usd=0.5)), (FAST, make_pool(FAST, 2, usd=2.5)))


def problem(objective: str = "cost", rate: float = 2.0, **changes: Any) -> hp.PlacementProblem:
    load = hp.Workload(input_tokens=500, output_tokens=60, requests_per_s=rate)
    return problem_of(tiny_llama(), CLUSTER, load, objective=objective, **changes)


@cache
def free(objective: str) -> hp.Plan:
    return hp.optimize(problem(objective), solver="dp-beam")


@cache
def reached(objective: str, level: float) -> dict[str, float]:
    """What the plan without a promise lives through."""
    from hetplan.simulator.promised import simulated_latencies

    return simulated_latencies(free(objective), level)


@pytest.mark.parametrize(
    ("objective", "name"), [("cost", "ttft_s"), ("throughput", "tpot_s"), ("throughput_per_cost", "e2e_s")]
)
def test_what_is_kept_anyway_changes_nothing_and_what_is_not_costs(objective: str, name: str) -> None:
    easy = 1.05 * reached(objective, 0.9)[name]
    plan = verified(hp.optimize(problem(objective, slo=hp.Slo(**{name: easy}, percentile=0.9)), solver="dp-beam"))
    assert plan.objective == pytest.approx(free(objective).objective)
    hard = 0.8 * reached(objective, 0.9)[name]
    try:
        plan = verified(
            hp.optimize(
                problem(objective, slo=hp.Slo(**{name: hard}, percentile=0.9)), solver="dp-beam", time_limit_s=10
            )
        )
    except (hp.NoSolutionError, hp.InfeasibleError) as error:
        assert name in str(error)  # noqa: PT017
        return
    told = plan.provenance.parameters
    assert told[f"simulated_{name}"] <= hard  # type: ignore[operator]
    assert told[f"predicted_{name}"] == pytest.approx(told[f"simulated_{name}"], rel=0.25)
    assert told["simulated_requests"] >= 1900  # type: ignore[operator]
    worse = free(objective).objective / plan.objective
    assert worse <= 1 + 1e-9 if objective == "cost" else worse >= 1 - 1e-9


def test_a_tail_is_kept_by_dearer_machines() -> None:
    """P99 beyond the slow machine's reach: the cheapest plan that keeps it takes the fast one."""
    slow = reached("cost", 0.9)["tpot_s"]
    plan = hp.optimize(problem(slo=hp.Slo(tpot_s=slow / 1.5, percentile=0.99)), solver="auto", time_limit_s=8)
    assert {stage.instance_type for p in plan.deployments[0].pipelines for stage in p.stages} == {"fast"}
    assert plan.bound is not None
    assert plan.bound <= plan.objective
    assert verified(plan).cost_usd_per_hour > free("cost").cost_usd_per_hour


def test_the_same_seed_gives_the_same_plan() -> None:
    asked = problem(slo=hp.Slo(ttft_s=0.5, percentile=0.9))
    first, again = (hp.optimize(asked, solver="even", seed=3) for _ in range(2))
    assert first.to_json() == again.to_json()
    assert hp.Plan.from_json(first.to_json()) == first


def test_a_soft_percentile_lowers_the_objective() -> None:
    limit = reached("throughput", 0.9)["tpot_s"] / 1.2
    slo = hp.Slo(tpot_s=limit, percentile=0.9, hard=False)
    plan = verified(hp.optimize(problem("throughput", slo=slo, latency_penalty=0.5), solver="even", time_limit_s=10))
    over = max(plan.provenance.parameters["simulated_tpot_s"] / limit - 1, 0.0)  # type: ignore[operator]
    assert plan.objective == pytest.approx(plan.requests_per_s * (1 - 0.5 * over))


def test_nothing_is_a_thousand_times_faster() -> None:
    with pytest.raises(hp.InfeasibleError, match=r"tpot_s <= 1e-05 s, at least") as refusal:
        hp.optimize(problem(slo=hp.Slo(tpot_s=1e-5, percentile=0.5)))
    assert refusal.value.reasons[0].needed > 1e-5


def test_more_than_the_cluster_serves_is_refused() -> None:
    with pytest.raises(hp.InfeasibleError, match="serves"):
        hp.optimize(problem("throughput", rate=1e4, slo=hp.Slo(ttft_s=9.0, percentile=0.5)), time_limit_s=5)


def test_a_missed_limit_says_how_near_the_best_came() -> None:
    """Below what a prompt takes with others beside it, above what it takes alone by the solvers' bound."""
    with pytest.raises((hp.NoSolutionError, hp.InfeasibleError), match=r"ttft_s <= 0\.006"):
        hp.optimize(problem(rate=20.0, slo=hp.Slo(ttft_s=0.006, percentile=0.99)), solver="even")


def test_a_checker_without_a_simulation_says_so_and_one_with_it_finds_broken_promises() -> None:
    plan = hp.optimize(problem(slo=hp.Slo(ttft_s=1.0, percentile=0.9)), solver="even")
    assert [v.code for v in verify_plan(plan)] == ["promise_not_checkable"]
    assert hp.verify(plan) == []
    asked = plan.placement
    broken = plan.model_copy(update={"problem": asked.model_copy(update={"slo": hp.Slo(ttft_s=1e-3, percentile=0.9)})})
    (violation,) = hp.verify(broken)
    assert (violation.code, violation.where, violation.limit) == ("slo_broken", "P90 of ttft_s", 1e-3)


def test_percentiles_need_a_rate_and_steps() -> None:
    with pytest.raises(hp.InvalidInputError, match="requests_per_s"):
        problem_of(
            tiny_llama(), CLUSTER, hp.Workload(input_tokens=9, output_tokens=9), slo=hp.Slo(ttft_s=1, percentile=0.5)
        )
    with pytest.raises(hp.InvalidInputError, match="estimator='calibrated'"):
        problem(slo=hp.Slo(ttft_s=1, percentile=0.5), estimator="paper")
    with pytest.raises(hp.UnsupportedFeatureError, match=r"hetplan\.optimize answers"):
        get_solver("even").solve(problem(slo=hp.Slo(ttft_s=1, percentile=0.5)))
