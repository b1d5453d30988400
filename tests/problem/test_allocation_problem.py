"""Allocation problems from the catalogue, from tables and from files."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import hetplan as hp
from hetplan.catalog.clusters import cluster_from_dict
from hetplan.estimator.allocation import estimate_replica
from hetplan.problem.allocation import Configuration, Decisions
from hetplan.problem.files import read_problem_file

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "allocation" / "three-models-six-types.yaml"
MODELS = ["llama-3.2-1b", "llama-3.1-8b"]
CHAT: dict[str, Any] = {
    "name": "chat",
    "input_tokens": 400,
    "output_tokens": 200,
    "requests_per_hour": 3000,
    "delay_limit_s": 30,
    "error_limit": 0.05,
    "delay_usd_per_ms": 1e-4,
    "unserved_usd": 500,
    "errors": {"llama-3.2-1b": 0.12, "llama-3.1-8b": 0.04},
}
SUMMARY = CHAT | {"name": "summary", "input_tokens": 3000, "output_tokens": 150, "requests_per_hour": 500}


def catalogued(**changes: Any) -> hp.AllocationProblem:
    arguments: dict[str, Any] = {
        "query_types": [CHAT, SUMMARY],
        "models": MODELS,
        "cluster": {"g6.xlarge": 4, "g6e.12xlarge": 2},
        "budget_usd": 500,
    }
    return hp.AllocationProblem.from_catalog(**(arguments | changes))


# ---- from the catalogue


def test_models_and_tiers_carry_their_catalogue_entries() -> None:
    problem = catalogued()
    spec = hp.ModelSpec.get("llama-3.1-8b")
    model, tier = problem.models[1], problem.tiers[1]
    assert model.spec == spec
    assert model.weight_gb == pytest.approx(2 * spec.parameter_count / 1e9)
    assert model.kv_bytes_per_token == spec.kv_bytes_per_token()
    assert model.gflop_per_token == pytest.approx(2 * spec.active_parameter_count / 1e9)
    assert model.layers == spec.layer_count
    assert tier.instance_type is not None
    assert tier.offer is not None
    assert tier.instance_type.name == tier.offer.instance_type == "g6e.12xlarge"
    assert 4 * tier.usd_per_hour == pytest.approx(tier.offer.billed_usd_per_hour)
    assert problem.query_types[0].errors == (0.12, 0.04)


def test_whole_machines_are_rented() -> None:
    problem = catalogued(tensor_parallel=(1, 2, 4), pipeline_parallel=(1, 2, 3))
    seen = set()
    for one in problem.configurations:
        tier = problem.tiers[one.tier]
        assert tier.instance_type is not None
        assert tier.offer is not None
        assert one.machines == -(-one.tensor_parallel * one.pipeline_parallel // tier.instance_type.gpu_count)
        assert one.usd_per_hour == pytest.approx(one.machines * tier.offer.billed_usd_per_hour)
        assert one.tensor_parallel <= tier.instance_type.gpu_count
        seen.add((one.tier, one.machines))
    # Three single-GPU machines in a row; and two of four GPUs, but never three of which there are two.
    assert {(0, 3), (1, 2)} <= seen
    assert (1, 3) not in seen


def test_capacity_is_what_predict_gives_at_the_utilisation() -> None:
    problem = catalogued(utilization=0.6)
    for one in problem.configurations:
        tier = problem.tiers[one.tier]
        assert tier.instance_type is not None
        for i, query in enumerate(problem.query_types):
            asked = partial(
                hp.predict,
                problem.models[one.model].name,
                tier.gpu,
                instance_type=tier.instance_type,
                tensor_parallel=one.tensor_parallel,
                pipeline_parallel=one.pipeline_parallel,
                input_tokens=query.input_tokens,
                output_tokens=query.output_tokens,
                schedule="in_flight",
            )
            full = asked(batch=asked(batch=1).max_batch)
            per_hour = 3600 * full.output_tokens_per_s / query.output_tokens
            assert one.capacity_per_hour[i] == pytest.approx(0.6 * per_hour, rel=1e-6)


def test_delay_is_service_at_the_implied_batch_and_the_wait() -> None:
    (one, *_) = (p := catalogued(models=["llama-3.1-8b"], query_types=[only(CHAT)], utilization=0.7)).configurations
    tier = p.tiers[one.tier]
    many = hp.predict_many(
        "llama-3.1-8b", tier.gpu, instance_type=tier.instance_type, batch=np.arange(1, 400), input_tokens=400,
        output_tokens=200, schedule="in_flight",
    )  # fmt: skip
    per_s = one.capacity_per_hour[0] / 3600
    rates = many["output_tokens_per_s"] / 200
    at = int(np.argmax(rates >= per_s))
    wait = 0.7 / 0.3 / (per_s / 0.7)
    low, high = many["latency_s"][at - 1], many["latency_s"][at]
    # Between the batches on either side of the one that keeps up, as far apart as those that were tried.
    assert 0.97 * low <= one.delay_s[0] - wait <= 1.03 * high
    assert one.ttft_s[0] > wait


def only(query: dict[str, Any], model: str = "llama-3.1-8b") -> dict[str, Any]:
    return query | {"errors": {model: query["errors"][model]}}


@pytest.mark.parametrize("name", ["delay_s", "ttft_s", "capacity_per_hour"])
def test_busier_replicas_are_slower_and_serve_more(name: str) -> None:
    lows, highs = catalogued(utilization=0.4), catalogued(utilization=0.9)
    for low, high in zip(lows.configurations, highs.configurations, strict=True):
        assert all(a <= b * (1 + 1e-9) for a, b in zip(getattr(low, name), getattr(high, name), strict=True))


def test_slowness_multiplies_delays_alone() -> None:
    plain = catalogued().configurations[0]
    slow = catalogued(query_types=[CHAT | {"slowness": 1.5}, SUMMARY]).configurations[0]
    assert slow.delay_s[0] == pytest.approx(1.5 * plain.delay_s[0])
    assert slow.ttft_s[0] == pytest.approx(1.5 * plain.ttft_s[0])
    assert slow.delay_s[1] == plain.delay_s[1]
    assert slow.capacity_per_hour == plain.capacity_per_hour


def test_what_does_not_fit_is_left_out() -> None:
    query = CHAT | {"errors": {"llama-3.1-70b": 0.01, "llama-3.2-1b": 0.1}}
    problem = catalogued(models=["llama-3.1-70b", "llama-3.2-1b"], query_types=[query])
    assert {(c.model, c.tier) for c in problem.configurations} == {(0, 1), (1, 0), (1, 1)}
    # 141 GB of weights need more than two of the 48 GB GPUs.
    assert all(c.tensor_parallel * c.pipeline_parallel >= 4 for c in problem.configurations if c.model == 0)


def test_nothing_fits() -> None:
    query = CHAT | {"errors": {"llama-3.1-405b": 0.01}}
    with pytest.raises(hp.InfeasibleError, match=r"llama-3\.1-405b, has 75\d\.\d GiB") as caught:
        catalogued(models=["llama-3.1-405b"], query_types=[query])
    (reason,) = caught.value.reasons
    assert reason.needed > reason.available


def test_an_own_estimator_is_asked() -> None:
    def estimator(model: hp.ModelSpec, machine: hp.InstanceType, *, tensor_parallel: int, **asked: Any) -> Any:
        if tensor_parallel > 1:
            return None
        some = np.ones_like(asked["input_tokens"])
        return 2 * some, some, 1000 * some

    problem = catalogued(estimator=estimator, utilization=0.5)
    assert {c.tensor_parallel for c in problem.configurations} == {1}
    assert {c.delay_s for c in problem.configurations} == {(2.0, 2.0)}
    assert {c.capacity_per_hour for c in problem.configurations} == {(500.0, 500.0)}


def test_the_default_estimator_takes_an_engine() -> None:
    plain = catalogued()
    vllm = catalogued(estimator=partial(estimate_replica, engine="vllm"))
    assert [c.delay_s for c in plain.configurations] != [c.delay_s for c in vllm.configurations]


def test_the_paper_estimator_answers_too() -> None:
    problem = catalogued(estimator=partial(estimate_replica, estimator="paper"))
    assert problem.configurations


def test_own_machines_and_several_offers_of_one() -> None:
    own = {"instance_type": "g6.xlarge", "count": 2, "market": "owned", "region": "lab", "price_usd_per_hour": 0.2}
    spot = {
        "instance_type": "g6.xlarge",
        "count": 2,
        "market": "spot",
        "region": "us-west-2",
        "price_usd_per_hour": 0.3,
    }
    problem = catalogued(cluster=cluster_from_dict({"offers": [own, spot]}))
    assert [tier.name for tier in problem.tiers] == ["aws/lab/g6.xlarge/owned", "aws/us-west-2/g6.xlarge/spot"]
    plan = hp.optimize(problem, solver="milp")
    assert hp.verify(plan) == []
    assert {p.nodes[0] for d in plan.deployments for p in d.pipelines} <= {tier.name for tier in problem.tiers}


def test_stages_of_a_plan_stand_whole_on_their_machines() -> None:
    given = catalogued(tensor_parallel=(4,), pipeline_parallel=(2,), cluster={"g6e.12xlarge": 2}, budget_usd=900)
    plan = hp.optimize(given, solver="milp")
    assert hp.verify(plan) == []
    for stage, node in zip(plan.deployments[0].pipelines[0].stages, (0, 1), strict=True):
        assert stage.node == node
        assert stage.gpu_indices == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"query_types": [{k: v for k, v in CHAT.items() if k != "errors"}]}, "'chat' has no errors"),
        ({"query_types": [CHAT | {"errors": {"llama-3.1-8b": 0.1}}]}, "errors lacks llama-3.2-1b"),
        ({"query_types": [CHAT | {"errors": {**CHAT["errors"], "llama-3.1-9b": 0.1}}]}, r"Nearest: llama-3\.1-8b"),
        ({"query_types": []}, "query_types is empty"),
        ({"query_types": [CHAT | {"input_tokens": -1}]}, "input_tokens"),
        ({"query_types": ["chat"]}, r"query_types\[0\] is a mapping"),
        ({"models": []}, "models is a list"),
        ({"models": "llama-3.1-8b"}, "models is a list"),
        ({"models": ["llama-3.1-71b"]}, "llama-3.1-70b"),
        ({"utilization": 1.0}, "utilization is 1.0"),
        ({"cluster": {"offers": [{"instance_type": "g6.xlarge", "count": 1, "market": "owned"}]}}, "has no price"),
        ({"cluster": 3}, "cluster is a mapping"),
        ({"budget_usd": 0}, "budget_usd"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(hp.InvalidInputError, match=said):
        catalogued(**changes)


def test_a_model_without_a_spec_is_refused() -> None:
    bare = catalogued().models[0].replace(spec=None)
    with pytest.raises(hp.InvalidInputError, match="has no spec"):
        catalogued(models=[bare])


def test_a_replica_must_fit_its_machines() -> None:
    problem = catalogued()
    big = next(c for c in problem.configurations if c.tensor_parallel == 4)
    with pytest.raises(hp.InvalidInputError, match="a group stays in one machine"):
        problem.replace(configurations=(big.replace(pipeline_parallel=3, machines=2),))


# ---- tables

TABLES = {
    "models.csv": (
        "name,weight_gb,kv_bytes_per_token,gflop_per_token,layers\nsmall,2,32768,2,16\nlarge,16,131072,16,32\n"
    ),
    "query_types.csv": (
        "name,input_tokens,output_tokens,requests_per_hour,delay_limit_s,error_limit,delay_usd_per_ms,unserved_usd,"
        "slowness,errors:small,errors:large\n"
        "chat,400,200,3000,6,0.05,1e-4,500,,0.12,0.04\n"
        "code,256,512,1000,12,0.06,2e-4,700,1.1,0.1,0.03\n"
    ),
    "tiers.csv": (
        "name,gpu,memory_gb,bandwidth_gb_per_s,tflops,usd_per_hour,weight_dtype,weight_scale,error_factor\n"
        "a100,A100,80,2039,312,1.6,,,\n"
        "l4 int8,L4,24,300,120,0.3,int8,0.5,1.15\n"
    ),
}
CONFIGURATIONS = (
    "model,tier,tensor_parallel,pipeline_parallel,machines,usd_per_hour,delay_s:chat,delay_s:code,ttft_s:chat,"
    "ttft_s:code,capacity_per_hour:chat,capacity_per_hour:code\n"
    "large,a100,1,1,1,1.6,3,6,0.2,0.3,4000,2000\n"
    "small,l4 int8,1,1,1,0.3,4,7,0.2,0.3,3000,1500\n"
)


def write_tables(folder: Path, **changed: str) -> Path:
    for name, text in (TABLES | {f"{k}.csv": v for k, v in changed.items()}).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_tables_are_read(tmp_path: Path) -> None:
    problem = hp.AllocationProblem.from_tables(write_tables(tmp_path), budget_usd=100, utilization=0.8)
    assert [q.errors for q in problem.query_types] == [(0.12, 0.04), (0.1, 0.03)]
    assert [q.slowness for q in problem.query_types] == [1.0, 1.1]
    assert problem.tiers[1].weight_scale == 0.5
    assert problem.models[1].layers == 32
    assert (problem.budget_usd, problem.utilization, problem.configurations) == (100, 0.8, ())
    plan = hp.optimize(problem, solver="milp")
    assert hp.verify(plan) == []


def test_a_table_of_configurations(tmp_path: Path) -> None:
    problem = hp.AllocationProblem.from_tables(write_tables(tmp_path, configurations=CONFIGURATIONS), budget_usd=100)
    assert problem.configurations[1] == Configuration(
        model=0, tier=1, tensor_parallel=1, pipeline_parallel=1, machines=1, usd_per_hour=0.3, delay_s=(4, 7),
        ttft_s=(0.2, 0.3), capacity_per_hour=(3000, 1500),
    )  # fmt: skip
    plan = hp.optimize(problem, solver="milp")
    assert hp.verify(plan) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("models", "large,16,", "large,-16,", r"models\.csv, line 3, column weight_gb: .*greater than 0"),
        ("models", "large,16,", "large,many,", r"models\.csv, line 3, column weight_gb: .*'many'"),
        ("models", "large,16,", "large,,", r"models\.csv, line 3, column weight_gb: missing"),
        ("models", "large,16,", "large,nan,", r"models\.csv, line 3, column weight_gb: .*finite"),
        ("models", "large,16,", "small,16,", r"models\.csv, line 3, column name: 'small' is in line 2"),
        ("models", "layers", "depth", r"models\.csv, line 1: unknown column 'depth'"),
        ("query_types", ",0.12,", ",x,", r"query_types\.csv, line 2, column errors:small: .*'x'"),
        ("query_types", "errors:small", "errors:tiny", r"query_types\.csv, line 1: no column 'errors:small'"),
        ("query_types", "chat,400", "chat,400,1", r"query_types\.csv, line 2: 12 values for 11 columns"),
        ("tiers", "int8,0.5", "int9,0.5", r"tiers\.csv, line 3, column weight_dtype: "),
        ("configurations", "large,a100", "huge,a100", r"configurations\.csv, line 2, column model: no model 'huge'"),
        ("configurations", "0.3,4,7", "0.3,0,7", r"configurations\.csv, line 3, column delay_s:chat: "),
        ("configurations", "large,a100,1,", "large,a100,1.5,", r"line 2, column tensor_parallel: "),
    ],
)
def test_faults_in_tables_name_file_line_and_column(tmp_path: Path, name: str, old: str, new: str, said: str) -> None:
    text = CONFIGURATIONS if name == "configurations" else TABLES[f"{name}.csv"]
    assert old in text
    with pytest.raises(hp.InvalidInputError, match=said):
        hp.AllocationProblem.from_tables(write_tables(tmp_path, **{name: text.replace(old, new)}), budget_usd=100)


def test_missing_and_empty_tables(tmp_path: Path) -> None:
    with pytest.raises(hp.InvalidInputError, match=r"models\.csv: cannot be read"):
        hp.AllocationProblem.from_tables(tmp_path, budget_usd=100)
    write_tables(tmp_path, tiers=TABLES["tiers.csv"].splitlines()[0] + "\n")
    with pytest.raises(hp.InvalidInputError, match=r"tiers\.csv: no rows"):
        hp.AllocationProblem.from_tables(tmp_path, budget_usd=100)


def test_unknown_fields_beside_tables(tmp_path: Path) -> None:
    with pytest.raises(hp.InvalidInputError, match="Nearest: utilization"):
        hp.AllocationProblem.from_tables(write_tables(tmp_path), budget_usd=100, utilisation=0.8)


def test_tables_of_a_canonical_instance_give_it_back(tmp_path: Path) -> None:
    problem = hp.AllocationProblem.canonical(query_types=7, models=4, tiers=5, seed=3)
    for name, records in (("models", problem.models), ("tiers", problem.tiers), ("query_types", problem.query_types)):
        rows = [r.model_dump(exclude={"spec", "instance_type", "offer", "errors"}, exclude_none=True) for r in records]
        for row, record in zip(rows, records, strict=True):
            if name == "query_types":
                row |= {f"errors:{m.name}": e for m, e in zip(problem.models, record.errors, strict=True)}
        with (tmp_path / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    rest = {
        name: getattr(problem, name)
        for name in ("budget_usd", "storage_capacity_gb", "storage_usd_per_gb_hour", "pipeline_parallel", "utilization")
    }
    assert hp.AllocationProblem.from_tables(tmp_path, **rest) == problem


# ---- one document


@pytest.mark.parametrize("ending", ["json", "yaml", "yml"])
@pytest.mark.parametrize("decisions", ["default", "paper"])
def test_saved_problems_are_the_same(tmp_path: Path, ending: str, decisions: Any) -> None:
    path = tmp_path / f"problem.{ending}"
    for problem in (
        hp.AllocationProblem.canonical(query_types=8, models=5, tiers=12, seed=1, decisions=decisions),
        catalogued(decisions=decisions),
    ):
        problem.save(path)
        assert hp.AllocationProblem.load(path) == problem
        assert read_problem_file(path) == {"problem": problem}


def test_saving_elsewhere_is_refused(tmp_path: Path) -> None:
    problem = hp.AllocationProblem.canonical()
    with pytest.raises(hp.InvalidInputError, match=r"\.json, \.yaml or \.yml"):
        problem.save(tmp_path / "problem.txt")
    with pytest.raises(hp.InvalidInputError, match="cannot be written"):
        problem.save(tmp_path / "nowhere" / "problem.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"kind": "placement"}', "kind is 'placement'"),
        ('{"kind": "allocation", "kind": "allocation"}', "given twice"),
        ('{"budget_usd": NaN}', "NaN is not a finite number"),
        ("[1]", "top level"),
        ("{", "not readable JSON"),
        ('{"budget_usd": 1}', r"problem\.json: AllocationProblem\.query_types: missing"),
    ],
)
def test_unreadable_documents(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "problem.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(hp.InvalidInputError, match=said):
        hp.AllocationProblem.load(path)


def test_the_example_is_what_from_catalog_makes() -> None:
    arguments = read_problem_file(EXAMPLE)
    given = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    assert arguments["solver"] == given.pop("solver")
    given.pop("kind")
    cluster = given.pop("cluster")
    made = hp.AllocationProblem.from_catalog(cluster=cluster["machines"], **given)
    assert arguments["problem"] == made


def problem_file(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "problem.yaml"
    path.write_text(yaml.safe_dump({"kind": "allocation"} | content), encoding="utf-8")
    return path


def test_a_problem_file_names_tables(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    write_tables(tmp_path / "tables")
    path = problem_file(tmp_path, {"tables": "tables", "budget_usd": 90, "decisions": "paper", "seed": 4})
    found = read_problem_file(path)
    assert found["seed"] == 4
    assert found["problem"] == hp.AllocationProblem.from_tables(tmp_path / "tables", budget_usd=90, decisions="paper")


def test_decisions_by_option_in_a_problem_file(tmp_path: Path) -> None:
    content = {
        "models": MODELS, "query_types": [CHAT], "cluster": {"g6.xlarge": 2}, "budget_usd": 90,
        "decisions": {"replicas": "one"},
    }  # fmt: skip
    found = read_problem_file(problem_file(tmp_path, content))["problem"]
    assert found.decisions == Decisions(replicas="one")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"cluster": {"g6.xlarge": 2}, "models": MODELS, "query_types": [CHAT]}, r"problem\.yaml: no 'budget_usd'"),
        (
            {"cluster": {"g6.xlarge": 2}, "models": MODELS, "query_types": [CHAT], "budget_usd": 9, "budged": 1},
            "Nearest: budget_usd",
        ),
        ({"cluster": {"g6.xlarge": 2}, "models": MODELS, "query_types": {}, "budget_usd": 9}, "query_types is a list"),
        ({"tables": 3, "budget_usd": 9}, "tables is the path"),
        ({"tables": "none", "budget_usd": 9}, r"models\.csv: cannot be read"),
        ({"budget_usd": 9}, r"problem\.yaml: AllocationProblem\.query_types: missing"),
    ],
)
def test_faulty_problem_files(tmp_path: Path, content: dict[str, Any], said: str) -> None:
    with pytest.raises(hp.InvalidInputError, match=said):
        read_problem_file(problem_file(tmp_path, content))
