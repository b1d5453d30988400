"""The verb `simulate`: one document on stdout, files where asked, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hetplan as hp
from hetplan.cli import app

FINE, BAD_INPUT = 0, 2


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    load = hp.Workload(input_tokens=300, output_tokens=40)
    hp.optimize(model="llama-3.1-8b", cluster={"g6.xlarge": 1}, workload=load, solver="even").save(file)
    return file


def test_a_spot_run_is_one_document_and_writes_what_was_asked(plan: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("requests.csv", "trace.json", "run.png")}
    asked = [
        "simulate",
        str(plan),
        "--rate",
        "0.5",
        "--duration",
        "120",
        "--spot-seed",
        "1",
        "--policy",
        "both",
        "--json",
    ]
    asked += ["--requests", str(files["requests.csv"]), "--chrome-trace", str(files["trace.json"])]
    done = CliRunner().invoke(app, [*asked, "--figure", str(files["run.png"])])
    assert done.exit_code == FINE, done.output
    found = json.loads(done.stdout)
    assert found["answered"] == found["requests"] > 0
    assert all(file.stat().st_size for file in files.values())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "states no rate"),
        (["--rate", "1", "--duration", "-5"], "duration_s"),
        (["--rate", "1", "--policy", "hope"], "policy"),
        (["--rate", "1", "--routing", "random"], "round_robin"),
        (["--rate", "1", "--spot", "nowhere.csv"], "nowhere.csv"),
        (["--rate", "1", "--spot", "a.csv", "--spot-seed", "1"], "leave one out"),
        (["--rate", "1", "--figure", "no/such/folder.png"], "cannot be written"),
    ],
)
def test_what_cannot_be_simulated_says_why(plan: Path, more: list[str], said: str) -> None:
    policy = ["--spot-seed", "1"] if "hope" in more else []
    done = CliRunner().invoke(app, ["simulate", str(plan), *more, *policy])
    assert done.exit_code == BAD_INPUT, done.output
    assert said in done.output
