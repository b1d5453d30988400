"""What each machine of a pipeline runs: vLLM's arguments and variables, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from hetplan.catalog.dtypes import Dtype
from hetplan.catalog.engines import EngineProfile
from hetplan.catalog.model import ModelSpec
from hetplan.catalog.models import hugging_face_id
from hetplan.errors import InvalidInputError, UnknownNameError
from hetplan.launchers.limits import keeps_all_limits, refuse_beyond
from hetplan.launchers.names import argument
from hetplan.launchers.stores import LOAD_FORMAT, ShardSource
from hetplan.plan import Pipeline, Plan, Stage

# Names of number formats on vLLM's command line.
_DTYPES: dict[Dtype, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_DRAIN_S = 120
# Master ports follow HTTP ports, so that launches side by side do not meet: 8000 and 29500, 8001 and 29501 ...
_MASTER_PORT_OFFSET = 29500 - 8000
_NIXL_PORT_OFFSET = 5600 - 8000
HTTP_PORT = 8000
KvConnector = Literal["ExampleConnector", "NixlConnector"]
# The plugin's own classes, by which each stage has its degree: vLLM counts one rank a stage.
_PLUGIN = "hetplan.runtime.vllm_plugin"
# The methods that `ModelSpec.with_dtypes` writes for weights quantised while loading.
_ONLINE = "online-"


@dataclass(frozen=True, slots=True)
class CacheSharing:
    """How engines hand caches to each other: vLLM's connector, and the folder of one that needs it."""

    connector: KvConnector
    storage: str | None = None


