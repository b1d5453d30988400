"""Launching on the plugin, where stock vLLM cannot: every stage's own degree and memory; and from tensor stores."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from builders import tiny_llama
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_shell import STAND_IN, hostile, plan_of

import hetplan as hp
from hetplan.api import make_problem
from hetplan.catalog.engines import get_engine
from hetplan.estimator.base import make_estimator
from hetplan.estimator.pipeline import StageShape, pipeline_rates
from hetplan.launchers.limits import EngineLimitError
from hetplan.launchers.shell import shell_files
from hetplan.launchers.stores import ShardSource, shard_source
from hetplan.solvers.base import PipelineChoice, Solution
from hetplan.solvers.build import build_plan

PLUGIN = get_engine("hetplan")
WORKLOAD = hp.Workload(input_tokens=763, output_tokens=232)
FOLDER = ShardSource("/shards")


def local_plan(stages: list[tuple[int, int, int]], **options: Any) -> hp.Plan:
    """A pipeline on this machine of (layers, degree, node) stages."""
    problem = make_problem(
        model=tiny_llama(num_hidden_layers=sum(layers for layers, _, _ in stages)),
        cluster={"local-cpu": 1 + max(node for _, _, node in stages)},
        market="owned",
        provider="local",
        region="here",
        workload=hp.Workload(input_tokens=20, output_tokens=60),
        max_model_len=512,
        max_num_seqs=4 * len(stages),
        **options,
    )
    machine, offer = problem.cluster.instance_types[0], problem.cluster.pools[0].offer.name
    start, shapes = 0, []
    for layers, degree, node in stages:
        shapes.append(StageShape((start, start + layers), machine, degree, node))
        start += layers
    rate = float(pipeline_rates(problem, make_estimator(problem), shapes, 4).requests_per_s[0])
    choice = PipelineChoice(tuple(shapes), (offer,) * len({node for _, _, node in stages}), 4)
    plan = build_plan(problem, Solution(pipelines=(choice,), objective=rate), solver="even", seed=0)
    assert hp.verify(plan) == []
    return plan


def started(script: str, folder: Path, **environment: str) -> tuple[list[str], dict[str, str]]:
    """The arguments and the environment that a script gives to a stand-in for what it starts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.sh").write_text(script, encoding="utf-8")
    (folder / "engine").write_text(STAND_IN + 'env -0 > "$RECORD.environment"\n')
    (folder / "engine").chmod(0o755)
    given = {
        "PATH": os.environ["PATH"],
        "HETPLAN_VLLM": str(folder / "engine"),
        "HETPLAN": str(folder / "engine"),
        "RECORD": str(folder / "record"),
        "LC_ALL": "C.UTF-8",
        **{f"HETPLAN_PIPELINE_1_NODE_{rank}": f"10.0.0.{rank + 1}" for rank in range(2)},
    }
    subprocess.run(["bash", "run.sh"], cwd=folder, env=given | environment, check=True, capture_output=True, timeout=20)
    pairs = (folder / "record.environment").read_text("utf-8").split("\0")[:-1]
    arguments = (folder / "record").read_text("utf-8").split("\0")[:-1]
    return arguments, dict(pair.split("=", 1) for pair in pairs)


def flags_of(arguments: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (argument.partition("=") for argument in arguments)}


# ---- layouts


@pytest.mark.parametrize("name", ["single-node", "multi-node", "fp8"])
def test_what_stock_vllm_runs_is_started_on_stock_vllm(name: str) -> None:
    plan = plan_of(name)
    stock, plugin = (shell_files(plan, get_engine(engine)) for engine in ("vllm-0.32", "hetplan"))
    assert stock.pop("README.md") != plugin.pop("README.md")
    assert stock == plugin


