"""The command line as a user meets it: verbs, clear refusals, exit codes. Runs in this process, through ``main``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import TINY_LLAMA, WORKLOAD, verified

import hetplan as hp
from hetplan import cli

Run = Callable[..., tuple[int, str, str]]
SMALL = ("--model", "llama-3.2-1b", "--machine", "g6.xlarge=1")
FINE, OUR_FAULT, BAD_INPUT, INFEASIBLE, VIOLATIONS, NO_SOLUTION = range(6)


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
def plan() -> hp.Plan:
    return verified(hp.optimize(model="llama-3.2-1b", cluster={"g6.xlarge": 1}, workload=WORKLOAD))


@pytest.fixture
def plan_file(plan: hp.Plan, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan.save(path)
    return path


def write_yaml(tmp_path: Path, **changes: Any) -> Path:
    """A problem file that would do, with some keys changed; None takes a key out."""
    content: dict[str, Any] = {
        "model": "llama-3.2-1b",
        "cluster": {"region": "us-west-2", "market": "on_demand", "machines": {"g6.xlarge": 1}},
        "workload": {"input_tokens": 763, "output_tokens": 232},
    }
    path = tmp_path / "problem.yaml"
    path.write_text(yaml.safe_dump(content | changes), encoding="utf-8")
    return path


# ---- what works


def test_optimize_from_options_and_from_a_file_agree(run: Run, tmp_path: Path, plan: hp.Plan) -> None:
    code, out, tables = run("optimize", *SMALL, "--out", tmp_path / "a.json")
    assert (code, out) == (FINE, "")
    assert f"{plan.requests_per_s:.3f} req/s" in tables
    assert run("optimize", write_yaml(tmp_path), "--out", tmp_path / "b.json")[0] == FINE
    first, second = (hp.Plan.load(tmp_path / name) for name in ("a.json", "b.json"))
    assert first.deployments == second.deployments == plan.deployments


def test_options_beside_a_problem_file_change_how_it_is_solved(run: Run, tmp_path: Path) -> None:
    options = ["--solver", "dp-beam", "--beam-width", "7", "--search", "paper", "--estimator", "paper", "--seed", "3"]
    code, out, _ = run("optimize", write_yaml(tmp_path), *options, "--json")
    assert code == FINE
    made = json.loads(out)
    assert made["provenance"]["solver"] == "dp-beam"
    assert made["provenance"]["parameters"] | {"beam_width": 7, "search": "paper"} == made["provenance"]["parameters"]
    assert made["provenance"]["seed"] == 3
    assert made["problem"]["estimator"] == "paper"


def test_options_of_the_problem(run: Run) -> None:
    options = [
        "--region", "us-east-1", "--market", "spot", "--input-tokens", "100", "--output-tokens", "50",
        "--requests-per-s", "2", "--objective", "cost", "--weight-dtype", "fp8", "--max-model-len", "4096",
        "--handover-sequences", "2", "--handover-layers", "1", "--engine", "hetplan", "--time-limit", "5",
    ]  # fmt: skip
    code, out, said = run("optimize", *SMALL, *options, "--json")
    assert code == FINE
    made = hp.Plan.from_json(out)
    assert made.deployments[0].pipelines[0].nodes == ("aws/us-east-1/g6.xlarge/spot",)
    assert made.problem.workload.requests_per_s == 2
    assert made.problem.workload.max_tokens == 150
    assert made.problem.model.weight_dtype == "fp8"
    assert made.problem.max_model_len == 4096
    assert (made.problem.handover_sequences, made.problem.handover_layers) == (2, 1)
    assert made.deployments[0].pipelines[0].stages[0].reserved_bytes > 0
    assert "kept for a second engine" in said
    assert "Within the limits of hetplan" in said
    assert made.objective_name == "cost"


def test_machines_add_up(run: Run) -> None:
    _, out, _ = run("optimize", *SMALL, "--machine", "g6.xlarge=1", "--json")
    (pool,) = hp.Plan.from_json(out).problem.cluster.pools
    assert pool.count == 2


def test_a_config_json_is_a_model(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY_LLAMA))
    for model in (path, tmp_path):
        assert run("predict", model, "L4")[0] == FINE


def test_verify_estimate_and_diff(run: Run, plan_file: Path, plan: hp.Plan) -> None:
    code, out, said = run("verify", plan_file)
    assert (code, out) == (FINE, "")
    bounded = f"sound; upper bound {plan.bound:.6g} req/s confirmed, by "
    assert bounded in " ".join(said.split())
    code, _, said = run("estimate", plan_file)
    assert code == FINE
    assert f"{plan.requests_per_s:.3f} req/s" in said
    code, _, said = run("diff", plan_file, plan_file)
    assert code == FINE
    assert "+0.000 req/s" in said


def test_verify_says_when_no_bound_is_stated_and_when_one_is_not_confirmed(
    run: Run, plan_file: Path, plan: hp.Plan
) -> None:
    unbounded = {"bound": None, "gap": None, "certificate": None, "status": "feasible"}
    plan.model_copy(update=unbounded).save(plan_file)
    code, _, said = run("verify", plan_file)
    assert code == FINE
    assert "sound; no bound stated" in " ".join(said.split())
    assert plan.bound is not None
    plan.model_copy(update={"bound": plan.bound * 0.9999}).save(plan_file)
    code, _, said = run("verify", plan_file)
    assert code == VIOLATIONS
    assert "faulty; bound not confirmed" in " ".join(said.split())


@pytest.mark.parametrize("what", ["models", "gpus", "instances", "offers"])
def test_the_catalogue_lists_sources(run: Run, what: str) -> None:
    code, out, _ = run("catalog", what, "--json")
    assert code == FINE
    rows = json.loads(out)
    assert len(rows) > 20
    assert all(row["source"] for row in rows)


def test_the_catalogue_can_be_searched(run: Run) -> None:
    assert {row["name"] for row in json.loads(run("catalog", "models", "--match", "QWEN3-32", "--json")[1])} == {
        "qwen3-32b"
    }
    regions = json.loads(run("catalog", "offers", "--region", "us-west-2", "--match", "g6.xlarge", "--json")[1])
    assert all("/us-west-2/g6.xlarge/" in row["name"] for row in regions)
    code, out, said = run("catalog", "gpus", "--match", "abacus")
    assert (code, out) == (FINE, "")
    assert "no gpus match" in said


def test_the_version(run: Run) -> None:
    assert run("--version")[:2] == (FINE, f"{hp.__version__}\n")


@pytest.mark.parametrize("verb", ["optimize", "predict", "verify", "estimate", "diff", "catalog"])
def test_every_verb_has_help(run: Run, verb: str) -> None:
    code, out, _ = run(verb, "--help")
    assert code == FINE
    assert "--json" in out


# ---- doubts about prices


def test_old_prices_are_warned_about_and_change_no_exit_code(run: Run, plan_file: Path) -> None:
    code, out, said = run("verify", plan_file, "--max-price-age", "0", "--json")
    assert code == FINE
    (warning,) = json.loads(out)["warnings"]
    assert "days old (limit 0)" in warning or "no day" in warning
    assert "warning: aws/us-west-2/g6.xlarge" in said
    patient = json.loads(run("verify", plan_file, "--max-price-age", "100000", "--json")[1])["warnings"]
    assert not any("days old" in doubt for doubt in patient)


# ---- bad input, each refused with exit code 2 and a message that names it

MACHINE = ("--machine", "g6.xlarge=1")
BAD_OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing to plan": (("optimize",), "problem file"),
    "no machine": (("optimize", "--model", "llama-3.2-1b"), "--machine"),
    "unknown model": (("optimize", "--model", "llama-3.1-71b", *MACHINE), "Nearest: llama-3.1-70b"),
    "unknown instance": (("optimize", "--model", "llama-3.2-1b", "--machine", "g6.13xlarge=1"), "g6.12xlarge"),
    "zero machines": (("optimize", "--model", "llama-3.2-1b", "--machine", "g6.xlarge=0"), "'g6.xlarge' is 0"),
    "negative machines": (("optimize", "--model", "llama-3.2-1b", "--machine", "g6.xlarge=-1"), "TYPE=COUNT"),
    "half a machine": (("optimize", "--model", "llama-3.2-1b", "--machine", "g6.xlarge=0.5"), "TYPE=COUNT"),
    "no count": (("optimize", "--model", "llama-3.2-1b", "--machine", "g6.xlarge"), "TYPE=COUNT"),
    "unknown region": (("optimize", *SMALL, "--region", "moon-1"), "us-west-2"),
    "unknown market": (("optimize", *SMALL, "--market", "black"), "on_demand"),
    "unknown provider": (("optimize", *SMALL, "--provider", "nobody"), "provider 'aws'"),
    "negative rate": (("optimize", *SMALL, "--requests-per-s", "-1"), "requests_per_s"),
    "zero rate": (("optimize", *SMALL, "--requests-per-s", "0"), "requests_per_s"),
    "no rate for a demand": (("optimize", *SMALL, "--objective", "cost"), "requests_per_s"),
    "negative tokens": (("optimize", *SMALL, "--input-tokens", "-5"), "input_tokens"),
    "NaN tokens": (("optimize", *SMALL, "--output-tokens", "nan"), "output_tokens"),
    "infinite tokens": (("optimize", *SMALL, "--input-tokens", "inf"), "input_tokens"),
    "unknown objective": (("optimize", *SMALL, "--objective", "speed"), "throughput"),
    "unknown solver": (("optimize", *SMALL, "--solver", "dp-bean"), "dp-beam"),
    "unknown search": (("optimize", *SMALL, "--solver", "dp-beam", "--search", "deep"), "'paper'"),
    "unknown estimator": (("optimize", *SMALL, "--estimator", "oracle"), "calibrated"),
    "unknown engine": (("optimize", *SMALL, "--engine", "vlmm-0.32"), "vllm-0.32"),
    "unknown format": (("optimize", *SMALL, "--weight-dtype", "int3"), "int3"),
    "zero beam": (("optimize", *SMALL, "--beam-width", "0"), "beam_width"),
    "negative time": (("optimize", *SMALL, "--time-limit", "-1"), "time_limit_s"),
    "NaN time": (("optimize", *SMALL, "--time-limit", "nan"), "time_limit_s"),
    "length beyond the model": (("optimize", *SMALL, "--max-model-len", "500000"), "131,072"),
    "a word for a number": (("optimize", *SMALL, "--beam-width", "wide"), "beam-width"),
    "unknown option": (("optimize", *SMALL, "--fast"), "--fast"),
    "unknown verb": (("optimise", *SMALL), "optimise"),
    "no GPU": (("predict", "llama-3.2-1b"), "gpu"),
    "unknown GPU": (("predict", "llama-3.2-1b", "H1000"), "unknown GPU 'H1000'"),
    "ambiguous GPU": (("predict", "llama-3.2-1b", "A100"), "A100-SXM4-80GB"),
    "a degree that does not divide": (("predict", "llama-3.2-1b", "L4", "--tp", "3"), "valid:"),
    "zero batch": (("predict", "llama-3.2-1b", "L4", "--batch", "0"), "batch"),
    "unknown list": (("catalog", "prices"), "offers"),
    "no plan file": (("verify", "no-such-plan.json"), "no-such-plan.json"),
    "no problem file": (("optimize", "no-such-problem.yaml"), "no-such-problem.yaml"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_are_refused_by_name(run: Run, case: str) -> None:
    arguments, named = BAD_OPTIONS[case]
    code, out, said = run(*arguments)
    assert (code, out) == (BAD_INPUT, "")
    assert named in said


@pytest.mark.parametrize("count", ["²", "①"])
def test_a_count_that_only_looks_like_a_digit_is_refused(run: Run, count: str) -> None:
    assert run("optimize", "--model", "llama-3.2-1b", "--machine", f"g6.xlarge={count}")[0] == BAD_INPUT


def test_a_beam_that_no_memory_holds_is_refused(run: Run) -> None:
    code, _, said = run("optimize", *SMALL, "--beam-width", "1000000000000")
    assert code == BAD_INPUT
    assert "beam_width" in said


def test_nothing_at_all_shows_the_help(run: Run) -> None:
    code, out, said = run()
    assert code == BAD_INPUT
    assert "optimize" in out + said


def test_a_file_and_options_that_contradict_it(run: Run, tmp_path: Path) -> None:
    code, _, said = run("optimize", write_yaml(tmp_path), "--model", "llama-3.1-8b")
    assert code == BAD_INPUT
    assert "--model" in said


BAD_CONFIGS = {
    "not JSON": "{",
    "a list": "[]",
    "empty": "",
    "no layers": json.dumps({k: v for k, v in TINY_LLAMA.items() if k != "num_hidden_layers"}),
    "negative layers": json.dumps(TINY_LLAMA | {"num_hidden_layers": -1}),
    "a word for a size": json.dumps(TINY_LLAMA | {"hidden_size": "large"}),
    "NaN": json.dumps(TINY_LLAMA | {"hidden_size": float("nan")}),
    "no architecture": json.dumps({"hidden_size": 1024}),
    "an unknown architecture": json.dumps(TINY_LLAMA | {"architectures": ["Perceptron"], "model_type": "perceptron"}),
    "nested without end": '{"a":' * 5000,
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_malformed_config_json_is_refused(run: Run, case: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(BAD_CONFIGS[case], encoding="utf-8")
    code, out, said = run("optimize", "--model", path, *MACHINE)
    assert (code, out) == (BAD_INPUT, "")
    assert said.startswith("error: ")
    assert len(said) > len("error: ") + 20


# ---- problem files

BOMB = "a: &a [x, x, x, x]\nb: &b [*a, *a, *a, *a]\nc: &c [*b, *b, *b, *b]\nmodel: *c\n"
BAD_FILES = {
    "a bomb of aliases": (BOMB, "aliases"),
    "not YAML": ("model: [", "line"),
    "not UTF-8": (b"model: \xff\xfe", "UTF-8"),
    "a list": ("- model", "mapping"),
    "empty": ("", "mapping"),
    "code": ("model: !!python/object/apply:os.system ['true']", "line 1"),
    "a key twice": ("model: a\nmodel: b\n", "twice"),
    "too large": ("# " + "x" * 2**20 + "\n", "limit"),
    "NaN": ("model: llama-3.2-1b\nlatency_penalty: .nan\n", "finite"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_problem_file_is_refused(run: Run, case: str, tmp_path: Path) -> None:
    content, named = BAD_FILES[case]
    path = tmp_path / "problem.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, said = run("optimize", path)
    assert (code, out) == (BAD_INPUT, "")
    assert named in said
    assert "problem.yaml" in said


def test_an_unknown_key_of_a_problem_file_names_the_nearest(run: Run, tmp_path: Path) -> None:
    code, _, said = run("optimize", write_yaml(tmp_path, objectiv="cost"))
    assert code == BAD_INPUT
    assert "'objectiv'" in said
    assert "objective" in said


@pytest.mark.parametrize("key", ["model", "cluster", "workload"])
def test_a_missing_key_of_a_problem_file_is_named(run: Run, key: str, tmp_path: Path) -> None:
    path = write_yaml(tmp_path)
    content = yaml.safe_load(path.read_text())
    del content[key]
    path.write_text(yaml.safe_dump(content))
    code, _, said = run("optimize", path)
    assert code == BAD_INPUT
    assert f"'{key}'" in said


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ("instance_type,count,market,region,price_usd_per_hour\ng6.xlarge,1,on_demand,x,nan\n", "price_usd_per_hour"),
        ("instance_type,count,market,region,price_usd_per_hour\ng6.xlarge,1,on_demand,x,-1\n", "price_usd_per_hour"),
        ("instance_type,count,market,region,price_usd_per_hour\ng6.xlarge,1,on_demand,x,cheap\n", "price_usd_per_hour"),
        ("instance_type,count,market,region,price_usd_per_hour\ng6.xlarge,nan,on_demand,x,1\n", "count"),
        ("instance_type,count,market,region,price_usd_per_hour\ng6.xlarge,0,on_demand,x,1\n", "count"),
        ("instance_type,number\ng6.xlarge,1\n", "count"),
    ],
)
def test_a_senseless_number_in_a_table_of_offers_is_refused(run: Run, table: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "offers.csv").write_text(table)
    code, _, said = run("optimize", write_yaml(tmp_path, cluster="offers.csv"))
    assert code == BAD_INPUT
    assert named in said
    assert "offers.csv" in said


@pytest.mark.parametrize("row", ["0,nan,10", "0,10,-1", "nan,10,10", "0,ten,10", "0,10"])
def test_a_senseless_number_in_a_trace_is_refused(run: Run, row: str, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(f"arrival_s,input_tokens,output_tokens\n0,5,5\n{row}\n2,5,5\n")
    code, _, said = run("optimize", write_yaml(tmp_path, workload={"trace": "trace.csv"}))
    assert code == BAD_INPUT
    assert "trace.csv" in said
    assert "line 3" in said


VALUES: list[Any] = [-1, 1.5, "x", ["x"], {"x": 1}, True, None]
KEYS = (
    "model", "cluster", "workload", "slo", "objective", "solver", "solver_options", "estimator", "time_limit_s", "seed",
    "latency_penalty", "engine", "max_model_len", "weight_dtype", "kv_dtype", "gpu_memory_utilization", "max_num_seqs",
    "max_num_batched_tokens", "handover_sequences", "handover_layers",
)  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_no_value_in_a_problem_file_is_our_fault(run: Run, key: str, tmp_path: Path) -> None:
    for value in VALUES:
        quick = {"model": TINY_LLAMA, "max_num_seqs": 8}
        code, _, said = run("optimize", write_yaml(tmp_path, **(quick | {key: value})))
        assert code in (FINE, BAD_INPUT, INFEASIBLE, NO_SOLUTION), f"{key}: {value!r}: {said}"


# ---- launch


def test_a_store_is_launched_with_the_plugin(run: Run, plan_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, said, _ = run("launch", plan_file, "--out", out, "--engine", "hetplan", "--store", "s3://b/model", "--json")
    assert code == FINE
    assert str(out / "pipeline-1-node-0-store.sh") in json.loads(said)["paths"]
    code, _, said = run("launch", plan_file, "--out", tmp_path / "stock", "--store", "s3://b/model")
    assert code == BAD_INPUT
    assert "engine='hetplan'" in said


# ---- no plan


def test_a_model_that_fits_nowhere_states_the_shortfall(run: Run) -> None:
    code, out, said = run("optimize", "--model", "llama-3.1-405b", "--machine", "g6.xlarge=2")
    assert (code, out) == (INFEASIBLE, "")
    assert "llama-3.1-405b needs" in said
    assert "GiB" in said
    assert run("predict", "llama-3.1-405b", "H100")[0] == INFEASIBLE


def test_a_demand_that_nothing_meets(run: Run) -> None:
    code, _, said = run("optimize", *SMALL, "--objective", "cost", "--requests-per-s", "1e6")
    assert code == INFEASIBLE
    assert "1e+06 req/s" in said


def test_a_promise_that_nothing_keeps(run: Run, tmp_path: Path) -> None:
    code, _, said = run("optimize", write_yaml(tmp_path, slo={"tpot_s": 1e-6}))
    assert code == INFEASIBLE
    assert "tpot_s" in said


# ---- plan files


def test_a_plan_file_with_an_unknown_key(run: Run, plan_file: Path) -> None:
    content = json.loads(plan_file.read_text())
    plan_file.write_text(json.dumps(content | {"note": "mine"}))
    for verb in ("verify", "estimate"):
        code, out, said = run(verb, plan_file)
        assert (code, out) == (BAD_INPUT, "")
        assert "note" in said


def test_a_plan_file_of_another_schema(run: Run, plan_file: Path) -> None:
    plan_file.write_text(plan_file.read_text().replace("hetplan.plan/1", "hetplan.plan/0"))
    code, _, said = run("verify", plan_file)
    assert code == BAD_INPUT
    assert "hetplan.plan/0" in said
    assert "Plan again" in said


def test_a_calibration_is_not_a_plan(run: Run, plan_file: Path, tmp_path: Path) -> None:
    plan_file.write_text('{"schema_version": "hetplan.calibration/1"}')
    assert run("diff", plan_file, plan_file)[0] == BAD_INPUT


TAMPERING: dict[str, Callable[[Any], None]] = {
    "throughput": lambda plan: plan.update(requests_per_s=plan["requests_per_s"] * 1.01),
    "price of an offer": lambda plan: plan["problem"]["cluster"]["pools"][0]["offer"].update(price_usd_per_hour=0.1),
    "machines": lambda plan: plan["deployments"][0]["pipelines"][0].update(count=2),
    "a layer lost": lambda plan: plan["deployments"][0]["pipelines"][0]["stages"][0].update(layers=[0, 15]),
    "memory": lambda plan: plan["problem"]["cluster"]["instance_types"][0]["gpu"].update(memory_bytes=10**9),
    "bound": lambda plan: plan.update(bound=plan["objective"], gap=0.0, status="optimal"),
    "a rate of the calibration": lambda plan: plan["problem"]["calibrations"][0]["memory_bytes_per_s"].update(
        value=1e15
    ),
}


@pytest.mark.parametrize("case", TAMPERING)
def test_a_tampered_plan_exits_4_and_names_the_fault(run: Run, case: str, plan_file: Path) -> None:
    content = json.loads(plan_file.read_text())
    TAMPERING[case](content)
    plan_file.write_text(json.dumps(content))
    code, out, said = run("verify", plan_file)
    assert (code, out) == (VIOLATIONS, "")
    assert "violation: " in said
    assert "sound" not in said


# ---- writing


@pytest.mark.parametrize("where", ["missing/plan.json", "."])
def test_a_plan_that_cannot_be_written(run: Run, where: str, tmp_path: Path) -> None:
    code, out, said = run("optimize", *SMALL, "--out", tmp_path / where)
    assert (code, out) == (BAD_INPUT, "")
    assert "cannot write" in said
    assert "--out" in said


def test_names_that_look_like_markup_are_shown_as_they_are(run: Run) -> None:
    code, _, said = run("optimize", "--model", "[bold]llama[/bold]", *MACHINE)
    assert code == BAD_INPUT
    assert "[bold]llama[/bold]" in said


def test_compare_sets_solvers_side_by_side(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "problem.yaml"
    lines = (
        "model: llama-3.2-1b",
        "cluster: {region: us-west-2, machines: {g6.xlarge: 2}}",
        "workload: {input_tokens: 763, output_tokens: 232}",
    )
    file.write_text("\n".join(lines))
    figure = tmp_path / "solvers.png"
    code, out, err = run("compare", file, "--solver", "even", "--solver", "auto", "--figure", figure, "--json")
    document = json.loads(out)
    assert code == FINE
    assert [row["solver"] for row in document["solvers"]] == ["even", "auto"]
    assert document["bound"] == document["solvers"][1]["bound"]
    assert "$/1M tokens" in err
    assert figure.read_bytes().startswith(b"\x89PNG")
    code, _, err = run("compare", file, "--solver", "even", "--figure", tmp_path / "solvers.xyz")
    assert code == BAD_INPUT
    assert "solvers.xyz" in err


@pytest.mark.parametrize("schedule", ["static", "in_flight", "closed_loop"])
def test_predict_answers_each_schedule(run: Run, schedule: str) -> None:
    code, out, _ = run("predict", "llama-3.2-1b", "L40S", "--batch", "16", "--schedule", schedule, "--json")
    assert code == FINE
    assert json.loads(out)["tpot_s"] > 0


def test_predict_refuses_another_schedule(run: Run) -> None:
    code, _, err = run("predict", "llama-3.2-1b", "L40S", "--schedule", "lifo")
    assert code == BAD_INPUT
    assert "'closed_loop', got 'lifo'" in err