def cache_sharing(connector: str | None, storage: str | None) -> CacheSharing | None:
    """The connector that was asked for, checked; None for none.

    Raises
    ------
    InvalidInputError
        If the connector is not known, or the folder is missing, not wanted, or not an absolute path.
    """
    if connector is None:
        if storage is not None:
            raise InvalidInputError(f"kv_storage {storage!r} needs a kv_connector; give 'ExampleConnector'")
        return None
    if connector == "NixlConnector":
        if storage is not None:
            raise InvalidInputError(f"NixlConnector uses no folder; leave kv_storage {storage!r} away")
        return CacheSharing("NixlConnector")
    if connector != "ExampleConnector":
        raise InvalidInputError(f"kv_connector is 'ExampleConnector' or 'NixlConnector', got {connector!r}")
    if storage is None:
        raise InvalidInputError("ExampleConnector needs a folder that all engines see; give kv_storage")
    if not PurePosixPath(argument(storage, "kv_storage")).is_absolute():
        raise InvalidInputError(f"kv_storage {storage!r} is relative; give an absolute path")
    return CacheSharing("ExampleConnector", storage)


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """The devices of a machine's tensor store, and the bytes that it and its engines may take of each."""

    devices: tuple[str, ...]
    device_bytes: int


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of one pipeline copy: what it runs.

    ``address`` names the variable that holds its private address; ``staged`` says whether the plugin starts it;
    ``store`` is what its tensor store has, None without one.
    """

    pipeline: int
    rank: int
    offer: str
    instance_type: str
    stages: tuple[Stage, ...]
    address: str
    head_address: str
    port: int
    arguments: tuple[str, ...]
    variables: dict[str, str]
    local: bool
    staged: bool
    store: StoreMemory | None = None

    @property
    def name(self) -> str:
        return f"pipeline-{self.pipeline}-node-{self.rank}"

    @property
    def script(self) -> str:
        return f"{self.name}.sh"

    @property
    def store_script(self) -> str:
        return f"{self.name}-store.sh"


def model_source(model: ModelSpec, given: str | None) -> str:
    """What the engine loads: a given path or id, else the Hugging Face id of a catalogued name."""
    if given is None:
        try:
            given = hugging_face_id(model.name)
        except UnknownNameError:
            given = model.name
    return argument(given, "model")


def sources_of(names: Sequence[str], model: str | Mapping[str, str] | None) -> Mapping[str, str]:
    """What is given to load, by the names of models."""
    if model is None:
        return {}
    if not isinstance(model, Mapping):
        if len(names) > 1:
            raise InvalidInputError(
                f"model {model!r} is one, and the plan has {', '.join(names)}; say which is which: "
                f"{{{names[0]!r}: {model!r}, ...}}, on the command line --model {names[0]}={model}"
            )
        return {names[0]: model}
    for name in model:
        if name not in names:
            raise UnknownNameError("model of the plan", name, names)
    return model


def nodes_of(
    plan: Plan,
    engine: EngineProfile,
    *,
    first_port: int = HTTP_PORT,
    first_pipeline: int = 1,
    sharing: CacheSharing | None = None,
    source: ShardSource | None = None,
) -> list[Node]:
    """Every machine of every pipeline copy of a plan.

    A pipeline that keeps the limits of stock vLLM is started on stock vLLM, unless its weights come from a store.
    ``first_pipeline`` is the number of the first one, whose port is ``first_port``.

    Raises
    ------
    EngineLimitError
        If the engine cannot run a pipeline; it names the limit.
    InvalidInputError
        If a name in the plan is not fit for a command line, or caches cannot be shared by its pipelines.
    """
    nodes: list[Node] = []
    number = first_pipeline - 1
    for deployment in plan.deployments:
        for pipeline in deployment.pipelines:
            refuse_beyond(engine, pipeline)
            staged = source is not None or not keeps_all_limits(pipeline)
            if sharing is not None:
                _refuse_sharing(plan, pipeline, sharing, staged=staged)
            for _ in range(pipeline.count):
                number += 1
                port = first_port + number - first_pipeline
                nodes += _pipeline_nodes(plan, pipeline, number, port, sharing, source, staged=staged)
    return nodes


def _refuse_sharing(plan: Plan, pipeline: Pipeline, sharing: CacheSharing, *, staged: bool) -> None:
    """ExampleConnector names files by layer, not by rank, and writes a prompt that is prefilled in chunks short.

    NixlConnector pairs ranks by vLLM's own degree, which is 1 where the plugin gives each stage its own.
    """
    if staged and any(stage.tensor_parallel > 1 for stage in pipeline.stages):
        raise InvalidInputError(
            f"{sharing.connector} pairs the ranks of one degree, and the plugin gives each stage its own; leave "
            "kv_connector out, or launch a plan of single GPUs"
        )
    if sharing.connector != "ExampleConnector":
        return
    if any(stage.tensor_parallel > 1 for stage in pipeline.stages):
        raise InvalidInputError("ExampleConnector loses caches under tensor parallelism; choose NixlConnector")
    batched = plan.max_num_batched_tokens(pipeline)
    if batched < pipeline.max_model_len:
        raise InvalidInputError(
            f"ExampleConnector needs prompts to be prefilled whole: max_num_batched_tokens is {batched}, below the "
            f"max_model_len of {pipeline.max_model_len}. Plan with max_num_batched_tokens={pipeline.max_model_len}"
        )


def _pipeline_nodes(
    plan: Plan,
    pipeline: Pipeline,
    number: int,
    port: int,
    sharing: CacheSharing | None,
    source: ShardSource | None,
    *,
    staged: bool,
) -> list[Node]:
    # vLLM numbers ranks along the pipeline, so machines are ranked by their first stage.
    order = list(dict.fromkeys(stage.node for stage in pipeline.stages))
    head = address_variable(number, 0)
    nodes = []
    for rank, node in enumerate(order):
        stages = tuple(stage for stage in pipeline.stages if stage.node == node)
        machine = plan.placement.cluster.instance_type(stages[0].instance_type)
        local = machine.provider == "local"
        arguments = _arguments(plan, pipeline, stages, rank, len(order), number, port, local=local, staged=staged)
        variables = _variables(pipeline, local=local)
        if staged:
            layout = {"stages": [_stage_layout(s, order.index(s.node), source) for s in pipeline.stages]}
            variables["HETPLAN_LAYOUT"] = json.dumps(layout, separators=(",", ":"))
        if source is not None:
            arguments += (f"--load-format={LOAD_FORMAT}",)
            variables["HETPLAN_STORE_MODEL"] = argument(plan.placement.model.name, "model name")
        nodes.append(
            Node(
                pipeline=number,
                rank=rank,
                offer=argument(pipeline.nodes[node], "offer name"),
                instance_type=argument(machine.name, "instance type"),
                stages=stages,
                address=address_variable(number, rank),
                head_address=head,
                port=port,
                arguments=arguments + _sharing_arguments(sharing),
                variables=variables | _sharing_variables(sharing, port),
                local=local,
                staged=staged,
                store=None if source is None else _store_memory(stages, local=local),
            )
        )
    return nodes


def _stage_layout(stage: Stage, rank: int, source: ShardSource | None) -> dict[str, object]:
    """A stage as the plugin reads it; ``node`` is the rank of its machine, and bytes are of each of its GPUs."""
    layout: dict[str, object] = {
        "layers": list(stage.layers),
        "tensor_parallel": stage.tensor_parallel,
        "node": rank,
        "kv_cache_bytes": stage.kv_cache_bytes,
    }
    if source is not None:
        # Without a reserve an engine starts with all of its cache.
        start = min(stage.start_kv_cache_bytes, stage.kv_cache_bytes) or stage.kv_cache_bytes
        layout |= {"start_kv_cache_bytes": start, "hold_bytes": stage.activation_bytes + _other_bytes(stage)}
    return layout


def _other_bytes(stage: Stage) -> int:
    if stage.other_bytes is None:
        raise InvalidInputError(
            "the plan was made by a version that did not state other_bytes, which a store counts with; plan again"
        )
    return stage.other_bytes


def _store_memory(stages: tuple[Stage, ...], *, local: bool) -> StoreMemory:
    usable = [_usable_bytes(stage) for stage in stages for _ in range(stage.tensor_parallel)]
    if local:
        # All ranks of a machine without GPUs share its memory.
        return StoreMemory(("cpu",), sum(usable))
    # Ranks take the machine's GPUs in order.
    return StoreMemory(tuple(f"cuda:{number}" for number in range(len(usable))), max(usable))


def _usable_bytes(stage: Stage) -> int:
    """What the engines and the store of one GPU may use together."""
    own = stage.weight_bytes + stage.activation_bytes + _other_bytes(stage)
    return own + stage.kv_cache_bytes + stage.reserved_bytes


def address_variable(pipeline: int, rank: int) -> str:
    """The environment variable that holds a machine's private address."""
    return f"HETPLAN_PIPELINE_{pipeline}_NODE_{rank}"