def test_every_stage_has_its_own_degree_and_cache(tmp_path: Path) -> None:
    """Two stages of two GPUs on the second machine, one of one on the first."""
    plan = plan_of("mixed-degrees")
    (pipeline,) = plan.deployments[0].pipelines
    assert [stage.tensor_parallel for stage in pipeline.stages] == [1, 2, 2]
    files = shell_files(plan, PLUGIN)
    for rank in range(2):
        arguments, environment = started(files[f"pipeline-1-node-{rank}.sh"], tmp_path / str(rank))
        flags = flags_of(arguments)
        assert flags["--tensor-parallel-size"] == "1"
        assert flags["--pipeline-parallel-size"] == "3"
        assert flags["--worker-cls"] == "hetplan.runtime.vllm_plugin.worker.StagedGpuWorker"
        assert flags["--distributed-executor-backend"] == "mp"
        assert (flags["--nnodes"], flags["--node-rank"]) == ("2", str(rank))
        here = [stage.kv_cache_bytes for stage in pipeline.stages if stage.node == rank]
        assert flags["--kv-cache-memory-bytes"] == str(min(here))
        assert "--load-format" not in flags
        assert not {"VLLM_PLUGINS", "HETPLAN_STORE", "HETPLAN_STORE_MODEL"} & environment.keys()
        assert json.loads(environment["HETPLAN_LAYOUT"]) == {
            "stages": [
                {
                    "layers": list(stage.layers),
                    "tensor_parallel": stage.tensor_parallel,
                    "node": stage.node,
                    "kv_cache_bytes": stage.kv_cache_bytes,
                }
                for stage in pipeline.stages
            ]
        }
        assert "\n" not in environment["HETPLAN_LAYOUT"]
        assert " " not in environment["HETPLAN_LAYOUT"]


def test_this_machine_has_the_plugin_s_cpu_worker(tmp_path: Path) -> None:
    """A node is the rank of its machine, not the number that the plan gives it."""
    plan = local_plan([(3, 2, 0), (5, 1, 1)], engine="hetplan")
    (deployment,) = plan.deployments
    (pipeline,) = deployment.pipelines
    turned = pipeline.replace(stages=tuple(stage.replace(node=1 - stage.node) for stage in pipeline.stages))
    turned_plan = plan.replace(deployments=(deployment.replace(pipelines=(turned,)),))
    assert hp.verify(turned_plan) == []
    for one in (plan, turned_plan):
        arguments, environment = started(shell_files(one, PLUGIN)["pipeline-1-node-0.sh"], tmp_path / str(id(one)))
        assert flags_of(arguments)["--worker-cls"].endswith("worker.StagedCpuWorker")
        assert [stage["node"] for stage in json.loads(environment["HETPLAN_LAYOUT"])["stages"]] == [0, 1]
        assert environment["VLLM_PP_LAYER_PARTITION"] == "3,5"


@pytest.mark.parametrize("stages", [[(2, 2, 0), (2, 1, 1)], [(2, 1, 0), (2, 1, 0), (2, 1, 1)]])
def test_stock_vllm_is_not_given_what_it_cannot_run(stages: list[tuple[int, int, int]], tmp_path: Path) -> None:
    plan = local_plan(stages)
    with pytest.raises(EngineLimitError, match="or launch with engine='hetplan'"):
        hp.launch(plan, out=tmp_path / "out", engine="vllm-0.32")
    assert hp.launch(plan, out=tmp_path / "out", engine="hetplan")


def test_a_limit_that_the_plugin_has_too_is_not_said_to_be_lifted() -> None:
    refusal = EngineLimitError("one-dtype", "vllm-0.32", "the stages compute in ['bf16', 'fp16']")
    assert str(refusal).endswith("Plan with engine='vllm-0.32'")


def test_caches_do_not_move_between_stages_of_other_degrees(tmp_path: Path) -> None:
    with pytest.raises(hp.InvalidInputError, match="the plugin gives each stage its own"):
        hp.launch(plan_of("mixed-degrees"), out=tmp_path / "out", kv_connector="NixlConnector")


# ---- stores


