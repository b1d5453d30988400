"""``--json``: stdout is exactly one JSON document, whatever happens; tables, warnings and errors go to stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import WORKLOAD, verified

import hetplan as hp
from hetplan import errors
from hetplan.cli import main

SMALL = ["--model", "llama-3.2-1b", "--machine", "g6.xlarge=1"]


Said = tuple[int, str, str]
Told = tuple[int, Any, str]


def run(*arguments: str | Path) -> Said:
    command = [sys.executable, "-m", "hetplan", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def run_json(*arguments: str | Path) -> Told:
    """Exit code, the document on stdout, stderr."""
    return _read(run(*arguments, "--json"))


def _read(said: Said) -> Told:
    code, out, err = said
    return code, json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is not JSON")), err


@pytest.fixture
def main_json(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Told]:
    """The same within this process: its file descriptors are read, so that what libraries print is seen as well."""

    def run_main(*arguments: str | Path) -> Told:
        monkeypatch.setattr(sys, "argv", ["hetplan", *map(str, arguments), "--json"])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return _read((int(left.value.code or 0), out, err))

    return run_main


@pytest.fixture(scope="module")
def plan() -> hp.Plan:
    return verified(hp.optimize(model="llama-3.2-1b", cluster={"g6.xlarge": 1}, workload=WORKLOAD))


@pytest.fixture(scope="module")
def plan_file(plan: hp.Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    return path


def test_optimize_prints_the_plan_that_it_writes(tmp_path: Path, plan: hp.Plan) -> None:
    out = tmp_path / "plan.json"
    code, document, tables = run_json("optimize", *SMALL, "--out", out)
    assert code == 0
    assert document == json.loads(out.read_text(encoding="utf-8"))
    assert hp.Plan.load(out).requests_per_s == pytest.approx(plan.requests_per_s)
    assert "llama-3.2-1b" in tables


def test_without_json_stdout_stays_empty(plan_file: Path) -> None:
    code, out, tables = run("estimate", plan_file)
    assert (code, out) == (0, "")
    assert "req/s" in tables


def test_predict(main_json: Callable[..., Told]) -> None:
    code, document, tables = main_json("predict", "llama-3.2-1b", "L4")
    assert code == 0
    assert document["tpot_s"] > 0
    assert "tpot_s" in tables


def test_catalog() -> None:
    code, rows, tables = run_json("catalog", "gpus", "--match", "h100")
    assert code == 0
    assert {row["name"] for row in rows} >= {"H100-SXM5-80GB", "H100-PCIE-80GB"}
    assert "H100" in tables


def test_verify_a_sound_plan(plan_file: Path, plan: hp.Plan) -> None:
    code, document, _ = run_json("verify", plan_file)
    assert code == 0
    assert document["violations"] == []
    assert document["bound_confirmed"] == plan.bound


def test_violations_exit_4(plan_file: Path, tmp_path: Path, main_json: Callable[..., Told]) -> None:
    content = json.loads(plan_file.read_text(encoding="utf-8"))
    content["requests_per_s"] *= 2
    tampered = tmp_path / "tampered.json"
    tampered.write_text(json.dumps(content), encoding="utf-8")
    code, document, said = main_json("verify", tampered)
    assert code == 4
    assert {v["code"] for v in document["violations"]} == {"plan_rate_differs"}
    assert document["bound_confirmed"] is None
    assert "requests_per_s" in said


def test_bad_input_exits_2(main_json: Callable[..., Told]) -> None:
    code, document, _ = main_json("optimize", "--model", "llama-3.1-71b", "--machine", "g6.xlarge=1")
    assert code == 2
    assert document["error"]["type"] == "UnknownNameError"
    assert "llama-3.1-70b" in document["error"]["message"]


def test_an_error_states_a_documented_type(main_json: Callable[..., Told]) -> None:
    _, document, _ = main_json("optimize", *SMALL, "--input-tokens", "-1")
    assert document["error"]["type"] in errors.__all__


def test_infeasible_exits_3_with_the_shortfall(main_json: Callable[..., Told]) -> None:
    code, document, _ = main_json("optimize", "--model", "llama-3.1-405b", "--machine", "g6.xlarge=1")
    assert code == 3
    (reason,) = document["error"]["reasons"]
    assert (reason["constraint"], reason["unit"]) == ("memory", "GiB")
    assert reason["needed"] > 700 > reason["available"]


def test_no_solution_exits_5() -> None:
    """Even pipelines of one machine type do not hold the model; a mix would, so nothing rules a plan out."""
    machines = ["--machine", "g6.12xlarge=1", "--machine", "g5.12xlarge=1"]
    code, document, _ = run_json("optimize", "--model", "llama-3.1-70b", *machines, "--solver", "even")
    assert code == 5
    assert document["error"]["type"] == "NoSolutionError"


def test_a_usage_error_exits_2() -> None:
    code, out, said = run("optimize", *SMALL, "--beam-width", "many")
    assert (code, out) == (2, "")
    assert "beam-width" in said


@pytest.mark.parametrize(
    "arguments", [["optimize", *SMALL, "--beam-width", "many"], ["predict", "llama-3.2-1b"], ["verify", "--bogus"]]
)
def test_a_usage_error_gives_a_document_too(arguments: list[str], main_json: Callable[..., Told]) -> None:
    code, document, _ = main_json(*arguments)
    assert code == 2
    assert document["error"]["message"]
