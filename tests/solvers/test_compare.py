"""Solvers side by side: the same plans as alone, honest where one fails."""

from __future__ import annotations

import pytest
from builders import WORKLOAD, problem_of

import hetplan as hp
from hetplan.report import comparison_figure, comparison_table
from hetplan.solvers.base import solver_names

PROBLEM = {"g6.xlarge": 2, "g6e.xlarge": 1}


def test_each_solver_has_a_row_with_the_plan_that_it_makes_alone() -> None:
    problem = problem_of("llama-3.1-8b", PROBLEM)
    found = hp.compare(problem, time_limit_s=5)
    assert [row.solver for row in found.rows] == solver_names()
    for row in found.rows:
        assert (row.plan is None) != (row.failure is None), row.solver
        if row.plan is not None:
            assert hp.verify(row.plan) == []
            assert row.plan.provenance.solver == row.solver
    (alone,) = (row.plan for row in found.rows if row.solver == "even")
    assert alone == hp.optimize(problem, solver="even")


def test_no_plan_is_above_the_bound_that_one_of_them_proved() -> None:
    found = hp.compare(problem_of("llama-3.1-8b", PROBLEM), time_limit_s=5)
    assert found.bound is not None
    for row in found.rows:
        if row.plan is not None:
            assert row.plan.objective <= found.bound * (1 + 1e-9), row.solver
            gap = found.gap(row)
            assert gap is not None
            assert gap == pytest.approx((found.bound - row.plan.objective) / row.plan.objective)


def test_without_a_bound_there_is_no_gap() -> None:
    found = hp.compare(problem_of("llama-3.1-8b", PROBLEM), solvers=["even"])
    assert found.bound is None
    assert found.gap(found.rows[0]) is None


def test_what_no_solver_can_do_is_said_for_each() -> None:
    found = hp.compare(problem_of("llama-3.1-70b", {"g6.xlarge": 1}), solvers=["even", "auto"])
    assert all(row.plan is None and "GiB" in str(row.failure) for row in found.rows)
    assert found.bound is None


def test_an_unknown_solver_is_refused_before_any_runs() -> None:
    said: list[str] = []
    with pytest.raises(hp.UnknownNameError, match="gurobi"):
        hp.compare(
            problem_of("llama-3.1-8b", PROBLEM),
            solvers=["even", "gurobi"],
            on_progress=lambda done, total, name: said.append(name),
        )
    assert said == []


def test_table_and_figure_name_every_solver() -> None:
    problem = problem_of("llama-3.1-8b", PROBLEM, WORKLOAD)
    found = hp.compare(problem, solvers=["even", "auto"])
    assert comparison_table(found).row_count == 2
    rate, _ = comparison_figure(found).axes
    assert [label.get_text() for label in rate.get_yticklabels()] == ["even", "auto"]