def test_a_store_serves_what_the_engines_of_its_machine_load(tmp_path: Path) -> None:
    plan = plan_of("store")
    (pipeline,) = plan.deployments[0].pipelines
    files = shell_files(plan, PLUGIN, source=FOLDER)
    for rank in range(2):
        arguments, environment = started(files[f"pipeline-1-node-{rank}.sh"], tmp_path / str(rank))
        assert flags_of(arguments)["--load-format"] == "hetplan"
        assert environment["HETPLAN_STORE_MODEL"] == "qwen2.5-32b"
        socket = f"/tmp/hetplan-{os.getuid()}/hetplan/pipeline-1-node-{rank}.sock"
        assert environment["HETPLAN_STORE"] == socket
        layout = json.loads(environment["HETPLAN_LAYOUT"])["stages"]
        for stage, told in zip(pipeline.stages, layout, strict=True):
            assert told["start_kv_cache_bytes"] == stage.start_kv_cache_bytes < told["kv_cache_bytes"]
            # Both engines, the weights once and the cache of the first are all that is usable.
            both = stage.reserved_bytes + stage.kv_cache_bytes + stage.weight_bytes + told["hold_bytes"]
            assert told["hold_bytes"] + told["start_kv_cache_bytes"] == stage.reserved_bytes
            usable = 0.9 * plan.placement.cluster.instance_type(stage.instance_type).gpu.memory_bytes
            assert both == pytest.approx(usable, rel=0.01)
        arguments, _ = started(files[f"pipeline-1-node-{rank}-store.sh"], tmp_path / f"store-{rank}")
        assert arguments[:2] == ["store", "serve"]
        here = [stage for stage in pipeline.stages if stage.node == rank]
        machine = plan.placement.cluster.instance_type(here[0].instance_type)
        ranks = sum(stage.tensor_parallel for stage in here)
        assert [a for a in arguments if "device" in a] == [f"--device=cuda:{number}" for number in range(ranks)]
        told = flags_of([a for a in arguments[2:] if "device" not in a])
        assert float(told.pop("--memory")) == pytest.approx(0.9 * machine.gpu.memory_bytes, rel=0.01)
        assert told == {"--socket": socket, "--shards": "/shards"}


@pytest.mark.parametrize(
    ("environment", "socket"),
    [
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, "/run/user/7/hetplan/pipeline-1-node-0.sock"),
        ({"XDG_RUNTIME_DIR": "/run/user/7", "HETPLAN_STORE": "/my own/socket"}, "/my own/socket"),
    ],
)
def test_a_store_is_found_where_the_environment_says(environment: dict[str, str], socket: str, tmp_path: Path) -> None:
    files = shell_files(plan_of("single-node"), PLUGIN, source=FOLDER)
    _, seen = started(files["pipeline-1-node-0.sh"], tmp_path / "engine", **environment)
    arguments, _ = started(files["pipeline-1-node-0-store.sh"], tmp_path / "store", **environment)
    assert seen["HETPLAN_STORE"] == flags_of(arguments)["--socket"] == socket


def test_a_single_process_loads_from_a_store_without_an_executor(tmp_path: Path) -> None:
    plan = plan_of("single-node")
    arguments, environment = started(
        shell_files(plan, PLUGIN, source=FOLDER)["pipeline-1-node-0.sh"], tmp_path / "engine"
    )
    flags = flags_of(arguments)
    assert flags["--worker-cls"].endswith("StagedGpuWorker")
    assert "--distributed-executor-backend" not in flags
    (stage,) = json.loads(environment["HETPLAN_LAYOUT"])["stages"]
    assert stage["start_kv_cache_bytes"] == stage["kv_cache_bytes"], "nothing is kept for a second engine"


