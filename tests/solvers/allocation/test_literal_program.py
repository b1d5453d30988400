"""The paper's program: what it says in a file, and what it comes to beside the strong form."""

from __future__ import annotations

import re
from pathlib import Path

import pulp
import pytest
from small_problems import small_problem

from hetplan.errors import InvalidInputError
from hetplan.problem.allocation import AllocationProblem, Decisions, DecisionsName
from hetplan.solvers.allocation.assignment import Assignment, choose
from hetplan.solvers.allocation.milp import literal_model, solve_literal, write_model
from hetplan.solvers.allocation.options import Options, make_options

# Seconds that no search here comes near.
AMPLE_S = 60.0


def variables_of(model: pulp.LpProblem) -> set[str]:
    return {variable.name for variable in model.variables()}


def usd_of(model: pulp.LpProblem, options: Options, found: Assignment) -> float:
    """The program's objective at an assignment, once every row and bound of it holds there."""
    problem = options.problem
    values: dict[str, float] = dict.fromkeys(variables_of(model), 0.0)

    def label(name: str) -> str:
        return re.sub("[^A-Za-z0-9.]", "_", name)

    types = [label(query.name) for query in problem.query_types]
    for i, query in enumerate(types):
        values[f"unserved__{query}"] = max(1.0 - float(found.shares[i].sum()), 0.0)
    for n in range(options.count):
        pair = f"{label(problem.models[options.model[n]].name)}__{label(problem.tiers[options.tier[n]].name)}"
        option = f"{pair}__tp{options.tensor_parallel[n]}_pp{options.pipeline_parallel[n]}"
        count = int(found.replicas[n])
        values[f"buys__{option}"] = count
        values[f"gpus__{pair}"] += count * int(options.gpus[n])
        values[f"in_use__{pair}"] = max(values[f"in_use__{pair}"], min(count, 1))
        for i, query in enumerate(types):
            x = float(found.shares[i, n])
            values[f"part__{query}__{option}"] = x
            values[f"share__{query}__{pair}"] += x
            values[f"serves__{query}__{pair}"] = max(values[f"serves__{query}__{pair}"], float(x > 0))
    assert values.keys() == variables_of(model)
    for variable in model.variables():
        variable.varValue = values[variable.name]
        assert variable.lowBound - 1e-8 <= variable.varValue <= variable.upBound + 1e-8, variable.name
    for row in model.constraints():
        slack = float(row.value()) * (1 if row.sense == pulp.LpConstraintLE else -1)
        assert abs(slack) < 1e-8 or (row.sense != pulp.LpConstraintEQ and slack < 0), row.name
    return float(model.objective.value())


@pytest.mark.parametrize("decisions", ["default", "paper"])
@pytest.mark.parametrize("seed", range(4))
def test_a_small_instance_of_the_family_costs_what_the_strong_form_says(seed: int, decisions: DecisionsName) -> None:
    problem = AllocationProblem.canonical(query_types=4, models=4, tiers=5, seed=seed, decisions=decisions)
    options = make_options(problem)
    strong = choose(options, range(options.count), time_limit_s=AMPLE_S)
    assert strong is not None
    assert usd_of(literal_model(problem), options, strong) == pytest.approx(strong.usd, rel=1e-6)
    # From nothing, HiGHS can take minutes: after a second its answer and its bound lie around the optimum.
    literal = solve_literal(problem, time_limit_s=1.0)
    assert literal.bound_usd is not None
    assert literal.bound_usd <= strong.usd * (1 + 1e-6)
    assert literal.usd is None or literal.usd >= strong.usd * (1 - 1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_with_its_default_reading_it_is_solved(seed: int) -> None:
    problem = AllocationProblem.canonical(query_types=3, models=4, tiers=4, seed=seed)
    options = make_options(problem)
    strong = choose(options, range(options.count), time_limit_s=AMPLE_S)
    literal = solve_literal(problem, time_limit_s=AMPLE_S)
    assert strong is not None
    assert literal.status == "optimal"
    assert literal.usd == pytest.approx(strong.usd, rel=1e-6)


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    solve_literal(small_problem(0, Decisions.paper()))
    assert capfd.readouterr() == ("", "")


def test_a_file_names_what_it_is_about(tmp_path: Path) -> None:
    problem = AllocationProblem.canonical(query_types=2, models=2, tiers=2, decisions="paper")
    write_model(problem, tmp_path / "plan.lp")
    text = (tmp_path / "plan.lp").read_text()
    assert "buys__Llama_3.1_70B__H100_INT8__tp2_pp1" in text
    for row in (
        "demand__summarization_0:", "budget:", "one_configuration__", "count_gpus__", "memory__", "compute__",
        "storage:", "delay__summarization_0:", "error__summarization_0:", "placed__", "deployed__", "within_share__",
        "within_buy__", "at_least__",
    ):  # fmt: skip
        assert row in text


@pytest.mark.parametrize("decisions", [Decisions(), Decisions.paper()], ids=["default", "paper"])
def test_an_mps_file_holds_the_same_program(tmp_path: Path, decisions: Decisions) -> None:
    problem = small_problem(3, decisions)
    write_model(problem, tmp_path / "plan.mps")
    _, read = pulp.LpProblem.fromMPS(str(tmp_path / "plan.mps"))
    model = literal_model(problem)
    assert variables_of(read) == variables_of(model)
    rows = {row.name: (row.sense, row.constant, {v.name: c for v, c in row.items() if c}) for row in read.constraints()}
    for row in model.constraints():
        sense, constant, terms = rows[row.name]
        assert sense == row.sense
        assert constant == pytest.approx(row.constant)
        assert terms == pytest.approx({v.name: c for v, c in row.items() if c})


def test_names_that_no_file_can_hold_stay_apart(tmp_path: Path) -> None:
    problem = small_problem(0, Decisions.paper())
    names = ["a b", "a-b", "  ", "a__b", "é" * 300]
    queries = [problem.query_types[0].replace(name=name) for name in names]
    problem = problem.replace(query_types=tuple(queries))
    model = literal_model(problem)
    assert sum(name.startswith("unserved__") for name in variables_of(model)) == len(names)
    write_model(problem, tmp_path / "plan.lp")


@pytest.mark.parametrize("name", ["plan", "plan.txt", "plan.lp.gz"])
def test_other_endings_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"\.lp or \.mps"):
        write_model(small_problem(0, Decisions()), tmp_path / name)


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "plan.lp"
    path.write_text("mine")
    with pytest.raises(InvalidInputError, match="is there already"):
        write_model(small_problem(0, Decisions()), path)
    assert path.read_text() == "mine"
    write_model(small_problem(0, Decisions()), path, overwrite=True)
    assert path.read_text() != "mine"


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot write"):
        write_model(small_problem(0, Decisions()), tmp_path / "none" / "plan.mps")
