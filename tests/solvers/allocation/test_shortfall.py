"""How far limits must move: moved as far as is said a problem has an answer, and a hundredth less it has none."""

from __future__ import annotations

from typing import Any

import pytest
from every_buying import least_usd
from small_problems import small_problem

import hetplan as hp
from hetplan.problem.allocation import AllocationProblem, Configuration, Decisions, QueryDemand, ServedModel, Tier
from hetplan.solvers.allocation.shortfall import infeasible
from hetplan.solvers.base import get_allocation_solver

EVERY_TYPE = "all query types"
# Readings under which limits are kept in different ways.
LIMITED = [
    Decisions(),
    Decisions.paper(),
    Decisions(delay="each"),
    Decisions(slo_on="all"),
    Decisions(slo_on="all", delay="each"),
    Decisions(model_storage="per_query_type"),
    Decisions(kv_memory="residence", replicas="one"),
]


def moved(problem: AllocationProblem, reason: hp.Reason, part: float = 1.0) -> AllocationProblem:
    """The problem with a limit at a part of what is needed."""
    value = reason.needed * part
    if reason.constraint in ("budget_usd", "storage_capacity_gb"):
        return problem.replace(**{reason.constraint: value})
    queries = []
    for q in problem.query_types:
        now = getattr(q, reason.constraint)
        if now is None or q.max_unserved == 1 or reason.subject not in (EVERY_TYPE, q.name):
            queries.append(q)
        elif reason.unit == "times the limit":
            queries.append(q.replace(**{reason.constraint: now * value}))
        elif reason.constraint == "max_unserved":
            queries.append(q.replace(max_unserved=max(now, value)))
        else:
            queries.append(q.replace(**{reason.constraint: value}))
    return problem.replace(query_types=tuple(queries))


def refused(problem: AllocationProblem) -> hp.InfeasibleError:
    with pytest.raises(hp.InfeasibleError, match="no allocation serves what must be served") as refusal:
        hp.optimize(problem, solver="milp")
    return refusal.value


def assert_each_is_enough(problem: AllocationProblem, reasons: tuple[hp.Reason, ...]) -> None:
    assert reasons
    for reason in reasons:
        assert least_usd(moved(problem, reason)) is not None, reason
        assert least_usd(moved(problem, reason, 0.99)) is None, reason


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("decisions", LIMITED, ids=range(len(LIMITED)))
def test_what_is_said_is_enough_and_no_more_than_that(decisions: Decisions, seed: int) -> None:
    problem = small_problem(seed, decisions, ttft=seed % 2 == 1)
    problem = problem.replace(query_types=tuple(q.replace(max_unserved=0.1 * seed) for q in problem.query_types))
    for part in (0.7, 0.4, 0.2):
        short = problem.replace(budget_usd=problem.budget_usd * part)
        if least_usd(short) is None:
            break
    assert_each_is_enough(short, refused(short).reasons)


# ---- one machine, by hand


def one_type(**fields: Any) -> AllocationProblem:
    """250 requests/h, all of which must be served, on replicas of 100 for $1/h that take 5 s, 1 s to the first token.

    They need three replicas: $72 a day, weights of 16 GB and 5 GB of traffic.
    """
    query = {
        "name": "chat",
        "input_tokens": 100,
        "output_tokens": 100,
        "requests_per_hour": 250,
        "delay_limit_s": 6,
        "ttft_limit_s": 2,
        "error_limit": 0.1,
        "delay_usd_per_ms": 0.001,
        "unserved_usd": 1000,
        "storage_kb_per_token": 100,
        "errors": (0.08,),
        "max_unserved": 0,
    }
    asked = {name: fields.pop(name) for name in list(fields) if name in query}
    return AllocationProblem(
        query_types=(QueryDemand(**(query | asked)),),
        models=(ServedModel(name="m", weight_gb=16, kv_bytes_per_token=0, gflop_per_token=16),),
        tiers=(Tier(name="box", gpu="box", memory_gb=80, bandwidth_gb_per_s=1000, tflops=100, usd_per_hour=1),),
        configurations=(
            Configuration(
                model=0,
                tier=0,
                tensor_parallel=1,
                pipeline_parallel=1,
                machines=1,
                usd_per_hour=1,
                delay_s=(5,),
                ttft_s=(1,),
                capacity_per_hour=(100,),
            ),
        ),
        **{"budget_usd": 100, "storage_capacity_gb": 30, "storage_usd_per_gb_hour": 0} | fields,
    )


