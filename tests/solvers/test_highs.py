"""The MILP behind a planner: answers known by hand, limits kept, nothing printed."""

from __future__ import annotations

import itertools

import pytest

from hetplan.solvers.highs import Milp, maximise

WEIGHTS, GAINS, ROOM = [3, 5, 7, 8, 2], [4.0, 7.0, 9.5, 11.0, 2.5], 15


def knapsack() -> Milp:
    milp = Milp()
    columns = [milp.column(0, 1, gain=gain, integer=True) for gain in GAINS]
    milp.row(list(zip(columns, map(float, WEIGHTS), strict=True)), most=ROOM)
    return milp


def test_a_knapsack_is_solved_to_the_end() -> None:
    best = max(
        sum(GAINS[i] for i in chosen)
        for size in range(len(GAINS) + 1)
        for chosen in itertools.combinations(range(len(GAINS)), size)
        if sum(WEIGHTS[i] for i in chosen) <= ROOM
    )
    found = maximise(knapsack(), time_limit_s=10)
    assert found.status == "optimal"
    assert found.objective == pytest.approx(best)
    assert found.bound == pytest.approx(best)
    assert found.values is not None
    assert sum(w * x for w, x in zip(WEIGHTS, found.values, strict=True)) <= ROOM + 1e-9


def test_a_column_named_twice_counts_twice() -> None:
    milp = Milp()
    column = milp.column(0, 10, gain=1)
    milp.row([(column, 1.0), (column, 2.0)], most=6)
    assert maximise(milp, time_limit_s=10).objective == pytest.approx(2)


def test_no_solution_is_told_from_none_in_time() -> None:
    milp = knapsack()
    milp.row([(0, 1.0)], least=2)
    assert maximise(milp, time_limit_s=10).status == "infeasible"
    hard = Milp()
    columns = [hard.column(0, 1, integer=True) for _ in range(40)]
    hard.row([(c, 2.0 * (c + 7)) for c in columns], least=333, most=333)
    found = maximise(hard, time_limit_s=0)
    assert (found.objective, found.values) == (None, None)


def test_a_start_is_kept_when_there_is_no_time() -> None:
    found = maximise(knapsack(), time_limit_s=0, start={0: 1, 1: 1, 2: 1, 3: 0, 4: 0})
    assert found.status in ("feasible", "no solution")
    assert found.objective in (None, pytest.approx(20.5))


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    maximise(knapsack(), time_limit_s=10, max_nodes=5, start={0: 1.0})
    assert capfd.readouterr() == ("", "")
