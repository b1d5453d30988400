"""What one GPU of a stage holds besides the KV cache, as vLLM accounts for it, and the rates that calibrations give."""

from __future__ import annotations

from hetplan.catalog.calibration import Calibration, Quantity
from hetplan.catalog.dtypes import DTYPE_BITS, Dtype, dtype_bytes
from hetplan.catalog.engines import engine_defaults
from hetplan.catalog.hardware import GpuSpec, InstanceType
from hetplan.catalog.model import ModelSpec
from hetplan.estimator.base import sum_over_layers
from hetplan.plan import StageMemory
from hetplan.problem.placement import PlacementProblem
from hetplan.units import GIB

# The driver of an H100 reports 81,559 MiB, the allocator 79.18 GiB = 81,080 MiB: 0.6% stays with the
# driver. Measured on that GPU (engine logs published by llm-d-planner), assumed of the others.
_ALLOCATOR_SHARE = 81_080 / 81_559

# CUDA context and libraries outside the allocator, from the same logs: 0.13 GiB alone, 0.55 GiB with NCCL.
_NON_TORCH_BYTES = int(0.13 * GIB)
_NON_TORCH_GROUP_BYTES = int(0.42 * GIB)

# Peak activation of the sampler, bytes per (sequence x vocabulary entry): logits and sorted logits in
# fp32, indices, probabilities and their cumulative sums. The same logs give 38.2 over vocabularies of
# 128,256, 151,936 and 201,088 at 1,024 sequences, beside 1.4 hidden states per token of the step.
_SAMPLER_BYTES = 38.2
_HIDDEN_COPIES = 1.4

# Most sequences that a plan keeps in flight unless told otherwise: vLLM's largest default.
MAX_NUM_SEQS = 1024


def engine_memory(
    problem: PlacementProblem,
    model: ModelSpec,
    instance_type: InstanceType,
    *,
    layers: tuple[int, int],
    tensor_parallel: int,
    first: bool,
    last: bool,
) -> StageMemory:
    """Memory of one GPU of a stage under vLLM.

    Parameters
    ----------
    problem : PlacementProblem
        Gives the utilisation and the batch limits.
    layers : (start, stop)
        Layers of the stage.
    first, last : bool
        Whether the stage holds the embedding, and the head.

    Returns
    -------
    StageMemory
        Usable bytes (utilisation of what the allocator sees), weights, peak activation, other.
    """
    gpu = instance_type.gpu
    defaults = engine_defaults(gpu)
    kinds = range(len(model.layer_kinds))
    weights = sum_over_layers(model, layers, [model.layer_weight_bytes(k, tensor_parallel) for k in kinds])
    if first:
        weights += model.embedding_bytes(tensor_parallel)
    if last:
        weights += model.head_bytes(tensor_parallel, with_embedding=first)
    step_tokens = problem.max_num_batched_tokens or defaults.max_num_batched_tokens
    sequences = problem.max_num_seqs or defaults.max_num_seqs
    element = dtype_bytes(model.base_dtype)
    hidden = _HIDDEN_COPIES * step_tokens * model.hidden_size * element
    peak = hidden + step_tokens * _widest_pair(model, tensor_parallel) * element
    if last:
        peak = max(peak, hidden + _SAMPLER_BYTES * sequences * model.vocabulary_size)
    return StageMemory(
        usable_bytes=int(problem.gpu_memory_utilization * _ALLOCATOR_SHARE * gpu.memory_bytes),
        weight_bytes=int(weights),
        activation_bytes=int(peak),
        other_bytes=_NON_TORCH_BYTES + (_NON_TORCH_GROUP_BYTES if tensor_parallel > 1 else 0),
    )


def sampler_sequence_bytes(problem: PlacementProblem, model: ModelSpec, gpu: GpuSpec) -> float:
    """Bytes that one more sequence adds to the sampler on a GPU of the last stage.

    `engine_memory` reserves the sampler at the engine's default for the GPU; where a plan may go beyond it, every
    sequence is charged, which is a margin for those below.
    """
    if problem.max_num_seqs is not None or engine_defaults(gpu).max_num_seqs >= MAX_NUM_SEQS:
        return 0.0
    return _SAMPLER_BYTES * model.vocabulary_size


def _widest_pair(model: ModelSpec, tensor_parallel: int) -> int:
    """Largest input + output width of a GEMM, per token, on one GPU: fused groups count together."""
    widest = 0
    for kind in model.layer_kinds:
        outputs: dict[str, int] = {}
        for matrix in kind.linears:
            inputs, columns = matrix.shape(tensor_parallel)
            group = matrix.fused or matrix.name
            outputs[group] = outputs.get(group, 0) + columns * matrix.active_experts
            widest = max(widest, inputs * matrix.active_experts + outputs[group])
    return widest


def kv_sequence_bytes(model: ModelSpec, layers: tuple[int, int], tensor_parallel: int, tokens: float) -> float:
    """KV-cache bytes of one sequence of ``tokens`` on one GPU of a stage."""
    kinds = range(len(model.layer_kinds))
    per_kind = [model.layer_kv_bytes_per_sequence(k, tokens, tensor_parallel) for k in kinds]
    return sum_over_layers(model, layers, per_kind)


def compute_rate(calibration: Calibration, gpu: GpuSpec, dtype: Dtype) -> Quantity:
    """Effective FLOP/s of a GPU in a type: calibrated, or the 16-bit rate scaled by the datasheet's ratio.

    A type that the calibration lacks takes the other 16-bit type's rate, or that rate times the ratio of
    the datasheet's peaks; the source then says so.
    """
    if dtype in calibration.compute_flops:
        return calibration.compute_flops[dtype]
    for base in ("bf16", "fp16"):
        known = calibration.compute_flops.get(base)
        if known is None:
            continue
        if DTYPE_BITS[dtype] == DTYPE_BITS[base]:
            return known
        peak, base_peak = gpu.dense_flops.get(dtype), gpu.dense_flops.get(base)
        if peak is not None and base_peak is not None:
            return Quantity(
                value=known.value * peak / base_peak,
                source=known.source if known.source == "datasheet" else "assumed",
                reference=f"{base} rate ({known.reference}) x datasheet ratio of {dtype} to {base}",
            )
        return known
    return next(iter(calibration.compute_flops.values()))
