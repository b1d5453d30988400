"""Programs and heuristics against every buying of small problems, for every reading of the paper."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from every_buying import broken_limits, least_usd
from small_problems import readings, small_problem

import hetplan as hp
from hetplan.errors import InfeasibleError, NoSolutionError
from hetplan.problem.allocation import AllocationProblem, Decisions
from hetplan.solvers.allocation.assignment import choose
from hetplan.solvers.allocation.milp import solve_literal
from hetplan.solvers.allocation.options import make_options
from hetplan.solvers.base import get_allocation_solver
from hetplan.verification import examine_plan

READINGS = readings()
# Seconds that no search here comes near.
AMPLE_S = 60.0


HEURISTICS = [
    get_allocation_solver(name, **{without: False} if without else {})
    for name in ("gh", "agh")
    for without in ("", "m1", "m2", "m3")
]


def assert_programs_agree(problem: AllocationProblem) -> None:
    least = least_usd(problem)
    literal = solve_literal(problem, time_limit_s=AMPLE_S, gap=1e-9)
    options = make_options(problem)
    strong = choose(options, range(options.count), time_limit_s=AMPLE_S)
    if least is None:
        assert literal.status == "infeasible"
        assert strong is None
    else:
        assert literal.status == "optimal"
        assert literal.assignment is not None
        assert literal.usd == pytest.approx(least, rel=1e-6)
        assert broken_limits(problem, make_options(problem, prune=False), literal.assignment) == []
        assert strong is not None
        assert strong.usd == pytest.approx(least, rel=1e-6)
        assert broken_limits(problem, options, strong) == []
    assert_exact_agrees(problem, least)
    for solver in HEURISTICS:
        try:
            found = solver.solve(problem)
        except NoSolutionError:
            continue
        assert least is not None
        assert found.assignment.usd >= least * (1 - 1e-9)
        assert broken_limits(problem, found.options, found.assignment) == []


def assert_exact_agrees(problem: AllocationProblem, least: float | None) -> None:
    """Branch and price finds the cheapest buying, and its proof convinces a checker that knows only the problem."""
    if least is None:
        with pytest.raises(InfeasibleError):
            hp.optimize(problem, solver="milp")
        return
    if least == pytest.approx(penalties_usd(problem), rel=1e-9):
        with pytest.raises(InfeasibleError, match="serving nothing costs least"):
            hp.optimize(problem, solver="milp")
        return
    plan = hp.optimize(problem, solver="milp")
    assert plan.objective == pytest.approx(least, rel=1e-6)
    assert plan.status == "optimal"
    violations, confirmed = examine_plan(plan)
    assert violations == []
    assert confirmed is not None


def penalties_usd(problem: AllocationProblem) -> float:
    """What it costs to serve nothing."""
    hours = problem.horizon_hours if problem.decisions.penalties == "per_request" else None
    return sum(q.unserved_usd * (q.requests_per_hour * hours if hours else 1.0) for q in problem.query_types)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("number", range(len(READINGS)))
def test_programs_find_the_cheapest_buying(number: int, seed: int) -> None:
    assert_programs_agree(small_problem(100 * number + seed, READINGS[number], ttft=seed % 2 == 1))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("decisions", [Decisions(), Decisions.paper()], ids=["default", "paper"])
def test_with_three_types(decisions: Decisions, seed: int) -> None:
    assert_programs_agree(small_problem(seed, decisions, types=3))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("delay", ["average", "each"])
@pytest.mark.parametrize("replicas", ["many", "one"])
def test_with_estimated_configurations(replicas: str, delay: str, seed: int) -> None:
    decisions = Decisions().replace(replicas=replicas, delay=delay)
    assert_programs_agree(small_problem(seed, decisions, estimated=True, ttft=True))


def test_heuristics_keep_every_limit_under_any_reading() -> None:
    """Many types on few groups: larger groups, whose delays are given, can be slower for those that are there."""
    stream = np.random.default_rng(5)
    tried = 0
    for seed in range(150):
        chosen = {name: str(stream.choice(get_args(f.annotation))) for name, f in Decisions.model_fields.items()}
        problem = small_problem(
            seed, Decisions(**chosen), types=2 + seed % 4, estimated=seed % 5 > 1, ttft=seed % 2 == 1
        )
        for solver in HEURISTICS:
            try:
                found = solver.solve(problem)
            except NoSolutionError:
                continue
            tried += 1
            assert broken_limits(problem, found.options, found.assignment) == [], f"{solver.name}, seed {seed}"
    assert tried > 500