def _arguments(
    plan: Plan,
    pipeline: Pipeline,
    stages: tuple[Stage, ...],
    rank: int,
    nodes: int,
    number: int,
    port: int,
    *,
    local: bool,
    staged: bool,
) -> tuple[str, ...]:
    """Flags of one machine, each ``--flag=value``; addresses are added by the script that knows them."""
    problem, model = plan.placement, plan.placement.model
    flags: dict[str, str | int | None] = {
        "--served-model-name": argument(model.name, "model name"),
        "--tensor-parallel-size": 1 if staged else stages[0].tensor_parallel,
        "--pipeline-parallel-size": len(pipeline.stages),
        "--max-model-len": pipeline.max_model_len,
        "--max-num-seqs": pipeline.max_num_seqs,
        "--max-num-batched-tokens": plan.max_num_batched_tokens(pipeline),
        # One number for all GPUs of a machine: what fits its fullest stage.
        "--kv-cache-memory-bytes": min(stage.kv_cache_bytes for stage in stages),
        "--dtype": _DTYPES[_activation_dtype(model, stages[0])],
        "--shutdown-timeout": _DRAIN_S,
    }
    if model.quantization is not None and model.quantization.method.startswith(_ONLINE):
        flags["--quantization"] = model.weight_dtype
    if model.kv_dtype != model.base_dtype:
        flags["--kv-cache-dtype"] = model.kv_dtype
    if staged:
        flags["--worker-cls"] = f"{_PLUGIN}.worker.{'StagedCpuWorker' if local else 'StagedGpuWorker'}"
    if sum(stage.tensor_parallel for stage in pipeline.stages) > 1:
        flags["--distributed-executor-backend"] = "mp"
    if nodes > 1:
        flags |= {"--nnodes": nodes, "--node-rank": rank, "--master-port": _MASTER_PORT_OFFSET + port}
    if rank == 0:
        flags["--port"] = port
        # Rendering chats to token ids and token ids to text, for the router.
        flags["--enable-scale-out"] = None
    else:
        flags["--headless"] = None
    if local:
        flags["--enforce-eager"] = None
    if problem.max_num_batched_tokens is None and local:
        flags.pop("--max-num-batched-tokens")
    return tuple(name if value is None else f"{name}={value}" for name, value in flags.items())


def _sharing_arguments(sharing: CacheSharing | None) -> tuple[str, ...]:
    if sharing is None:
        return ()
    settings: dict[str, object] = {"kv_connector": sharing.connector, "kv_role": "kv_both"}
    if sharing.storage is None:
        # By default a request whose source is gone ends with an error.
        settings["kv_load_failure_policy"] = "recompute"
        return (f"--kv-transfer-config={json.dumps(settings)}",)
    settings["kv_connector_extra_config"] = {"shared_storage_path": sharing.storage}
    return (f"--kv-transfer-config={json.dumps(settings)}", "--no-enable-chunked-prefill")


def _sharing_variables(sharing: CacheSharing | None, port: int) -> dict[str, str]:
    if sharing is None or sharing.connector != "NixlConnector":
        return {}
    return {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(_NIXL_PORT_OFFSET + port)}


def _activation_dtype(model: ModelSpec, stage: Stage) -> Dtype:
    """The 16-bit (or 32-bit) type of a stage: its own when it computes in one, else the model's."""
    return stage.compute_dtype if stage.compute_dtype in _DTYPES else model.base_dtype


def _variables(pipeline: Pipeline, *, local: bool) -> dict[str, str]:
    """Environment of one machine."""
    variables = {}
    if len(pipeline.stages) > 1:
        variables["VLLM_PP_LAYER_PARTITION"] = ",".join(str(stage.layer_count) for stage in pipeline.stages)
    if local:
        variables |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
    return variables