def test_a_group_on_one_machine_is_one_stage(tmp_path: Path) -> None:
    """vLLM counts a rank for each stage, the plugin the GPUs."""
    plan = plan_of("fp8")
    (pipeline,) = plan.deployments[0].pipelines
    arguments, environment = started(
        shell_files(plan, PLUGIN, source=FOLDER)["pipeline-1-node-0.sh"], tmp_path / "engine"
    )
    flags = flags_of(arguments)
    assert flags["--tensor-parallel-size"] == "1"
    assert flags["--pipeline-parallel-size"] == str(len(pipeline.stages))
    assert flags["--distributed-executor-backend"] == "mp"
    stages = json.loads(environment["HETPLAN_LAYOUT"])["stages"]
    assert [stage["tensor_parallel"] for stage in stages] == [stage.tensor_parallel for stage in pipeline.stages]


@pytest.mark.parametrize(
    ("store", "allowed"),
    [
        ("/shards/a folder", None),
        ("http://10.0.0.9:8000/llama", "10.0.0.9"),
        ("https://shards.example/llama", "shards.example"),
        ("https://[fd00::1]:443/llama", "fd00::1"),
        ("s3://my-bucket/llama/8b", "s3://my-bucket"),
    ],
)
def test_a_store_may_ask_its_own_host_alone(store: str, allowed: str | None, tmp_path: Path) -> None:
    hp.launch(plan_of("single-node"), out=tmp_path / "out", engine="hetplan", store=store)
    script = (tmp_path / "out" / "pipeline-1-node-0-store.sh").read_text("utf-8")
    arguments, _ = started(script, tmp_path / "run")
    assert flags_of(arguments)["--shards"] == store
    assert flags_of(arguments).get("--allow-host") == allowed


@pytest.mark.parametrize(
    ("store", "why"),
    [
        ("shards", "relative"),
        ("../shards", "relative"),
        ("", "0 characters"),
        ("--shards=/", "begins with a dash"),
        ("/shards\ntouch pwned", "control characters"),
        ("file:///shards", "scheme 'file'"),
        ("ftp://host/shards", "scheme 'ftp'"),
        ("gs://bucket/shards", "scheme 'gs'"),
        ("https://user:secret@host/shards", "name or password"),
        ("https://host/shards?token=secret", "query or fragment"),
        ("https:///shards", "no host"),
        ("https://host:port/shards", "no URL"),
        ("https://$(touch pwned)/shards", "no host"),
        ("s3://bucket:1/shards", "no host"),
    ],
)
def test_other_stores_are_refused(store: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(hp.InvalidInputError, match=why) as refusal:
        hp.launch(plan_of("single-node"), out=tmp_path / "out", engine="hetplan", store=store)
    assert "secret" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_stock_vllm_reads_no_store(tmp_path: Path) -> None:
    with pytest.raises(hp.InvalidInputError, match="engine='hetplan'"):
        hp.launch(plan_of("single-node"), out=tmp_path / "out", store="/shards")


def test_a_plan_of_a_former_version_has_no_store(tmp_path: Path) -> None:
    content = plan_of("single-node").model_dump(mode="json")
    del content["deployments"][0]["pipelines"][0]["stages"][0]["other_bytes"]
    former = hp.Plan.from_dict(content)
    assert hp.launch(former, out=tmp_path / "out", engine="hetplan", dry_run=True)
    with pytest.raises(hp.InvalidInputError, match="plan again"):
        hp.launch(former, out=tmp_path / "out", engine="hetplan", store="/shards")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=hostile, scheme=st.sampled_from(["", "/", "http://", "https://host/", "s3://", "s3://bucket/"]))
def test_no_store_reaches_a_shell_unquoted(text: str, scheme: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A stand-in gets the store as one argument, and nothing else happens."""
    try:
        source = shard_source(scheme + text, PLUGIN)
    except hp.InvalidInputError:
        return
    folder = tmp_path_factory.mktemp("hostile")
    script = shell_files(plan_of("single-node"), PLUGIN, source=source)["pipeline-1-node-0-store.sh"]
    arguments, _ = started(script, folder)
    assert f"--shards={scheme + text}" in arguments
    assert {path.name for path in folder.iterdir()} == {"run.sh", "engine", "record", "record.environment"}
    assert all(shlex.split(line) for line in script.splitlines() if line.startswith("  --shards"))
