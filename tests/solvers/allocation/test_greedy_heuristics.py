"""GH and AGH on the canonical family: the same twice, within every limit, and as good as published."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from every_buying import broken_limits

from hetplan.errors import InvalidInputError, NoSolutionError, UnknownNameError
from hetplan.problem.allocation import AllocationProblem, DecisionsName
from hetplan.solvers.base import AllocationSolution, Progress, allocation_solver_names, get_allocation_solver

HEURISTICS = ("gh", "agh")
SIZES = ((6, 6, 10), (10, 10, 10), (20, 20, 20))
# Of a plain numpy version of both, written apart; the optima of the exact solver for the first two sizes.
GREEDY_USD = {
    (6, 6, 10): (97.568, 94.300, 8115.368, 5463.533),
    (10, 10, 10): (84.926, 90.085, 102.695, 101.311),
    (20, 20, 20): (1875.151, 1186.639, 210.033, 169.487),
}
ADAPTIVE_USD = {
    (6, 6, 10): (97.568, 94.300, 6375.294, 3346.998),
    (10, 10, 10): (84.926, 90.085, 102.695, 87.579),
    (20, 20, 20): (185.876, 180.895, 186.217, 131.185),
}
OPTIMA_USD = {(6, 6, 10): (95.696, 92.622, 95.565, 104.557), (10, 10, 10): (84.926, 87.267, 92.247, 87.495)}


def canonical(size: tuple[int, int, int], seed: int, decisions: DecisionsName = "paper") -> AllocationProblem:
    types, models, tiers = size
    return AllocationProblem.canonical(query_types=types, models=models, tiers=tiers, seed=seed, decisions=decisions)


def solve(name: str, problem: AllocationProblem, **parameters: Any) -> AllocationSolution:
    return get_allocation_solver(name, **parameters).solve(problem)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", SIZES)
def test_the_paper_s_reading_costs_what_a_plain_version_finds(size: tuple[int, int, int], seed: int) -> None:
    problem = canonical(size, seed)
    greedy = solve("gh", problem).assignment.usd
    assert greedy == pytest.approx(GREEDY_USD[size][seed], abs=6e-4)
    # Here a move's effect on the delay of others counts as well, which can only help.
    adaptive = solve("agh", problem).assignment.usd
    assert adaptive <= ADAPTIVE_USD[size][seed] + 6e-4
    assert adaptive <= greedy
    if size in OPTIMA_USD:
        assert adaptive >= OPTIMA_USD[size][seed] - 6e-4


@pytest.mark.parametrize("without", ["", "m1", "m2", "m3"])
@pytest.mark.parametrize("name", HEURISTICS)
@pytest.mark.parametrize("decisions", ["default", "paper"])
def test_every_limit_holds(decisions: DecisionsName, name: str, without: str) -> None:
    for size, seed in ((SIZES[0], 0), (SIZES[0], 2), (SIZES[1], 1), (SIZES[2], 0), (SIZES[2], 3)):
        problem = canonical(size, seed, decisions)
        found = solve(name, problem, **({without: False} if without else {}))
        assert broken_limits(problem, found.options, found.assignment) == []
        assert found.assignment.replicas.max() == 1
        assert found.bound is None


@pytest.mark.parametrize("name", HEURISTICS)
def test_a_seed_gives_the_same_plan_twice(name: str) -> None:
    problem = canonical(SIZES[2], 2)
    solver = get_allocation_solver(name)
    first, second = (solver.solve(problem, seed=7).assignment for _ in range(2))
    assert np.array_equal(first.replicas, second.replicas)
    assert np.array_equal(first.shares, second.shares)


def test_ranking_by_coverage_pays() -> None:
    """Without M2 plans are dearer, as the paper's ablation says."""
    with_it, without = (
        sum(solve("gh", canonical(SIZES[1], seed), m2=m2).assignment.usd for seed in range(4)) for m2 in (True, False)
    )
    assert with_it < without


@pytest.mark.parametrize("name", HEURISTICS)
def test_each_better_answer_is_reported(name: str) -> None:
    seen: list[Progress] = []
    found = get_allocation_solver(name).solve(canonical(SIZES[2], 0), on_incumbent=seen.append)
    objectives = [progress.objective for progress in seen]
    assert objectives == sorted(objectives, key=lambda usd: -(usd or 0.0))
    assert objectives[-1] == pytest.approx(found.assignment.usd)
    assert all(progress.bound is None for progress in seen)


@pytest.mark.parametrize("name", HEURISTICS)
def test_no_time_still_gives_an_answer(name: str) -> None:
    problem = canonical(SIZES[0], 0)
    found = get_allocation_solver(name).solve(problem, time_limit_s=0.0)
    assert broken_limits(problem, found.options, found.assignment) == []


@pytest.mark.parametrize("name", HEURISTICS)
def test_what_may_not_be_dropped_is_never_dropped(name: str) -> None:
    problem = canonical(SIZES[0], 2)
    queries = tuple(query.replace(max_unserved=0.0) for query in problem.query_types)
    with pytest.raises(NoSolutionError, match="unserved"):
        solve(name, problem.replace(query_types=queries))


@pytest.mark.parametrize("name", HEURISTICS)
def test_nothing_fits(name: str) -> None:
    """All is left unserved where that is allowed."""
    problem = canonical((2, 2, 2), 0)
    tiers = tuple(tier.replace(memory_gb=1e-3) for tier in problem.tiers)
    found = solve(name, problem.replace(tiers=tiers)).assignment
    assert found.usd == pytest.approx(sum(query.unserved_usd for query in problem.query_types))


@pytest.mark.parametrize("name", HEURISTICS)
def test_wrong_options_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="m1 is True or False"):
        get_allocation_solver(name, m1=1)
    with pytest.raises(InvalidInputError, match="coverage_budget"):
        get_allocation_solver(name, coverage_budget=1.5)
    with pytest.raises(InvalidInputError, match="bogus"):
        get_allocation_solver(name, bogus=1)
    with pytest.raises(InvalidInputError, match="time_limit_s"):
        get_allocation_solver(name).solve(canonical((2, 2, 2), 0), time_limit_s=-1.0)


def test_an_unknown_solver_lists_the_known() -> None:
    with pytest.raises(UnknownNameError, match="agh, auto, gh, milp"):
        get_allocation_solver("greedy")
    assert allocation_solver_names() == ["agh", "auto", "gh", "milp"]
