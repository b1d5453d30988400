"""What an engine step costs beside its kernels, per engine, as data.

The values come from ``calibration/learn_steps.py``: each engine's whole runs, less what the kernel models explain.
They are properties of an engine and its host, not of a GPU; a calibration may carry its own.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hetplan.base import Frozen
from hetplan.catalog.engines import PLUGIN_ENGINE
from hetplan.errors import UnknownNameError

NonNegative = Annotated[float, Field(ge=0)]


class StepOverheads(Frozen):
    """Host and launch costs of one engine.

    Attributes
    ----------
    engine : str
    step_s : float
        Seconds of each engine step that the GPU spends waiting: scheduling, sampling, detokenising.
    rank_step_s : float
        More seconds for each further GPU of a tensor-parallel group.
    prefill_step_s : float
        More seconds of a step that holds prompts: input is prepared, shapes are new.
    layer_s : float
        Seconds added by each layer of each step, where the host launches kernels one by one and runs none meanwhile: a
        CPU in eager mode.
    prefill_layer_s : float
        Least seconds of a layer in a step that prefills: its kernels are launched one by one there, without a
        CUDA graph.
    all_reduce_factor : float
        All-reduce inside the engine over the one of a benchmark.
    fused_quantisation : bool
        Activations are quantised inside the kernel before, not in a pass of their own.
    gpu_memory_utilization : float
        Share of a GPU's memory that the engine uses by default. TensorRT-LLM's batch manager takes a share of what the
        weights leave, so that weights and one sequence may fill the GPU.
    max_num_seqs : int
        Most sequences in flight by default.
    max_num_batched_tokens : int
        Most tokens in one step by default.
    source : str
    """

    engine: str
    step_s: NonNegative
    rank_step_s: NonNegative = 0.0
    prefill_step_s: NonNegative = 0.0
    layer_s: NonNegative = 0.0
    prefill_layer_s: NonNegative = 0.0
    all_reduce_factor: Annotated[float, Field(gt=0)] = 1.0
    fused_quantisation: bool = False
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    max_num_seqs: Annotated[int, Field(gt=0)]
    max_num_batched_tokens: Annotated[int, Field(gt=0)]
    source: str


_LEARNT = "calibration/learn_steps.py over "

STEP_OVERHEADS: dict[str, StepOverheads] = {
    found.engine: found
    for found in (
        StepOverheads(
            engine="vllm",
            step_s=0.8e-3,
            prefill_layer_s=0.8e-3,
            max_num_seqs=1024,
            max_num_batched_tokens=8192,
            source=_LEARNT + "closed loops of vLLM on H100 (aiconfigurator silicon samples)",
        ),
        StepOverheads(
            engine="vllm-2023",
            step_s=9.4e-3,
            rank_step_s=2.5e-3,
            max_num_seqs=256,
            max_num_batched_tokens=4096,
            source=_LEARNT + "static batches of vLLM in 2023, before its engine was rewritten (Splitwise)",
        ),
        StepOverheads(
            engine="sglang",
            step_s=3.5e-3,
            prefill_layer_s=0.063e-3,
            max_num_seqs=1024,
            max_num_batched_tokens=8192,
            source=_LEARNT + "closed loops of SGLang on H200 (aiconfigurator silicon samples)",
        ),
        StepOverheads(
            engine="tensorrt-llm-0.9",
            fused_quantisation=True,
            step_s=0.92e-3,
            prefill_step_s=0.64e-3,
            max_num_seqs=2048,
            max_num_batched_tokens=8192,
            source=_LEARNT + "static batches of TensorRT-LLM 0.9 (its performance overview)",
        ),
        StepOverheads(
            engine="tensorrt-llm-0.14",
            fused_quantisation=True,
            gpu_memory_utilization=1.0,
            step_s=2.0e-3,
            rank_step_s=4.9e-3,
            max_num_seqs=2048,
            max_num_batched_tokens=8192,
            source=_LEARNT + "in-flight batching of TensorRT-LLM 0.14 (its performance overview)",
        ),
        StepOverheads(
            engine="tensorrt-llm-1.0",
            fused_quantisation=True,
            step_s=0.33e-3,
            prefill_layer_s=0.64e-3,
            max_num_seqs=2048,
            max_num_batched_tokens=8192,
            source=_LEARNT
            + "closed loops of TensorRT-LLM 1.0 (PyTorch backend) on H100 (aiconfigurator silicon samples)",
        ),
    )
}

DEFAULT_STEP_ENGINE = "vllm"
# Engines whose steps are another's: the plugin changes who runs a stage, not what a step does.
_STEPS_OF = {PLUGIN_ENGINE: DEFAULT_STEP_ENGINE}


def get_step_overheads(engine: str) -> StepOverheads:
    """The overheads of an engine, by its name or a versioned one such as ``vllm-0.32``.

    Raises
    ------
    UnknownNameError
        If no engine of that name was ever fitted.
    """
    wanted = str(engine).strip().lower().replace("trtllm", "tensorrt-llm")
    wanted = _STEPS_OF.get(wanted, wanted)
    if wanted in STEP_OVERHEADS:
        return STEP_OVERHEADS[wanted]
    for name, found in STEP_OVERHEADS.items():
        if wanted.startswith(f"{name}-"):
            return found
    raise UnknownNameError("engine", str(engine), STEP_OVERHEADS, f"Fitted: {', '.join(STEP_OVERHEADS)}.")
