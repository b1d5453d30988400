"""What one GPU of a stage holds besides the KV cache, as vLLM accounts for it."""

from __future__ import annotations

import math

from hetplan.catalog.dtypes import dtype_bytes
from hetplan.catalog.engines import block_tokens, engine_defaults
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

# MXFP4 experts are laid out in tiles of so many inputs: the same logs show 13.47 and 64.38 GiB for gpt-oss 20b and
# 120b, whose 2,880 inputs are stored as 3,072 (13.45 and 64.55 GiB).
_MXFP4_INPUTS = 256

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
        Usable bytes (utilisation of what the allocator sees), weights, peak activation, other, and what is kept for a
        second engine.
    """
    gpu = instance_type.gpu
    defaults = engine_defaults(gpu)
    kinds = range(len(model.layer_kinds))
    held = [model.layer_weight_bytes(k, tensor_parallel) + _padding_bytes(model, k, tensor_parallel) for k in kinds]
    weights = sum_over_layers(model, layers, held)
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
    alone = StageMemory(
        usable_bytes=int(problem.gpu_memory_utilization * _ALLOCATOR_SHARE * gpu.memory_bytes),
        weight_bytes=int(weights),
        activation_bytes=int(peak),
        other_bytes=_NON_TORCH_BYTES + (_NON_TORCH_GROUP_BYTES if tensor_parallel > 1 else 0),
    )
    return with_handover(
        problem, model, instance_type, alone, layers=layers, tensor_parallel=tensor_parallel, layer_bytes=max(held)
    )


def with_handover(
    problem: PlacementProblem,
    model: ModelSpec,
    instance_type: InstanceType,
    alone: StageMemory,
    *,
    layers: tuple[int, int],
    tensor_parallel: int,
    layer_bytes: float,
) -> StageMemory:
    """The memory of a stage with room for a second engine beside it, where the problem asks for that.

    The second engine uses the same weights, and needs activations and a context of its own and a slice of KV cache.
    The slice is counted layer by layer in whole bytes, so that a stage's is the sum of its layers'.

    Parameters
    ----------
    alone : StageMemory
        Of the stage without a second engine.
    layer_bytes : float
        Weights of the largest layer that may be added to the stage.
    """
    if problem.handover_sequences == 0:
        return alone
    # An engine hands cache out in whole blocks, and keeps one of them empty.
    block = block_tokens(instance_type)
    longest = -(-problem.longest_request_tokens // block) * block
    slices = [
        problem.handover_sequences * math.ceil(model.layer_kv_bytes_per_sequence(kind, longest, tensor_parallel))
        + math.ceil(model.layer_kv_bytes_per_sequence(kind, block, tensor_parallel))
        for kind in range(len(model.layer_kinds))
    ]
    more = problem.handover_layers * (int(layer_bytes) + max(slices))
    start = int(sum_over_layers(model, layers, slices))
    return alone.replace(
        reserved_bytes=alone.activation_bytes + alone.other_bytes + start + more, start_kv_cache_bytes=start
    )


def _padding_bytes(model: ModelSpec, kind: int, tensor_parallel: int) -> int:
    """Bytes that the engine adds to a layer's weights so that its kernels' tiles divide them."""
    stored = model.quantization
    if stored is None or stored.method != "mxfp4":
        return 0
    added = 0
    for matrix in model.layer_kinds[kind].linears:
        if matrix.quantized:
            inputs, outputs = matrix.shape(tensor_parallel)
            padded = -(-inputs // _MXFP4_INPUTS) * _MXFP4_INPUTS
            added += matrix.experts * (stored.matrix_bytes(padded, outputs) - stored.matrix_bytes(inputs, outputs))
    return added


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
