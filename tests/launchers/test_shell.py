"""Launch folders: golden files for eight plans, limits refused by name, and hostile names that reach no shell."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import hetplan as hp
from hetplan.catalog.engines import get_engine
from hetplan.launchers.limits import EngineLimitError
from hetplan.launchers.names import argument, comment, node_name
from hetplan.launchers.shell import shell_files
from hetplan.launchers.stores import shard_source
from hetplan.launchers.vllm import cache_sharing

GOLDEN = Path(__file__).parent / "golden"
WORKLOAD = hp.Workload(input_tokens=763, output_tokens=232)
ENGINE = "vllm-0.32"

PLANS: dict[str, dict[str, object]] = {
    "single-node": {"model": "llama-3.1-8b", "cluster": {"g6.xlarge": 1}},
    "multi-node": {"model": "llama-3.1-70b", "cluster": {"g6.12xlarge": 3, "g5.12xlarge": 2, "g6e.xlarge": 4}},
    # Two models stand side by side as two folders, on ports of their own.
    "two-models": {"model": "qwen3-8b", "cluster": {"g6.12xlarge": 1}},
    "moe": {"model": "mixtral-8x7b", "cluster": {"g6e.12xlarge": 1}},
    "fp8": {"model": "llama-3.1-70b", "cluster": {"g6e.12xlarge": 1}, "weight_dtype": "fp8", "kv_dtype": "fp8"},
    "long-context": {"model": "llama-3.1-8b", "cluster": {"g6e.12xlarge": 1}, "max_model_len": 131_072},
    "mixed-degrees": {"model": "qwen2.5-32b", "cluster": {"g6e.xlarge": 1, "g5.12xlarge": 1}, "engine": "hetplan"},
    "store": {
        "model": "qwen2.5-32b", "cluster": {"g6e.xlarge": 1, "g5.12xlarge": 1}, "engine": "hetplan",
        "max_model_len": 1024, "handover_sequences": 1,
    },
}  # fmt: skip
STORES = {"store": "s3://shards/qwen2.5-32b"}


@cache
def plan_of(name: str) -> hp.Plan:
    return hp.optimize(**({"workload": WORKLOAD, "engine": ENGINE} | PLANS[name]))  # type: ignore[arg-type]


def files_of(name: str) -> dict[str, str]:
    plan = plan_of(name)
    engine = plan.placement.engine
    assert engine is not None
    source = shard_source(STORES.get(name), engine)
    return shell_files(plan, engine, first_port=9000 if name == "two-models" else 8000, source=source)


@pytest.mark.parametrize("name", PLANS)
def test_files_are_those_of_the_golden_folder(name: str) -> None:
    """Regenerate with HETPLAN_GOLDEN=1 and read the difference. plan.json changes with every figure and is left out."""
    files = files_of(name)
    files.pop("plan.json")
    folder = GOLDEN / name
    if os.environ.get("HETPLAN_GOLDEN") == "1":
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == files


@pytest.mark.parametrize("name", PLANS)
def test_flags_and_variables_are_the_engines(name: str) -> None:
    engine = plan_of(name).placement.engine
    assert engine is not None
    for file, text in files_of(name).items():
        if not file.startswith("pipeline-") or file.endswith("-store.sh"):
            continue
        flags = {line.split("=")[0].strip().strip("'") for line in text.splitlines() if line.startswith("  --")}
        assert flags <= set(engine.flags)
        exported = {line.split()[1].split("=")[0] for line in text.splitlines() if line.startswith("export ")}
        assert exported <= set(engine.variables)


def test_a_partition_sums_to_the_layers_on_every_node() -> None:
    plan = plan_of("multi-node")
    for file, text in shell_files(plan, get_engine(ENGINE)).items():
        for line in text.splitlines():
            if line.startswith("export VLLM_PP_LAYER_PARTITION="):
                assert sum(map(int, line.partition("=")[2].split(","))) == plan.problem.model.layer_count, file


def test_the_length_that_is_asked_for_fits_the_cache_that_is_set() -> None:
    plan = plan_of("long-context")
    (pipeline,) = plan.deployments[0].pipelines[:1]
    model, degree = plan.problem.model, pipeline.stages[0].tensor_parallel
    for stage in pipeline.stages:
        share = stage.layer_count / model.layer_count
        assert stage.kv_cache_bytes >= pipeline.max_model_len * model.kv_bytes_per_token(degree) * share


def test_different_degrees_are_refused_by_the_limit_s_name(tmp_path: Path) -> None:
    free = hp.optimize(workload=WORKLOAD, **PLANS["multi-node"])  # type: ignore[arg-type]
    degrees = {stage.tensor_parallel for p in free.deployments[0].pipelines for stage in p.stages}
    assert len(degrees) > 1
    with pytest.raises(EngineLimitError, match=r"one-tensor-parallel-degree.*launch with engine='hetplan'") as refusal:
        hp.launch(free, out=tmp_path / "out", engine=ENGINE)
    assert refusal.value.limit == "one-tensor-parallel-degree"
    assert not (tmp_path / "out").exists()
    assert hp.launch(free, out=tmp_path / "out", engine="hetplan", dry_run=True)


def test_an_engines_plan_launches_and_costs_no_more_than_it_must(tmp_path: Path) -> None:
    free = hp.optimize(workload=WORKLOAD, **PLANS["multi-node"])  # type: ignore[arg-type]
    bound = plan_of("multi-node")
    assert bound.objective > 0.5 * free.objective
    paths = hp.launch(bound, out=tmp_path / "out")
    assert {path.name for path in paths} >= {"plan.json", "README.md", "router.json", "wait-ready.sh"}
    assert hp.Plan.load(tmp_path / "out" / "plan.json") == bound
    for path in paths:
        assert bool(path.stat().st_mode & stat.S_IXUSR) == (path.suffix == ".sh")


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(hp.InvalidInputError, match="not an empty folder"):
        hp.launch(plan_of("single-node"), out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    paths = hp.launch(plan_of("single-node"), out=tmp_path / "out", dry_run=True)
    assert paths
    assert not (tmp_path / "out").exists()


def test_an_unsound_plan_is_not_launched(tmp_path: Path) -> None:
    plan = plan_of("single-node")
    with pytest.raises(hp.InvalidInputError, match="not sound"):
        hp.launch(plan.model_copy(update={"objective": plan.objective * 2}), out=tmp_path / "out")


# ---- hostile names

STAND_IN = """#!/usr/bin/env bash
printf '%s\\0' "$@" > "$RECORD"
"""

hostile = st.one_of(
    st.text(min_size=1, max_size=40),
    st.text(alphabet="$`'\"\\;|&<>(){}[]*?!#~ \n\t-=", min_size=1, max_size=40),
    st.sampled_from(
        ["$(touch pwned)", "`touch pwned`", "'; touch pwned; '", '"; touch pwned; "', "a\ntouch pwned", "--help",
         "../../x", "${HOME}", "a b", "x' 'y", "\\", "*", "~", "!!", "é", "a\x00b", "a\x1b[31mb", "}", "a}b",
         "$((1+1))"]
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def sound() -> hp.Plan:
    return plan_of("single-node")


def renamed(plan: hp.Plan, model: str, machine: str) -> hp.Plan:
    """The plan as if a config, a prices file or a plan file had called its model, machine and offer so."""
    problem = plan.problem
    types = tuple(t.model_copy(update={"name": machine}) for t in problem.cluster.instance_types)
    cluster = problem.cluster.model_copy(update={"instance_types": types})
    new = problem.model.model_copy(update={"name": model})
    (deployment,) = plan.deployments
    pipelines = tuple(
        p.model_copy(
            update={
                "nodes": (machine,) * len(p.nodes),
                "stages": tuple(s.model_copy(update={"instance_type": machine}) for s in p.stages),
            }
        )
        for p in deployment.pipelines
    )
    return plan.model_copy(
        update={
            "problem": problem.model_copy(update={"model": new, "cluster": cluster}),
            "deployments": (deployment.model_copy(update={"pipelines": pipelines}),),
        }
    )


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=hostile, source=hostile, machine=hostile)
@example(name="a'b", source="c'}d", machine="e\ntouch pwned")
@example(name="a", source="b", machine="$(touch pwned)")
def test_no_name_reaches_a_shell_unquoted(
    name: str, source: str, machine: str, sound: hp.Plan, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A stand-in for the engine gets each name as one argument, and nothing else happens."""
    plan = renamed(sound, name, machine)
    try:
        files = shell_files(plan, get_engine(ENGINE), model=source)
    except hp.InvalidInputError:
        bad = [
            text
            for text in (name, source, machine)
            if not text.isprintable() or text.startswith("-") or len(text) > 512
        ]
        assert bad
        return
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "run.sh").write_text(files["pipeline-1-node-0.sh"], encoding="utf-8")
    (folder / "engine").write_text(STAND_IN)
    (folder / "engine").chmod(0o755)
    environment = {
        "PATH": os.environ["PATH"],
        "HETPLAN_VLLM": str(folder / "engine"),
        "HETPLAN_PIPELINE_1_NODE_0": "10.0.0.1",
        "RECORD": str(folder / "record"),
        "LC_ALL": "C.UTF-8",
    }
    subprocess.run(["bash", "run.sh"], cwd=folder, env=environment, check=True, capture_output=True, timeout=20)
    given_arguments = (folder / "record").read_bytes().decode().split("\0")[:-1]
    assert given_arguments[:2] == ["serve", source]
    assert f"--served-model-name={name}" in given_arguments
    assert {path.name for path in folder.iterdir()} == {"run.sh", "engine", "record"}


