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
from tests.solvers.allocation.every_buying import Bought, best_shares, buyings
from tests.solvers.allocation.small_problems import readings, small_problem

PAPER = Decisions.paper().replace(replicas="many")
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


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("objective", ["expected_cost", "cvar"])
def test_no_buying_is_better(seed, objective):
    problem = tiny_problem(seed, Decisions(), estimated=seed % 2 == 1, ttft=seed % 3 == 0)
    robust = hp.Robust(
        scenarios=3,
        stress=1.2,
        max_extra_cost=(0.1, 0.4, 2.0)[seed % 3],
        objective=objective,
        cvar_level=0.5,
        seed=seed,
    )
    plan = hp.optimize(problem, robust=robust)
    reached = plan.provenance.parameters
    limit_usd = (1 + robust.max_extra_cost) * reached["optimum_usd"]
    name = {"expected_cost": "training_mean_usd", "cvar": "training_cvar_usd"}[objective]
    assert plan.objective <= limit_usd * (1 + 2e-6)
    assert reached[name] == pytest.approx(least_by_trying(problem, robust, limit_usd), rel=1e-6)
