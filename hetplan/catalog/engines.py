"""What each engine version can run, as data: solvers plan within it, launching refuses what breaks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import model_validator

from hetplan.base import Frozen
from hetplan.catalog.hardware import GpuSpec, InstanceType
from hetplan.errors import UnknownNameError
from hetplan.units import GIB

LimitName = Literal["one-tensor-parallel-degree", "equal-gpus-per-node", "consecutive-stages-per-node", "one-dtype"]

LIMITS: dict[LimitName, str] = {
    "one-tensor-parallel-degree": "every stage of a pipeline has the same tensor-parallel degree",
    "equal-gpus-per-node": "every node of a pipeline gives it the same number of GPUs",
    "consecutive-stages-per-node": "the stages on a node follow one another",
    "one-dtype": "every stage computes in the same number format",
}


class EngineProfile(Frozen):
    """An engine version.

    Attributes
    ----------
    limits : tuple of str
        Names in `LIMITS` that a pipeline must keep.
    flags, variables : tuple of str
        Command-line flags and environment variables that launch scripts may use.
    checked : "run" or "not run"
        Whether scripts for this version have started real servers in the tests, or their flags were only
        compared with the published package.
    """

    name: str
    version: str
    limits: tuple[LimitName, ...]
    flags: tuple[str, ...]
    variables: tuple[str, ...]
    checked: Literal["run", "not run"]
    source: str

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "equal-gpus-per-node" in self.limits and "one-tensor-parallel-degree" not in self.limits:
            raise ValueError(
                "equal-gpus-per-node without one-tensor-parallel-degree is not planned for: solvers count a node's "
                "stages; add the one limit or leave the other out"
            )
        return self


_VLLM_FLAGS = (
    "--host",
    "--port",
    "--served-model-name",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--headless",
    "--dtype",
    "--quantization",
    "--kv-cache-dtype",
    "--max-model-len",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--kv-cache-memory-bytes",
    "--shutdown-timeout",
    "--distributed-executor-backend",
    "--enforce-eager",
    "--enable-scale-out",
)
_VLLM_VARIABLES = ("VLLM_PP_LAYER_PARTITION", "VLLM_HOST_IP", "VLLM_API_KEY", "VLLM_CPU_OMP_THREADS_BIND")

# vLLM with hetplan's plugin, which starts each stage with processes of its own.
PLUGIN_ENGINE = "hetplan"

ENGINES: dict[str, EngineProfile] = {
    profile.name: profile
    for profile in (
        EngineProfile(
            name="vllm-0.32",
            version="0.32.0",
            limits=tuple(LIMITS),
            flags=_VLLM_FLAGS,
            variables=_VLLM_VARIABLES,
            checked="run",
            source="vLLM 0.32.0: vllm/engine/arg_utils.py, vllm/envs.py, vllm/v1/executor/multiproc_executor.py",
        ),
        EngineProfile(
            name="vllm-0.33",
            version="0.33.0",
            limits=tuple(LIMITS),
            flags=_VLLM_FLAGS,
            variables=_VLLM_VARIABLES,
            checked="not run",
            source="vLLM 0.33.0, published wheel: vllm/engine/arg_utils.py, vllm/envs.py",
        ),
        EngineProfile(
            name=PLUGIN_ENGINE,
            version="0.32.0",
            limits=("consecutive-stages-per-node", "one-dtype"),
            flags=(*_VLLM_FLAGS, "--worker-cls", "--load-format"),
            variables=(*_VLLM_VARIABLES, "HETPLAN_LAYOUT", "HETPLAN_STORE", "HETPLAN_STORE_MODEL"),
            checked="run",
            source="vLLM 0.32.0 with the plugin hetplan/runtime/vllm_plugin",
        ),
    )
}


# The newest version whose scripts have started real servers in the tests.
DEFAULT_ENGINE = "vllm-0.32"


def get_engine(name: str) -> EngineProfile:
    """The profile of an engine version.

    Raises
    ------
    UnknownNameError
        If there is none of that name.
    """
    if name not in ENGINES:
        raise UnknownNameError("engine", name, ENGINES, "engine=None plans without an engine's limits.")
    return ENGINES[name]


# vLLM's defaults by GPU memory: GPUs of 70 GiB and more (A100 apart) take larger steps.
_LARGE_GPU_BYTES = 70 * GIB


@dataclass(frozen=True, slots=True)
class EngineDefaults:
    """Batch limits that the engine takes when none are given."""

    max_num_seqs: int
    max_num_batched_tokens: int


def engine_defaults(gpu: GpuSpec) -> EngineDefaults:
    """vLLM's batch limits for a GPU (vllm/engine/arg_utils.py, the API server's)."""
    if gpu.memory_bytes >= _LARGE_GPU_BYTES and "A100" not in gpu.name:
        return EngineDefaults(max_num_seqs=1024, max_num_batched_tokens=8192)
    return EngineDefaults(max_num_seqs=256, max_num_batched_tokens=2048)


def block_tokens(machine: InstanceType) -> int:
    """Tokens of a block of KV cache, vLLM's unless it is set: larger in its CPU build."""
    return 128 if machine.provider == "local" else 16
