"""Allocation problems on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hetplan as hp
from hetplan import cli

Run = Callable[..., tuple[int, str, str]]
FINE, OUR_FAULT, BAD_INPUT, INFEASIBLE, VIOLATIONS, NO_SOLUTION = range(6)
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "allocation" / "three-models-six-types.yaml"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``hetplan ARGUMENTS``: exit code, stdout, stderr with line breaks taken out."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hetplan", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(leaving.value.code or 0), out, " ".join(err.split())

    return call


@pytest.fixture(scope="module")
def problem() -> hp.AllocationProblem:
    return hp.AllocationProblem.canonical(query_types=3, models=3, tiers=4, seed=0)


@pytest.fixture(scope="module")
def plan(problem: hp.AllocationProblem) -> hp.Plan:
    return hp.optimize(problem, solver="milp")


@pytest.fixture
def problem_file(problem: hp.AllocationProblem, tmp_path: Path) -> Path:
    path = tmp_path / "problem.yaml"
    problem.save(path)
    return path


@pytest.fixture
def plan_file(plan: hp.Plan, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan.save(path)
    return path


@pytest.mark.parametrize("solver", ["auto", "milp", "gh", "agh"])
def test_optimize_by_every_solver(run: Run, problem_file: Path, problem: hp.AllocationProblem, solver: str) -> None:
    code, out, _ = run("optimize", problem_file, "--solver", solver, "--time-limit", "20", "--seed", "2", "--json")
    assert code == FINE
    made = hp.Plan.from_json(out)
    assert made.problem == problem
    assert (made.provenance.solver, made.provenance.seed) == (solver, 2)
    assert hp.verify(made) == []


def test_the_tables_show_totals_deployments_and_routes(run: Run, problem_file: Path, plan: hp.Plan) -> None:
    code, out, tables = run("optimize", problem_file, "--solver", "milp")
    assert (code, out) == (FINE, "")
    assert "Plan for 3 query types" in tables
    assert f"{plan.requests_per_s:.3f} req/s" in tables
    assert f"total_usd = {plan.objective:.6g} (optimal)" in tables
    for deployment in plan.deployments:
        assert f"│ {deployment.model} │ {deployment.pipelines[0].stages[0].instance_type} │" in tables
    for route in plan.routes:
        assert f"{route.fraction:.1%}" in tables
    assert "unserved" in tables


def test_the_unserved_share_is_shown(run: Run, problem: hp.AllocationProblem, tmp_path: Path) -> None:
    poor = problem.replace(budget_usd=problem.budget_usd / 3)
    poor.save(tmp_path / "poor.json")
    code, _, tables = run("optimize", tmp_path / "poor.json", "--solver", "milp", "--out", tmp_path / "plan.json")
    assert code == FINE
    made = hp.Plan.load(tmp_path / "plan.json")
    sent = {q.name: sum(r.fraction for r in made.routes if r.query_type == q.name) for q in poor.query_types}
    dropped = [1 - share for share in sent.values() if share < 0.999]
    assert dropped
    for share in dropped:
        assert f"{share:.1%} │" in tables


def test_verify(run: Run, plan_file: Path, plan: hp.Plan, tmp_path: Path) -> None:
    code, _, said = run("verify", plan_file)
    assert code == FINE
    assert f"sound; lower bound {plan.bound:.6g} $ confirmed" in said
    content = json.loads(plan_file.read_text(encoding="utf-8"))
    content["objective"] *= 0.9
    (tmp_path / "tampered.json").write_text(json.dumps(content), encoding="utf-8")
    code, out, _ = run("verify", tmp_path / "tampered.json", "--json")
    assert code == VIOLATIONS
    assert "objective_differs" in {v["code"] for v in json.loads(out)["violations"]}


def test_verify_doubts_old_prices_of_the_machines_in_use(run: Run, tmp_path: Path) -> None:
    assert run("optimize", EXAMPLE, "--out", tmp_path / "plan.json")[0] == FINE
    used = {n for d in hp.Plan.load(tmp_path / "plan.json").deployments for p in d.pipelines for n in p.nodes}
    code, out, _ = run("verify", tmp_path / "plan.json", "--max-price-age", "0", "--json")
    assert code == FINE
    warnings = json.loads(out)["warnings"]
    assert len(warnings) == len(used)
    assert all(any(warning.startswith(name) for name in used) for warning in warnings)


def test_what_needs_a_placement_plan_is_refused(run: Run, plan_file: Path) -> None:
    code, out, _ = run("estimate", plan_file, "--json")
    assert code == BAD_INPUT
    error = json.loads(out)["error"]
    assert error["type"] == "UnsupportedFeatureError"
    assert "hetplan.placement_plans(plan)" in error["message"]


@pytest.mark.parametrize("options", [["--dry-run"], ["--engine", "vllm-0.32"]])
def test_a_launch_of_the_paper_s_tiers_says_what_they_lack(
    run: Run, plan_file: Path, tmp_path: Path, options: list[str]
) -> None:
    code, out, _ = run("launch", plan_file, *options, "--out", tmp_path / "out", "--json")
    assert code == BAD_INPUT
    error = json.loads(out)["error"]
    assert error["type"] == "InvalidInputError"
    assert "AllocationProblem.from_catalog" in error["message"]
    assert not (tmp_path / "out").exists()


def test_compare_is_refused(run: Run, problem_file: Path) -> None:
    code, out, _ = run("compare", problem_file, "--json")
    assert code == BAD_INPUT
    assert json.loads(out)["error"]["type"] == "UnsupportedFeatureError"


def test_diff(run: Run, plan_file: Path) -> None:
    code, _, said = run("diff", plan_file, plan_file)
    assert code == FINE
    assert "+0.000 req/s" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "vllm-0.32"], "--engine does not belong to"),
        (["--objective", "throughput"], "--objective does not belong to"),
        (["--weight-dtype", "fp8"], "--weight-dtype does not belong to"),
        (["--beam-width", "3"], "--beam-width does not belong to"),
        (["--calibration", "own.json"], "--calibration does not belong to"),
        (["--model", "llama-3.1-8b"], "says it already: leave out --model"),
        (["--solver", "dp-beam"], "agh, auto, gh, milp"),
    ],
)
def test_options_of_placement_problems_are_refused(run: Run, problem_file: Path, options: list[str], said: str) -> None:
    code, _, err = run("optimize", problem_file, *options)
    assert code == BAD_INPUT
    assert said in err


def test_limits_in_the_way_are_named_with_how_far_they_must_move(
    run: Run, problem: hp.AllocationProblem, tmp_path: Path
) -> None:
    queries = tuple(q.replace(max_unserved=0.0) for q in problem.query_types)
    problem.replace(budget_usd=20.0, query_types=queries).save(tmp_path / "tight.yaml")
    code, _, said = run("optimize", tmp_path / "tight.yaml")
    assert code == INFEASIBLE
    assert "raise budget_usd from $20 to $" in said.lower()
    code, out, _ = run("optimize", tmp_path / "tight.yaml", "--json")
    assert code == INFEASIBLE
    error = json.loads(out)["error"]
    (budget,) = [reason for reason in error["reasons"] if reason["constraint"] == "budget_usd"]
    assert (budget["available"], budget["unit"]) == (20.0, "$")
    problem.replace(budget_usd=budget["needed"], query_types=queries).save(tmp_path / "enough.yaml")
    assert run("optimize", tmp_path / "enough.yaml")[0] == FINE


def test_no_machine_can_be_paid(run: Run, problem: hp.AllocationProblem, tmp_path: Path) -> None:
    problem.replace(budget_usd=0.01).save(tmp_path / "poor.json")
    code, _, said = run("optimize", tmp_path / "poor.json", "--solver", "milp")
    assert code == INFEASIBLE
    assert "serving nothing costs least" in said


def test_a_plan_is_made_against_scenarios(run: Run, problem_file: Path) -> None:
    asked = ("--robust-scenarios", "5", "--robust-stress", "1.2", "--max-extra-cost", "0.1", "--json")
    code, out, _ = run("optimize", problem_file, *asked)
    said = json.loads(out)["provenance"]["parameters"]
    assert code == FINE
    assert (said["robust_scenarios"], said["robust_stress"], said["robust_max_extra_cost"]) == (5, 1.2, 0.1)
    assert json.loads(out)["objective"] <= 1.1 * said["optimum_usd"] * (1 + 1e-5)


def test_a_target_of_violations_that_is_not_reached_is_infeasible(run: Run, problem_file: Path) -> None:
    asked = ("--robust-stress", "3", "--max-extra-cost", "0", "--max-violation-rate", "0")
    code, _, err = run("optimize", problem_file, *asked)
    assert code == INFEASIBLE
    assert "the least that was reached is" in err


def test_what_robust_plans_are_asked_is_checked(run: Run, problem_file: Path) -> None:
    code, _, err = run("optimize", problem_file, "--max-extra-cost", "-1")
    assert code == BAD_INPUT
    assert "max_extra_cost" in err
