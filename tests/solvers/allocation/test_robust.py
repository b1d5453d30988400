"""Robust plans: the best over training scenarios by trying every buying, within every limit that was asked for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import hetplan as hp
from hetplan.problem.allocation import AllocationProblem, Decisions
from hetplan.solvers.allocation.options import Options, make_options
from hetplan.solvers.allocation.scenarios import evaluate, make_placement
from hetplan.solvers.allocation.training import Training, tail_weights
from hetplan.verification import examine_plan
from tests.solvers.allocation.every_buying import Bought, best_shares, buyings
from tests.solvers.allocation.small_problems import readings, small_problem

SEEN = ("scenarios", "seed", "delay_spread", "error_spread", "arrival_spread", "stress")


def tiny_problem(seed: int, decisions: Decisions, *, estimated: bool = False, ttft: bool = False) -> AllocationProblem:
    problem = small_problem(seed, decisions, estimated=estimated, ttft=ttft)
    # Few can be bought, and dropping traffic as planned is dear.
    return problem.replace(
        budget_usd=min(problem.budget_usd, 85.0),
        pipeline_parallel=(1,),
        query_types=tuple(q.replace(unserved_usd=q.unserved_usd * 10, max_unserved=1.0) for q in problem.query_types),
    )


def in_training(plan: hp.Plan, robust: hp.Robust):
    return evaluate(plan, **{name: getattr(robust, name) for name in SEEN})


def number_of(options: Options, bought: Bought) -> int | None:
    same = (
        (options.model == bought.model)
        & (options.tier == bought.tier)
        & (options.tensor_parallel == bought.tensor_parallel)
        & (options.pipeline_parallel == bought.pipeline_parallel)
    )
    return int(np.flatnonzero(same)[0]) if same.any() else None


def least_by_trying(problem: AllocationProblem, robust: hp.Robust, limit_usd: float) -> float:
    """The least that counts, over every buying, every choice of copies, and shares as scenarios find them."""
    options, everything = make_options(problem), make_options(problem, prune=False)
    training = Training(options, robust)
    least = np.inf
    for buying in buyings(problem):
        numbers = [number_of(options, one) for one, _ in buying]
        if not buying or None in numbers:
            continue
        planned_usd = best_shares(problem, buying)
        if planned_usd is None or planned_usd > limit_usd:
            continue
        held = {number: count for number, (_, count) in zip(numbers, buying, strict=True)}
        every = sorted(training.make(held).copies)
        for copies in itertools.chain.from_iterable(itertools.combinations(every, n) for n in range(len(every) + 1)):
            planned = training.shares(training.make(held, copies))
            if planned is None or planned.usd > limit_usd * (1 + 1e-6):
                continue
            sent = {(int(i), int(options.number[n])) for i, n in np.argwhere(planned.shares > 0)}
            placement = make_placement(everything, {int(options.number[n]): held[n] for n in held}, sent)
            result = evaluate(placement, **{name: getattr(robust, name) for name in SEEN})
            over = robust.max_violation_rate is not None and result.violation_rate > robust.max_violation_rate + 1e-9
            if not over:
                least = min(least, counted(result.usd, robust))
    return least


def counted(usd, robust: hp.Robust) -> float:
    """The mean, or the mean of the worst by its own definition: the least of a level plus what exceeds it."""
    if robust.objective == "expected_cost":
        return float(usd.mean())
    return min(float(t + np.maximum(usd - t, 0).mean() / (1 - robust.cvar_level)) for t in usd)


@pytest.mark.parametrize(
    ("seed", "objective"), [(1, "expected_cost"), (11, "cvar"), (14, "expected_cost"), (14, "cvar")]
)
def test_no_buying_is_better(seed, objective):
    problem = tiny_problem(seed, Decisions(), estimated=seed % 2 == 1, ttft=seed % 3 == 0)
    robust = hp.Robust(
        scenarios=3, stress=1.2, max_extra_cost=0.4, objective=objective, cvar_level=0.5, seed=seed
    )  # fmt: skip
    plan = hp.optimize(problem, robust=robust)
    reached = plan.provenance.parameters
    limit_usd = (1 + robust.max_extra_cost) * reached["optimum_usd"]
    name = {"expected_cost": "training_mean_usd", "cvar": "training_cvar_usd"}[objective]
    assert plan.objective <= limit_usd * (1 + 2e-6)
    assert hp.verify(plan) == []
    assert reached[name] == pytest.approx(least_by_trying(problem, robust, limit_usd), rel=1e-6)


@pytest.mark.parametrize(
    "decisions", [Decisions(model_storage="per_query_type"), Decisions.paper()], ids=["ours", "paper"]
)
@pytest.mark.parametrize("seed", [11])
def test_no_choice_of_copies_is_better(seed, decisions):
    problem = tiny_problem(seed, decisions, estimated=True).replace(budget_usd=70)
    robust = hp.Robust(scenarios=3, stress=1.2, max_extra_cost=0.3, seed=seed)
    plan = hp.optimize(problem, robust=robust)
    reached = plan.provenance.parameters
    assert hp.verify(plan) == []
    least = least_by_trying(problem, robust, 1.3 * reached["optimum_usd"])
    assert reached["training_mean_usd"] == pytest.approx(least, rel=1e-6)


def test_a_target_of_violations_is_kept_or_the_rate_that_was_reached_is_named():
    problem = tiny_problem(14, Decisions()).replace(budget_usd=70)
    free = hp.Robust(scenarios=6, stress=1.15, max_extra_cost=1.0)
    reached = hp.optimize(problem, robust=free).provenance.parameters
    asked = free.replace(max_violation_rate=0.25)
    kept = hp.optimize(problem, robust=asked).provenance.parameters
    assert reached["training_violation_rate"] > 0.25 >= kept["training_violation_rate"]
    least = least_by_trying(problem, asked, 2 * reached["optimum_usd"])
    assert kept["training_mean_usd"] == pytest.approx(least, rel=1e-6)
    assert kept["training_mean_usd"] > reached["training_mean_usd"]
    none = free.replace(max_violation_rate=0.0)
    assert least_by_trying(problem, none, 2 * reached["optimum_usd"]) == np.inf
    with pytest.raises(hp.InfeasibleError, match=r"the least that was reached is 0\.1667") as failure:
        hp.optimize(problem, robust=none)
    assert failure.value.reasons[0].needed == pytest.approx(1 / 6)


@pytest.mark.parametrize("decisions", readings(), ids=str)
def test_what_cuts_prove_no_buying_falls_below(decisions):
    problem = small_problem(4, decisions, types=3, ttft=True)
    training = Training(make_options(problem), hp.Robust(scenarios=2, stress=1.1, objective="cvar", cvar_level=0.3))
    stream = np.random.default_rng(0)
    count = training.options.count
    bought = [training.make(dict.fromkeys(stream.integers(0, count, 2).tolist(), 1)) for _ in range(5)]
    for one, other in itertools.product(bought, repeat=2):
        usd, cut = training.nominal(one)[0], training.nominal(other)[1]
        for cost, proven in ((usd, cut), (training.risk_usd(training.costs(one)), training.costs(other).cut)):
            least = training.fixed_usd(one) + proven.usd - float(proven.gains[one.numbers] @ one.counts)
            assert least <= cost + 1e-6 * max(1.0, abs(cost))


@pytest.fixture(scope="module")
def canonical() -> AllocationProblem:
    return AllocationProblem.canonical(seed=1)


@pytest.fixture(scope="module")
def robust_plan(canonical: AllocationProblem) -> hp.Plan:
    return hp.optimize(canonical, robust=hp.Robust(stress=1.5, max_extra_cost=0.2))


def test_a_plan_states_what_it_was_made_against_and_what_it_reached(canonical, robust_plan):
    said = robust_plan.provenance.parameters
    assert (said["robust_stress"], said["robust_scenarios"], said["robust_max_extra_cost"]) == (1.5, 20, 0.2)
    seen = evaluate(robust_plan, scenarios=20, stress=1.5)
    assert said["training_mean_usd"] == pytest.approx(seen.mean_usd, abs=1e-6)
    assert said["training_violation_rate"] == seen.violation_rate
    assert said["training_cvar_usd"] == pytest.approx(np.sort(seen.usd)[-2:].mean())


def test_it_is_a_sound_plan_within_its_extra_cost_whose_bound_is_proven(canonical, robust_plan):
    optimum = hp.optimize(canonical, solver="milp")
    assert robust_plan.status == "feasible"
    assert robust_plan.bound == pytest.approx(optimum.objective, rel=1e-6)
    assert optimum.objective < robust_plan.objective <= 1.2 * optimum.objective
    violations, confirmed = examine_plan(robust_plan)
    assert violations == []
    assert confirmed


def test_in_scenarios_that_it_was_not_made_against_it_violates_less_and_costs_less(canonical, robust_plan):
    plain = hp.optimize(canonical, solver="milp")
    for reroute in ("placed", "any"):
        exact, robust = (
            evaluate(plan, scenarios=100, seed=7, stress=1.5, reroute=reroute) for plan in (plain, robust_plan)
        )
        assert robust.violation_rate < 0.8 * exact.violation_rate
        assert robust.mean_usd < 0.8 * exact.mean_usd


def test_the_same_seed_gives_the_same_plan(canonical, robust_plan):
    again = hp.optimize(canonical, robust=hp.Robust(stress=1.5, max_extra_cost=0.2))
    assert again.to_json() == robust_plan.to_json()


@pytest.mark.parametrize("decisions", ["default", "paper"])
def test_with_no_time_there_is_a_plan_all_the_same(decisions):
    problem = AllocationProblem.canonical(query_types=3, models=3, tiers=4, seed=0, decisions=decisions)
    plan = hp.optimize(problem, robust=hp.Robust(scenarios=3), time_limit_s=0)
    assert hp.verify(plan) == []
    assert plan.objective <= 1.05 * plan.provenance.parameters["optimum_usd"] * (1 + 2e-6)


def test_more_may_be_spent_for_less_in_training(canonical):
    usd = [
        hp.optimize(canonical, robust=hp.Robust(scenarios=3, stress=1.5, max_extra_cost=extra)).provenance.parameters[
            "training_mean_usd"
        ]
        for extra in (0.0, 0.1, 0.3)
    ]
    assert usd == sorted(usd, reverse=True)
    assert usd[-1] < usd[0]


def test_the_worst_part_of_what_all_cost_alike_is_that_cost():
    assert tail_weights(np.full(7, 3.0), 0.9) @ np.full(7, 3.0) == pytest.approx(3.0)
    assert tail_weights(np.arange(10.0), 0.85) @ np.arange(10.0) == pytest.approx((9 + 0.5 * 8) / 1.5)


def test_progress_tells_of_training(canonical):
    seen = []
    hp.optimize(canonical, robust=hp.Robust(scenarios=3), on_incumbent=seen.append)
    assert "in training" in seen[-1].message


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"scenarios": 0}, "Robust.scenarios"),
        ({"delay_spread": 1.0}, "Robust.delay_spread"),
        ({"stress": 0}, "Robust.stress"),
        ({"objective": "worst"}, "Robust.objective"),
        ({"cvar_level": 1.0}, "Robust.cvar_level"),
        ({"max_violation_rate": 1.5}, "Robust.max_violation_rate"),
        ({"max_extra_cost": -0.1}, "Robust.max_extra_cost"),
        ({"budget": 1}, "Robust.budget: unknown key"),
    ],
)
def test_what_cannot_be_is_refused_with_its_field(values, said):
    with pytest.raises(hp.InvalidInputError, match=said):
        hp.Robust(**values)


def test_robust_is_of_allocation_problems_and_begins_from_the_optimum(canonical):
    with pytest.raises(hp.InvalidInputError, match="places a model on given machines"):
        hp.optimize(
            model="llama-3.1-8b",
            cluster={"g6.xlarge": 1},
            workload=hp.Workload(input_tokens=763, output_tokens=232),
            robust=hp.Robust(),
        )
    with pytest.raises(hp.InvalidInputError, match="leave out solver='gh'"):
        hp.optimize(canonical, solver="gh", robust=hp.Robust())
    with pytest.raises(hp.InvalidInputError, match="leave out gap"):
        hp.optimize(canonical, gap=0.1, robust=hp.Robust())
    with pytest.raises(hp.InvalidInputError, match="Robust, got dict"):
        hp.optimize(canonical, robust={"stress": 1.5})
