"""Plan files: written and read back without loss, compared, and refused with a reason when they are not plans."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from builders import WORKLOAD, make_cluster, make_machine, make_pool, tiny_llama, verified

import hetplan as hp
from hetplan.solvers.base import solver_names


@pytest.fixture(scope="module")
def plan() -> hp.Plan:
    return verified(hp.optimize(model="llama-3.1-8b", cluster={"g6.xlarge": 2, "g6e.xlarge": 1}, workload=WORKLOAD))


@pytest.fixture
def content(plan: hp.Plan) -> Any:
    return json.loads(plan.to_json())


def write(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


# ---- round trips


@pytest.mark.parametrize("solver", solver_names())
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"slo": hp.Slo(e2e_s=1e6, ttft_s=1e5, hard=False), "latency_penalty": 0.5},
        {"weight_dtype": "fp8", "kv_dtype": "fp8", "max_model_len": 2000, "max_num_seqs": 7},
        {"market": "owned"},
        {"estimator": "paper"},
    ],
    ids=["plain", "slo", "dtypes", "owned", "paper"],
)
def test_a_plan_survives_its_file_byte_by_byte(solver: str, options: dict[str, Any], tmp_path: Path) -> None:
    made = verified(
        hp.optimize(model="llama-3.2-1b", cluster={"g6.xlarge": 1}, workload=WORKLOAD, solver=solver, **options)
    )
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    made.save(first)
    loaded = hp.Plan.load(first)
    loaded.save(second)
    assert loaded == made
    assert first.read_bytes() == second.read_bytes()
    assert str(loaded) == str(made)
    assert hp.verify(loaded) == []


def test_names_beyond_ascii_survive(tmp_path: Path) -> None:
    machine = make_machine("Rechner-Süd 机器")
    cluster = make_cluster((machine, make_pool(machine, region="köln")))
    made = verified(hp.optimize(model=tiny_llama(), cluster=cluster, workload=WORKLOAD))
    made.save(tmp_path / "plan.json")
    assert hp.Plan.load(tmp_path / "plan.json") == made


def test_a_plan_is_plain_data(plan: hp.Plan) -> None:
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert copy.deepcopy(plan) == plan
    assert hp.Plan.from_json(plan.to_json()) == plan
    assert hp.Plan.from_dict(plan.model_dump()) == plan


def test_a_plan_cannot_be_changed_in_place(plan: hp.Plan) -> None:
    with pytest.raises(Exception, match="frozen"):
        plan.objective = 1.0  # type: ignore[misc]


def test_a_plan_file_has_no_clock_no_path_and_no_host(plan: hp.Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    text = path.read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    assert not {"created", "timestamp", "hostname", "elapsed_s"} & set(json.loads(text))
    assert text.endswith("}\n")


def test_the_json_schema_accepts_saved_plans_and_refuses_others(plan: hp.Plan, content: Any) -> None:
    schema = hp.Plan.model_json_schema()
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    validator.validate(content)
    for broken in (
        content | {"unknown": 1},
        content | {"status": "perfect"},
        content | {"schema_version": "hetplan.plan/0"},
        {key: value for key, value in content.items() if key != "deployments"},
    ):
        assert not validator.is_valid(broken)


# ---- what is not a plan


def paths(content: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every object of a document is."""
    found = [where] if isinstance(content, dict) else []
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        found += paths(value, (*where, key))
    return found


# Objects whose keys are data: formats, group sizes, GPU names, parameters of solvers.
OPEN_KEYS = {"parameters", "dense_flops", "compute_flops", "intra_node_links", "calibration_sha256", "shape"}


def test_an_unknown_key_is_refused_wherever_it_stands(content: Any, tmp_path: Path) -> None:
    places = [where for where in paths(content) if not where or where[-1] not in OPEN_KEYS]
    assert len(places) > 20
    for where in places:
        changed = copy.deepcopy(content)
        spot = changed
        for key in where:
            spot = spot[key]
        spot["surprise"] = 1
        with pytest.raises(hp.InvalidInputError, match="surprise"):
            hp.Plan.load(write(tmp_path, changed))


@pytest.mark.parametrize("key", ["problem", "deployments", "status", "objective", "provenance", "routes"])
def test_a_missing_key_is_named(key: str, content: Any, tmp_path: Path) -> None:
    del content[key]
    with pytest.raises(hp.InvalidInputError, match=rf"{key}: missing"):
        hp.Plan.load(write(tmp_path, content))


