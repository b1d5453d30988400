"""Problems: self-contained, checked when made, and written as YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import TINY_LLAMA, WORKLOAD, make_cluster, make_machine, make_pool, problem_of, tiny_llama

import hetplan as hp
from hetplan.problem.files import read_problem_file

MACHINE = make_machine()
OWNED = make_cluster((MACHINE, make_pool(MACHINE, 2, usd=None, market="owned")))
RENTED = make_cluster((MACHINE, make_pool(MACHINE, 2)))
PROBLEM = """
model: llama-3.2-1b
cluster: {region: us-west-2, market: on_demand, machines: {g6.xlarge: 1}}
workload: {input_tokens: 763, output_tokens: 232}
"""


# ---- what is checked


@pytest.mark.parametrize(
    ("cluster", "options", "said"),
    [
        (RENTED, {"objective": "cost"}, "requests_per_s"),
        (OWNED, {"objective": "throughput_per_cost"}, "owned"),
        (RENTED, {"slo": hp.Slo(ttft_s=1, hard=False), "latency_penalty": 1.0, "objective": "cost",
                  "workload": hp.Workload(input_tokens=1, output_tokens=1, requests_per_s=1)}, "hard"),
        (RENTED, {"max_model_len": 8193}, "8,192 tokens"),
        (RENTED, {"workload": hp.Workload(input_tokens=8000, output_tokens=193)}, "8,193"),
        (RENTED, {"gpu_memory_utilization": 1.1}, "gpu_memory_utilization"),
        (RENTED, {"max_num_seqs": 0}, "max_num_seqs"),
        (RENTED, {"max_num_batched_tokens": -1}, "max_num_batched_tokens"),
        (RENTED, {"latency_penalty": -0.5}, "latency_penalty"),
        (RENTED, {"objective": "profit"}, "objective"),
        (RENTED, {"estimator": "oracle"}, "estimator"),
        (RENTED, {"colour": "red"}, "colour"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_by_name(cluster: hp.Cluster, options: dict[str, Any], said: str) -> None:
    with pytest.raises(hp.InvalidInputError, match=said):
        problem_of(tiny_llama(), cluster, **options)


def test_every_gpu_needs_its_calibration() -> None:
    problem = problem_of(tiny_llama(), RENTED)
    with pytest.raises(hp.InvalidInputError, match="no calibration for X1"):
        problem.replace(calibrations=())


@pytest.mark.parametrize("options", [{"max_model_len": 8192}, {"slo": hp.Slo(e2e_s=5)}, {"max_num_seqs": 1}])
def test_what_can_be_asked_is_kept(options: dict[str, Any]) -> None:
    problem = problem_of(tiny_llama(), RENTED, **options)
    for name, value in options.items():
        assert getattr(problem, name) == value


def test_the_longest_request_is_the_workloads_unless_stated() -> None:
    assert problem_of(tiny_llama(), RENTED).longest_request_tokens == 995
    assert problem_of(tiny_llama(), RENTED, max_model_len=4000).longest_request_tokens == 4000


def test_a_problem_is_plain_data_that_survives_json() -> None:
    problem = problem_of(tiny_llama(), RENTED, slo=hp.Slo(ttft_s=2.0), max_model_len=4000)
    assert hp.PlacementProblem.from_json(problem.model_dump_json()) == problem
    assert set(problem.calibration_sha256) == {"X1"}
    assert problem.calibration_sha256["X1"] == problem.calibrations[0].sha256


def test_a_problem_needs_nothing_from_the_catalogue() -> None:
    """Own model, own GPU, own machine, own price: the snapshot is all there is."""
    problem = problem_of(tiny_llama(), RENTED)
    loaded = hp.PlacementProblem.from_json(problem.model_dump_json())
    assert hp.optimize(loaded) == hp.optimize(problem)


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "expected_cost"},
        {
            "slo": hp.Slo(ttft_s=1, percentile=0.9),
            "workload": hp.Workload(input_tokens=10, output_tokens=10, requests_per_s=1),
        },
        {"workload": hp.Workload(query_types=[
            {"name": "a", "input_tokens": 10, "output_tokens": 10, "slo": {"ttft_s": 1.0}}])},
    ],
    ids=["expected cost", "percentile", "per query type"],
)  # fmt: skip
def test_what_no_solver_answers_yet_says_so(options: dict[str, Any]) -> None:
    problem = problem_of(tiny_llama(), RENTED, **options)
    with pytest.raises(hp.UnsupportedFeatureError, match=r"not there yet|needs|hetplan.optimize answers"):
        problem.refuse_unsupported()


# ---- as YAML


def read(tmp_path: Path, text: str) -> dict[str, Any]:
    path = tmp_path / "problem.yaml"
    path.write_text(text, encoding="utf-8")
    return read_problem_file(path)


def test_a_file_gives_the_arguments_of_optimize(tmp_path: Path) -> None:
    arguments = read(tmp_path, PROBLEM + "objective: throughput_per_cost\nsolver_options: {beam_width: 5}\nseed: 4\n")
    assert arguments["model"] == hp.ModelSpec.get("llama-3.2-1b")
    assert arguments["workload"] == WORKLOAD
    assert arguments["cluster"] == hp.Cluster.from_counts({"g6.xlarge": 1}, region="us-west-2")
    plan = hp.optimize(**arguments)
    assert (plan.objective_name, plan.provenance.seed) == ("throughput_per_cost", 4)
    assert plan.provenance.parameters["beam_width"] == 5


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "config.json").write_text(json.dumps(TINY_LLAMA))
    (tmp_path / "cluster.yaml").write_text("region: us-west-2\nmarket: on_demand\nmachines: {g6.xlarge: 2}\n")
    (tmp_path / "trace.csv").write_text("arrival_s,input_tokens,output_tokens\n0,100,10\n1,200,20\n2,3000,30\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    arguments = read(
        tmp_path,
        "model: models\ncluster: cluster.yaml\n"
        "workload: {trace: trace.csv, max_input_tokens: 2048, requests_per_s: 3}\n",
    )
    assert arguments["model"].parameter_count == tiny_llama().parameter_count
    assert arguments["cluster"].pools[0].count == 2
    assert arguments["workload"].max_tokens == 220
    assert arguments["workload"].requests_per_s == 3


def test_a_model_may_be_written_out(tmp_path: Path) -> None:
    text = PROBLEM.replace("model: llama-3.2-1b", f"model: {json.dumps(TINY_LLAMA)}")
    assert read(tmp_path, text)["model"].parameter_count == tiny_llama().parameter_count


def test_promises(tmp_path: Path) -> None:
    arguments = read(tmp_path, PROBLEM + "slo: {ttft_s: 1.5, hard: false}\nlatency_penalty: 2\n")
    assert arguments["slo"] == hp.Slo(ttft_s=1.5, hard=False)
    assert hp.optimize(**arguments).problem.latency_penalty == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("input_tokens: 763", "input_token: 763"), "input_token"),
        (("output_tokens: 232", "output_tokens: 0"), "output_tokens"),
        (("{input_tokens: 763, output_tokens: 232}", "{trace: trace.csv, input_tokens: 3}"), "input_tokens"),
        (("{input_tokens: 763, output_tokens: 232}", "{trace: none.csv}"), "none.csv"),
        (("machines: {g6.xlarge: 1}", "machines: {g6.xlarge: 0}"), "g6.xlarge"),
        (("machines: {g6.xlarge: 1}", "machine: {g6.xlarge: 1}"), "machine"),
        (("machines: {g6.xlarge: 1}", "machines: {}"), "empty"),
        (("region: us-west-2, ", ""), "region"),
        (("model: llama-3.2-1b", "model: no-such-model"), "no-such-model"),
        (("model: llama-3.2-1b", "model: 5"), "model"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    assert change[0] in PROBLEM
    with pytest.raises(hp.InvalidInputError, match=said):
        read(tmp_path, PROBLEM.replace(*change))


@pytest.mark.parametrize(
    "example", sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")), ids=lambda p: p.stem
)
def test_the_examples_are_problems(example: Path) -> None:
    arguments = read_problem_file(example)
    assert {"model", "cluster", "workload"} <= arguments.keys()
