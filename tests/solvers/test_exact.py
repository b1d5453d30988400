"""The exact solver against every plan there is, on hundreds of random small problems."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from brute import TINY, best_plan, tiny_problem
from builders import verified
from small_cases import CASES, CATEGORIES, case_of, times_of
from whole_placements import WholePlacements

import hetplan as hp
from hetplan.solvers.base import Solution, solver_names
from hetplan.solvers.build import build_plan
from hetplan.solvers.placement.spaces import Machines, Space

# Sums of the same numbers in another order.
SAME = 1e-9

FEASIBLE = [(category, seed) for category, seed in CASES if CATEGORIES[category].infeasible is None]
# The other solvers take longer than trying everything does.
COMPARED = [(category, seed) for category, seed in FEASIBLE if seed == 0][::2]


def named(cases: list[tuple[str, int]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("category", "seed"), [pytest.param(*case, id=f"{case[0]} {case[1]}") for case in cases]
    )


def test_there_are_enough_cases() -> None:
    counts = Counter(category for category, _ in CASES)
    assert len(CASES) >= 500
    assert len(CATEGORIES) >= 35
    assert set(counts) == set(CATEGORIES)
    assert min(counts.values()) >= 12


@named(CASES)
def test_the_best_of_all_plans_is_found_and_proven(category: str, seed: int) -> None:
    case = case_of(category, seed)
    with times_of(category):
        if case.best is None:
            # Plans that are worth nothing exist; a limit or a demand that none keeps rules all out.
            allowed = (
                (hp.InfeasibleError, hp.NoSolutionError) if case.kind.infeasible == "worth" else hp.InfeasibleError
            )
            with pytest.raises(allowed):
                hp.optimize(case.problem, solver="exact")
            return
        plan = verified(hp.optimize(case.problem, solver="exact"))
    best = case.best.objective
    assert plan.objective == pytest.approx(best, rel=SAME, abs=0)
    assert plan.bound is not None
    if case.problem.objective == "cost":
        assert plan.bound <= best * (1 + SAME)
    else:
        assert plan.bound >= best * (1 - SAME)
    # Proofs by prices leave latency out: under limits on it the bound is one, but not always the best.
    assert plan.status == "optimal" or case.problem.slo is not None


def test_a_machine_that_serves_next_to_nothing_does_not_hide_the_plan_that_meets_the_demand() -> None:
    """A pipeline of a billionth of the demand stands among those of a third of it."""
    problem = case_of("linked regions, cost", 15).problem
    best = WholePlacements(problem).best_plan()
    assert best is not None
    assert verified(hp.optimize(problem, solver="exact")).objective == pytest.approx(best.objective, rel=SAME)


@named([("linked regions, engine", 17), ("linked regions, engine", 39)])
def test_a_stage_leaves_layers_to_those_that_an_engine_asks_for(category: str, seed: int) -> None:
    """Few layers on machines that have to have several stages each: what fills one leaves none to the next."""
    case = case_of(category, seed)
    assert case.best is not None
    plan = verified(hp.optimize(case.problem, solver="exact"))
    assert plan.objective == pytest.approx(case.best.objective, rel=SAME, abs=0)
    assert plan.status == "optimal"


@named(COMPARED)
def test_no_solver_beats_the_best_of_all_plans(category: str, seed: int) -> None:
    case = case_of(category, seed)
    assert case.best is not None
    for solver in solver_names():
        with times_of(category):
            try:
                plan = verified(hp.optimize(case.problem, solver=solver, time_limit_s=0.2))
            except (hp.NoSolutionError, hp.UnsupportedFeatureError):
                continue
        if case.problem.objective == "cost":
            assert plan.objective >= case.best.objective * (1 - SAME), solver
        else:
            assert plan.objective <= case.best.objective * (1 + SAME), solver


# ---- large inventories


@named(
    [
        (category, 0)
        for category in (
            "one pool",
            "unequal networks",
            "experts",
            "windows",
            "zigzag",
            "cost",
            "paper",
            "linked regions",
            "linked one after another",
            "linked zones",
            "linked regions, per cost",
        )
    ]
)
def test_prices_bound_every_plan_also_when_sets_are_not_enumerated(
    category: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetplan.solvers.placement.exact._FEW_SETS", 0)
    case = case_of(category, seed)
    assert case.best is not None
    with times_of(category):
        plan = verified(hp.optimize(case.problem, solver="exact", gap=1e-4, time_limit_s=5))
    assert plan.bound is not None
    if case.problem.objective == "cost":
        assert plan.bound <= case.best.objective * (1 + SAME)
        assert plan.objective >= case.best.objective * (1 - SAME)
    else:
        assert plan.bound >= case.best.objective * (1 - SAME)
        assert plan.objective <= case.best.objective * (1 + SAME)


@pytest.mark.parametrize("category", sorted(name for name in CATEGORIES if "limit" in name))
@pytest.mark.parametrize("answers", [0, 2])
def test_searches_that_end_without_an_answer_end_the_search(
    category: str, answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As when time is over, or too little for sets of many machines.
    asked, search = 0, Space.search

    def give_up(space: Space, machines: Machines, least: float, most_labels: int) -> Any:
        nonlocal asked
        asked += 1
        assert asked < 10_000
        return search(space, machines, least, most_labels) if asked <= answers else (None, 0.0, False)

    monkeypatch.setattr(Space, "search", give_up)
    case = case_of(category, 0)
    with times_of(category):
        try:
            plan = verified(hp.optimize(case.problem, solver="exact", time_limit_s=5))
        except hp.NoSolutionError:
            return
        except hp.InfeasibleError:
            assert case.best is None or not asked
            return
    assert case.best is not None
    worse = plan.objective - case.best.objective
    assert (worse if case.problem.objective == "cost" else -worse) >= -SAME * case.best.objective


def test_eighty_machines_are_planned_to_a_proven_gap() -> None:
    workload = hp.Workload(input_tokens=763, output_tokens=232)
    machines = {"g6.xlarge": 40, "g5.xlarge": 40}
    plan = hp.optimize(model="llama-3.1-8b", cluster=machines, workload=workload, solver="exact", gap=0.05)
    assert verified(plan).gap is not None
    assert plan.gap is not None
    assert plan.gap <= 0.05


def test_an_older_plan_proves_a_bound_for_fewer_machines_of_the_same_problem_only() -> None:
    def plan(machines: dict[str, int], output_tokens: int, **options: hp.Plan) -> hp.Plan:
        workload = hp.Workload(input_tokens=763, output_tokens=output_tokens)
        return hp.optimize(
            model="llama-3.1-8b", cluster=machines, workload=workload, solver="exact", gap=0.05, **options
        )

    before = plan({"g6.xlarge": 40, "g5.xlarge": 40}, 232)
    assert before.certificate is not None
    after = verified(plan({"g6.xlarge": 39, "g5.xlarge": 40}, 232, warm_start=before))
    assert after.certificate == before.certificate
    # Shorter answers are worth more than the older prices: taken on trust, they would prove what is not so.
    verified(plan({"g6.xlarge": 39, "g5.xlarge": 40}, 58, warm_start=before))


# ---- what trying everything finds is right


@named([(category, seed) for category, seed in FEASIBLE if seed < 3])
def test_the_checker_confirms_what_trying_everything_finds(category: str, seed: int) -> None:
    case = case_of(category, seed)
    assert case.best is not None
    with times_of(category):
        verified(build_plan(case.problem, Solution(case.best.pipelines, case.best.objective), solver="all", seed=0))


@pytest.mark.parametrize("name", TINY)
def test_another_way_to_try_everything_finds_the_same(name: str) -> None:
    found = WholePlacements(tiny_problem(name)).best_plan()
    assert found is not None
    assert math.isclose(found.objective, best_plan(name), rel_tol=SAME)