@pytest.mark.parametrize("version", ["hetplan.plan/0", "hetplan.plan/2", "hetplan.plan/1.1"])
def test_another_schema_is_refused_by_name(version: str, content: Any, tmp_path: Path) -> None:
    with pytest.raises(hp.SchemaVersionError, match=rf"{version}.*reads 'hetplan\.plan/1'"):
        hp.Plan.load(write(tmp_path, content | {"schema_version": version}))


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", "3", '"plan"', "null", '{"schema_version": 1}', '{"schema_version": "hetplan.calibration/1"}'],
)
def test_another_document_is_not_a_plan(content: str, tmp_path: Path) -> None:
    with pytest.raises(hp.InvalidInputError, match="not a plan"):
        hp.Plan.load(write(tmp_path, content))


@pytest.mark.parametrize("content", ["", "{", "plan: yes", "{'a': 1}", '{"a": 1} {"b": 2}', "[" * 100_000])
def test_what_is_not_json_is_refused(content: str, tmp_path: Path) -> None:
    with pytest.raises(hp.InvalidInputError, match="not a readable plan file"):
        hp.Plan.load(write(tmp_path, content))


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(hp.InvalidInputError, match="not a readable plan file"):
        hp.Plan.load(path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("key", ["objective", "requests_per_s", "bound", "cost_usd_per_hour"])
def test_a_number_is_finite(key: str, number: str, content: Any, tmp_path: Path) -> None:
    text = json.dumps(content | {key: "@"}).replace('"@"', number)
    with pytest.raises(hp.InvalidInputError):
        hp.Plan.load(write(tmp_path, text))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("objective", "much"), ("status", "perfect"), ("deployments", []), ("gap", -0.1), ("objective", None),
        ("routes", [{"query_type": "default", "deployment": 3, "fraction": 1.0}]),
        ("routes", [{"query_type": "default", "deployment": 0, "fraction": 1.5}]),
    ],
)  # fmt: skip
def test_a_bad_value_is_named(key: str, value: Any, content: Any, tmp_path: Path) -> None:
    with pytest.raises(hp.InvalidInputError, match=f"(?i){key.removesuffix('s')}"):
        hp.Plan.load(write(tmp_path, content | {key: value}))


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(hp.InvalidInputError, match=r"65\.0 MiB.*at most 64\.0 MiB"):
        hp.Plan.load(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(hp.InvalidInputError, match=r"no\.json"):
        hp.Plan.load(tmp_path / "no.json")
    with pytest.raises(hp.InvalidInputError, match=tmp_path.name):
        hp.Plan.load(tmp_path)


# ---- differences


def plan_of(counts: dict[str, int], **options: Any) -> hp.Plan:
    return verified(hp.optimize(model="llama-3.2-1b", cluster=counts, workload=WORKLOAD, solver="dp-beam", **options))


def test_a_plan_does_not_differ_from_itself(plan: hp.Plan) -> None:
    change = plan.diff(plan)
    assert (change.removed, change.added) == ((), ())
    assert len(change.kept) == len(plan.deployments[0].pipelines)
    assert (change.requests_per_s_change, change.cost_usd_per_hour_change) == (0, 0)


def test_one_more_machine_shows_in_pipelines_and_money() -> None:
    two, three = plan_of({"g6.xlarge": 2}), plan_of({"g6.xlarge": 3})
    change = two.diff(three)
    assert change.removed == ()
    assert change.kept[0].startswith("2 x ")
    assert change.added[0].startswith("1 x ")
    assert change.cost_usd_per_hour_change == pytest.approx(three.cost_usd_per_hour / 3)
    assert change.requests_per_s_change == pytest.approx(three.requests_per_s - two.requests_per_s)


def test_the_way_back_is_the_opposite(plan: hp.Plan) -> None:
    other = plan_of({"g6.xlarge": 1})
    there, back = plan.diff(other), other.diff(plan)
    assert (there.removed, there.added, there.kept) == (back.added, back.removed, back.kept)
    assert there.cost_usd_per_hour_change == -back.cost_usd_per_hour_change
    assert "req/s" in str(there)
    assert all(line[:2] in ("- ", "+ ", "  ") or "$/h" in line for line in str(there).splitlines())


def test_the_same_shape_in_another_market_is_another_pipeline() -> None:
    on_demand, spot = plan_of({"g6.xlarge": 1}), plan_of({"g6.xlarge": 1}, market="spot")
    change = on_demand.diff(spot)
    assert len(change.removed) == len(change.added) == 1
    assert change.cost_usd_per_hour_change < 0


def test_a_plan_reads_as_text(plan: hp.Plan) -> None:
    text = str(plan)
    assert "llama-3.1-8b" in text
    assert f"{plan.requests_per_s:.3f} req/s" in text
    assert plan.status in text
    for pipeline in plan.deployments[0].pipelines:
        assert pipeline.predictions.requests_per_s.source in text
        for stage in pipeline.stages:
            assert stage.instance_type in text