@given(hostile)
def test_names_are_passed_whole_or_refused(text: str) -> None:
    try:
        assert argument(text, "name") == text
    except hp.InvalidInputError:
        assert text.startswith("-") or not text.isprintable()
    try:
        assert "/" not in node_name(text)
    except hp.InvalidInputError:
        assert text.startswith("-") or not text.isprintable() or "/" in text or "\\" in text
    assert comment(text).isprintable()


def one_gpu_plan(max_num_batched_tokens: int) -> hp.Plan:
    """Prompts of up to 4,096 tokens."""
    return hp.optimize(
        model="llama-3.2-1b",
        cluster={"g6.xlarge": 1},
        workload=WORKLOAD,
        engine=ENGINE,
        solver="even",
        max_model_len=4096,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def test_engines_that_share_caches_are_told_so() -> None:
    """The folder's name reaches vLLM as it is, through shell and JSON."""
    plan, engine = one_gpu_plan(4096), get_engine(ENGINE)
    name = '/mnt/o\'brien "$HOME" ü'
    script = shell_files(plan, engine, sharing=cache_sharing("ExampleConnector", name))["pipeline-1-node-0.sh"]
    argument_line = next(line for line in script.splitlines() if "--kv-transfer-config=" in line)
    (word,) = shlex.split(argument_line)
    settings = json.loads(word.removeprefix("--kv-transfer-config="))
    assert settings["kv_connector_extra_config"] == {"shared_storage_path": name}
    assert "  --no-enable-chunked-prefill" in script.splitlines()
    script = shell_files(plan, engine, sharing=cache_sharing("NixlConnector", None))["pipeline-1-node-0.sh"]
    assert '"kv_load_failure_policy": "recompute"' in script
    assert 'export VLLM_NIXL_SIDE_CHANNEL_HOST="$HETPLAN_PIPELINE_1_NODE_0"' in script
    assert "export VLLM_NIXL_SIDE_CHANNEL_PORT=5600" in script


@pytest.mark.parametrize(
    ("connector", "storage", "why"),
    [
        (None, "/kv", "needs a kv_connector"),
        ("NixlConnector", "/kv", "uses no folder"),
        ("LMCacheConnectorV1", None, "'ExampleConnector' or 'NixlConnector'"),
        ("ExampleConnector", None, "needs a folder"),
        ("ExampleConnector", "kv", "absolute"),
        ("ExampleConnector", "/kv\n", "control characters"),
    ],
)
def test_a_way_to_share_caches_that_cannot_be_is_refused(connector: str | None, storage: str | None, why: str) -> None:
    with pytest.raises(hp.errors.InvalidInputError, match=why):
        cache_sharing(connector, storage)


def test_plans_whose_caches_the_example_connector_would_spoil_are_refused() -> None:
    sharing = cache_sharing("ExampleConnector", "/kv")
    with pytest.raises(hp.errors.InvalidInputError, match="tensor parallelism"):
        shell_files(plan_of("multi-node"), get_engine(ENGINE), sharing=sharing)
    with pytest.raises(hp.errors.InvalidInputError, match="prefilled whole"):
        shell_files(one_gpu_plan(4095), get_engine(ENGINE), sharing=sharing)