def test_the_problem_by_hand_has_an_answer() -> None:
    assert hp.optimize(one_type()).cost_usd_per_hour == pytest.approx(3)


@pytest.mark.parametrize(
    ("short", "needed"),
    [
        ({"budget_usd": 50.0}, {"budget_usd": 72.0, "max_unserved": 0.2}),
        ({"budget_usd": 10.0}, {"budget_usd": 72.0, "max_unserved": 1.0}),
        ({"storage_capacity_gb": 18.5}, {"storage_capacity_gb": 21.0, "max_unserved": 0.5}),
        ({"delay_limit_s": 3}, {"delay_limit_s": 5.0, "max_unserved": 1.0}),
        ({"ttft_limit_s": 0.5}, {"ttft_limit_s": 1.0, "max_unserved": 1.0}),
        ({"error_limit": 0.05}, {"error_limit": 0.08, "max_unserved": 1.0}),
    ],
    ids="-".join,
)
def test_by_hand(short: dict[str, float], needed: dict[str, float]) -> None:
    error = refused(one_type(**short))
    assert {reason.constraint for reason in error.reasons} == set(needed)
    for reason in error.reasons:
        assert needed[reason.constraint] <= reason.needed <= needed[reason.constraint] * 1.007
        assert reason.available == short.get(reason.constraint, 0.0)
        assert reason.constraint in str(error)


def test_the_smallest_move_comes_first() -> None:
    assert [r.constraint for r in refused(one_type(budget_usd=71.0)).reasons] == ["budget_usd", "max_unserved"]
    assert [r.constraint for r in refused(one_type(budget_usd=50.0)).reasons] == ["max_unserved", "budget_usd"]


def test_limits_that_must_move_together_are_named_together() -> None:
    error = refused(one_type(budget_usd=50.0, delay_limit_s=3))
    delay, budget = (next(r for r in error.reasons if r.constraint == name) for name in ("delay_limit_s", "budget_usd"))
    assert "raise delay_limit_s of 'chat' from 3 s to" in str(error)
    assert "and raise budget_usd from $50 to $72" in str(error)
    both = one_type(budget_usd=budget.needed, delay_limit_s=delay.needed)
    assert hp.optimize(both).cost_usd_per_hour == pytest.approx(3)
    for part in ((0.99, 1), (1, 0.99)):
        assert least_usd(one_type(budget_usd=budget.needed * part[0], delay_limit_s=delay.needed * part[1])) is None


def test_only_the_types_that_are_in_the_way_are_named() -> None:
    problem = one_type(error_limit=0.05)
    chat = problem.query_types[0]
    easy = chat.replace(name="easy", error_limit=0.2, requests_per_hour=50)
    two = problem.replace(
        query_types=(chat, easy),
        configurations=tuple(
            c.replace(**{name: getattr(c, name) * 2 for name in ("delay_s", "ttft_s", "capacity_per_hour")})
            for c in problem.configurations
        ),
    )
    assert {reason.subject for reason in refused(two).reasons} == {"chat"}


def test_where_no_machine_is_large_enough_only_less_traffic_helps() -> None:
    problem = one_type(decisions=Decisions(replicas="one"))
    (reason,) = refused(problem).reasons
    assert reason.constraint == "max_unserved"
    assert 0.6 <= reason.needed <= 0.605


def test_a_solver_alone_says_who_knows_more() -> None:
    with pytest.raises(hp.InfeasibleError, match=r"hetplan\.optimize says"):
        get_allocation_solver("milp").solve(one_type(budget_usd=50.0))


def test_without_time_something_is_said_all_the_same() -> None:
    canonical = AllocationProblem.canonical(query_types=10, models=10, tiers=10)
    strict = canonical.replace(
        budget_usd=20.0, query_types=tuple(q.replace(max_unserved=0.0) for q in canonical.query_types)
    )
    error = infeasible(strict, time_limit_s=0.0)
    assert error.reasons
    assert all(reason.needed > reason.available for reason in error.reasons)
