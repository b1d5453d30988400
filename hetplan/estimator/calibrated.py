"""The default estimator: the paper's roofline with what it leaves out, over calibrated rates.

Where it departs from Table 2 and eqs. 1-6 of ShuntServe:

- projections take n_heads * head_dim, not H; GQA, MLA and experts as the model has them;
- attention in prefill is causal and stays within a sliding window; sparse attention sees the tokens that its
  indexer chooses, and pays for scoring all of them;
- linear attention and Mamba-2 read and write a state of constant size in decode, and scan chunks in prefill;
- a layer without attention, or without MLP, pays for what it has;
- the LM head runs on the last token of each sequence, on the last stage; embedding and head weigh where they live;
- collectives have a link per group size; a send takes the slower of both network cards;
- norms, rotary, activation functions, KV writes, kernel and step overheads cost time;
- the first token comes from prefill, so S_out tokens take S_out - 1 decode steps;
- D_PP micro-batches are in flight, so that each stage works on a D_PP-th of the sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from hetplan.catalog.calibration import Calibration
from hetplan.catalog.dtypes import DTYPE_BITS, dtype_bytes
from hetplan.catalog.hardware import InstanceType, Link
from hetplan.catalog.model import Attention, LayerKind, Linear, ModelSpec
from hetplan.estimator.base import FloatArray, LayerwiseEstimator, Phase, batch_array
from hetplan.estimator.communication import all_gather_s, all_reduce_s, boundary_link, group_link, send_s
from hetplan.estimator.memory import (
    MAX_NUM_SEQS,
    compute_rate,
    engine_memory,
    kv_sequence_bytes,
    sampler_sequence_bytes,
)
from hetplan.estimator.operations import expected_experts
from hetplan.plan import Stage, StageMemory
from hetplan.problem.placement import PlacementProblem

# Kernels of half a layer beside its GEMMs and attention: norm with residual, and rotary with KV write or activation.
_SMALL_KERNELS = 2
# Elements moved per token by a norm with residual: the state, the residual and the result, twice each.
_NORM_ELEMENTS = 6
# Tokens of a chunk in the prefill of linear attention (the kernels of flash-linear-attention) and of Mamba-2
# (chunk_size of Nemotron-H).
_CHUNK_TOKENS = {"linear": 64, "mamba": 128}


@dataclass(frozen=True, slots=True)
class _Rates:
    """What one GPU of a group does per second, and what each launch costs."""

    flops: float
    attention_flops: float
    index_flops: float
    bytes_per_s: float
    kernel_s: float
    step_s: float
    link: Link | None


class CalibratedEstimator(LayerwiseEstimator):
    """Roofline per operation over calibrated rates, with overheads, micro-batches and the engine's memory."""

    name: ClassVar[str] = "calibrated"
    micro_batches: ClassVar[bool] = True

    def __init__(self, problem: PlacementProblem) -> None:
        super().__init__(problem)
        self._rates: dict[tuple[str, str, int], _Rates] = {}

    # ---- one engine step, the unit that everything is made of

    def _layer_step_s(
        self,
        model: ModelSpec,
        kind: int,
        machine: InstanceType,
        degree: int,
        tokens: FloatArray,
        attention_s: FloatArray,
    ) -> FloatArray:
        """(B,) seconds of one layer for ``tokens`` tokens in the step, with its attention already timed."""
        layer = model.layer_kinds[kind]
        rates = self._rates_of(model, machine, degree)
        element = dtype_bytes(model.base_dtype)
        seconds = attention_s
        for group in _gemm_groups(layer):
            seconds = seconds + _gemm_s(model, group, degree, tokens, rates, element)
        halves = (layer.attention.kind != "none") + layer.has_mlp
        moved = halves * _NORM_ELEMENTS * model.hidden_size * model.residual_streams * element
        moved += _mixed_bytes(model, layer, degree)
        moved += 1.5 * _activation_width(layer, degree) * element
        seconds = seconds + tokens * moved / rates.bytes_per_s + halves * _SMALL_KERNELS * rates.kernel_s
        if rates.link is not None:
            seconds = seconds + halves * all_reduce_s(tokens * model.hidden_size * element, rates.link, degree)
        return seconds

    def _end_step_s(
        self,
        model: ModelSpec,
        machine: InstanceType,
        degree: int,
        tokens: FloatArray,
        sampled: FloatArray,
        *,
        first: bool,
        last: bool,
    ) -> FloatArray:
        """(B,) seconds of a step beside the layers: engine, embedding, and head for ``sampled`` rows."""
        rates = self._rates_of(model, machine, degree)
        element = dtype_bytes(model.base_dtype)
        seconds = np.full_like(tokens, rates.step_s)
        row = model.hidden_size * element
        if first:
            seconds = seconds + rates.kernel_s + 2 * tokens * row / rates.bytes_per_s
            if rates.link is not None:
                seconds = seconds + all_reduce_s(tokens * row, rates.link, degree)
        if last:
            columns = -(-model.vocabulary_size // degree)
            scanned = (columns * model.hidden_size + sampled * (model.hidden_size + columns)) * element
            compute = 2 * sampled * columns * model.hidden_size / rates.attention_flops
            seconds = seconds + np.maximum(compute, scanned / rates.bytes_per_s) + 2 * rates.kernel_s
            seconds = seconds + _NORM_ELEMENTS * sampled * row / rates.bytes_per_s
            if rates.link is not None:
                seconds = seconds + all_gather_s(sampled * model.vocabulary_size * element, rates.link, degree)
        return seconds

    def _prefill_attention_s(
        self,
        model: ModelSpec,
        kind: int,
        machine: InstanceType,
        degree: int,
        sequences: FloatArray,
        tokens: float,
        context: float,
    ) -> FloatArray:
        """(B,) seconds of causal attention of ``tokens`` new tokens a sequence over ``context`` cached ones."""
        attention = model.layer_kinds[kind].attention
        rates = self._rates_of(model, machine, degree)
        if attention.kind == "none":
            return np.zeros_like(sequences)
        if attention.keeps_state:
            return _chunked_scan_s(model, attention, degree, sequences, tokens, rates)
        heads = -(-attention.heads // degree)
        widths = attention.head_dim + attention.value_head_dim
        pairs = _chosen_pairs(attention, tokens, context)
        new = 2 * heads * widths * tokens * dtype_bytes(model.base_dtype)
        cached = (tokens + context) * attention.kv_elements_per_token(degree) * dtype_bytes(model.kv_dtype)
        compute = sequences * 2 * heads * widths * pairs / rates.attention_flops
        seconds = np.maximum(compute, sequences * (new + cached) / rates.bytes_per_s) + rates.kernel_s
        if attention.index_heads is not None:
            scored = _attended_pairs(tokens, context, None)
            seconds = seconds + _indexer_s(attention, sequences, scored, tokens + context, rates)
        return seconds

    def _decode_attention_s(
        self, model: ModelSpec, kind: int, machine: InstanceType, degree: int, sequences: FloatArray, context: float
    ) -> FloatArray:
        """(B,) seconds of one decode step's attention over ``context`` tokens a sequence."""
        attention = model.layer_kinds[kind].attention
        rates = self._rates_of(model, machine, degree)
        if attention.kind == "none":
            return np.zeros_like(sequences)
        if attention.keeps_state:
            return _state_update_s(model, attention, degree, sequences, rates)
        heads = -(-attention.heads // degree)
        if attention.kind == "mla":
            widths = (attention.kv_latent_size or 0) + (attention.kv_lora_rank or 0)
        else:
            widths = attention.head_dim + attention.value_head_dim
        attended = attention.attended_entries(context)
        scanned = attended * attention.kv_elements_per_entry(degree) * dtype_bytes(model.kv_dtype)
        scanned += heads * widths * dtype_bytes(model.base_dtype)
        compute = sequences * 2 * heads * widths * attended / rates.attention_flops
        seconds = np.maximum(compute, sequences * scanned / rates.bytes_per_s) + rates.kernel_s
        if attention.index_heads is not None:
            seconds = seconds + _indexer_s(attention, sequences, context, context, rates)
        return seconds

    # ---- the protocol

    def layer_seconds(
        self,
        model: ModelSpec,
        kind: int,
        instance_type: InstanceType,
        *,
        tensor_parallel: int,
        batch: FloatArray,
        input_tokens: float,
        output_tokens: float,
        phase: Phase,
    ) -> FloatArray:
        where = (model, kind, instance_type, tensor_parallel)
        if phase == "prefill":
            attention = self._prefill_attention_s(*where, batch, input_tokens, 0.0)
            return self._layer_step_s(*where, batch * input_tokens, attention)
        steps = self.decode_steps(output_tokens)
        attention = self._decode_attention_s(*where, batch, _mean_context(input_tokens, output_tokens))
        return steps * self._layer_step_s(*where, batch, attention)

    def end_seconds(
        self,
        model: ModelSpec,
        instance_type: InstanceType,
        *,
        tensor_parallel: int,
        batch: FloatArray,
        input_tokens: float,
        output_tokens: float,
        first: bool,
        last: bool,
        phase: Phase,
    ) -> FloatArray:
        tokens, steps = (batch * input_tokens, 1.0) if phase == "prefill" else (batch, self.decode_steps(output_tokens))
        return steps * self._end_step_s(model, instance_type, tensor_parallel, tokens, batch, first=first, last=last)

    def boundary_seconds(
        self,
        model: ModelSpec,
        sender: InstanceType,
        receiver: InstanceType,
        *,
        same_node: bool,
        batch: ArrayLike,
        input_tokens: float,
        output_tokens: float,
        phase: Phase,
    ) -> FloatArray:
        """The hidden states of a micro-batch over the slower of both ends' links, at each step."""
        sequences = batch_array(batch)
        link = boundary_link(sender, receiver, same_node=same_node)
        tokens, steps = (input_tokens, 1.0) if phase == "prefill" else (1.0, self.decode_steps(output_tokens))
        message = sequences * tokens * model.hidden_size * model.residual_streams * dtype_bytes(model.base_dtype)
        return np.asarray(steps * send_s(message, link))

    def step_seconds(
        self,
        model: ModelSpec,
        stage: Stage,
        *,
        prefill_tokens: float,
        prefill_context: float,
        decode_sequences: float,
        decode_context: float,
    ) -> float:
        """One mixed iteration: every GEMM runs once over all tokens, attention runs per kind of work."""
        machine, degree = self.machine(stage), stage.tensor_parallel
        tokens = np.array([prefill_tokens + decode_sequences], dtype=np.float64)
        if tokens[0] <= 0:
            return 0.0
        sampled = np.array([decode_sequences + (1.0 if prefill_tokens > 0 else 0.0)])
        first, last = stage.layers[0] == 0, stage.layers[1] == model.layer_count
        total = self._end_step_s(model, machine, degree, tokens, sampled, first=first, last=last)
        for kind, count in enumerate(model.kind_counts_in(*stage.layers)):
            if count == 0:
                continue
            where = (model, kind, machine, degree)
            attention = np.zeros(1)
            if prefill_tokens > 0:
                attention = attention + self._prefill_attention_s(*where, np.ones(1), prefill_tokens, prefill_context)
            if decode_sequences > 0:
                attention = attention + self._decode_attention_s(*where, np.array([decode_sequences]), decode_context)
            total = total + count * self._layer_step_s(*where, tokens, attention)
        return float(total[0])

    def stage_memory(
        self,
        model: ModelSpec,
        instance_type: InstanceType,
        *,
        layers: tuple[int, int],
        tensor_parallel: int,
        first: bool,
        last: bool,
    ) -> StageMemory:
        return engine_memory(
            self.problem, model, instance_type, layers=layers, tensor_parallel=tensor_parallel, first=first, last=last
        )

    def sequence_bytes(
        self,
        model: ModelSpec,
        instance_type: InstanceType,
        *,
        layers: tuple[int, int],
        tensor_parallel: int,
        tokens: float,
        input_tokens: float,
        last: bool,
    ) -> float:
        """The sequence's KV cache, and its part of the sampler on the last stage."""
        sampler = sampler_sequence_bytes(self.problem, model, instance_type.gpu) if last else 0.0
        return kv_sequence_bytes(model, layers, tensor_parallel, tokens) + sampler

    def decode_steps(self, output_tokens: float) -> float:
        """One less than the tokens: the first comes from prefill."""
        return max(output_tokens - 1.0, 0.0)

    def batch_limit(self, instance_type: InstanceType) -> int:
        """The engine's max_num_seqs, which the plan sets."""
        return self.problem.max_num_seqs or MAX_NUM_SEQS

    def _rates_of(self, model: ModelSpec, machine: InstanceType, degree: int) -> _Rates:
        key = (machine.name, f"{model.compute_dtype}/{model.base_dtype}", degree)
        if key not in self._rates:
            calibration: Calibration = self.problem.calibration(machine.gpu.name)
            gpu = machine.gpu
            self._rates[key] = _Rates(
                flops=compute_rate(calibration, gpu, gpu.runs_as(model.compute_dtype)).value,
                attention_flops=compute_rate(calibration, gpu, gpu.runs_as(model.base_dtype)).value,
                index_flops=compute_rate(calibration, gpu, gpu.runs_as("fp8")).value,
                bytes_per_s=calibration.memory_bytes_per_s.value,
                kernel_s=calibration.kernel_s.value,
                step_s=calibration.step_s.value,
                link=group_link(machine, degree, calibration) if degree > 1 else None,
            )
        return self._rates[key]


def _gemm_groups(layer: LayerKind) -> Iterator[list[Linear]]:
    """The matrices of a layer as the GEMMs that run: fused ones together."""
    groups: dict[str, list[Linear]] = {}
    for matrix in layer.linears:
        groups.setdefault(matrix.fused or matrix.name, []).append(matrix)
    yield from groups.values()


def _gemm_s(
    model: ModelSpec, group: list[Linear], degree: int, tokens: FloatArray, rates: _Rates, element: float
) -> FloatArray:
    """(B,) seconds of one GEMM over ``tokens`` rows; experts take the rows routed to them."""
    head = group[0]
    shapes = [matrix.shape(degree) for matrix in group]
    inputs, outputs = shapes[0][0], sum(columns for _, columns in shapes)
    weights = sum(m.weight_bytes(degree, model.base_dtype, model.quantization) for m in group) / head.experts
    touched = expected_experts(head.experts, head.active_experts, tokens)
    scanned = touched * weights + tokens * head.active_experts * (inputs + outputs) * element
    # Matrices left unquantised, such as routers, multiply in the base type.
    quantized = head.quantized and model.quantization is not None
    flops = rates.flops if quantized or DTYPE_BITS[model.compute_dtype] >= 16 else rates.attention_flops
    compute = 2 * tokens * head.active_experts * inputs * outputs / flops
    return np.maximum(compute, scanned / rates.bytes_per_s)


def _activation_width(layer: LayerKind, degree: int) -> int:
    """Elements per token on both sides of the activation functions: all gate-and-up outputs."""
    return sum(
        matrix.shape(degree)[1] * matrix.active_experts
        for matrix in layer.linears
        if matrix.fused is not None and matrix.fused.endswith("gate_up")
    )


def _mixed_bytes(model: ModelSpec, layer: LayerKind, degree: int) -> float:
    """Bytes per token between the projections and the attention: rotary and KV write, or the short convolution."""
    attention, element = layer.attention, dtype_bytes(model.base_dtype)
    heads = -(-attention.heads // degree)
    if attention.kind == "none":
        return 0.0
    if attention.keeps_state:
        groups = max(1, -(-attention.kv_heads // degree))
        # Values, their gate, keys and queries are read and written once more.
        return 4 * (heads * attention.value_head_dim + groups * attention.head_dim) * element
    kv_elements = attention.kv_elements_per_token(degree)
    written = kv_elements * dtype_bytes(model.kv_dtype) + attention.index_bytes_per_token
    return 2 * (heads * attention.head_dim + kv_elements) * element + written


def _state_update_s(
    model: ModelSpec, attention: Attention, degree: int, sequences: FloatArray, rates: _Rates
) -> FloatArray:
    """(B,) seconds of one decode step of linear attention or Mamba-2: the whole state is read and written.

    Multiply-adds per element of the state: decay and outer product, and the product with the query; the delta
    rule also takes the product with the key away first.
    """
    products = 3 if attention.kind == "linear" else 2
    elements = -(-attention.heads // degree) * attention.head_dim * attention.value_head_dim
    moved = 2 * attention.state_bytes_per_sequence(degree, model.base_dtype)
    compute = sequences * 2 * products * elements / rates.attention_flops
    return np.maximum(compute, sequences * moved / rates.bytes_per_s) + rates.kernel_s


def _chunked_scan_s(
    model: ModelSpec, attention: Attention, degree: int, sequences: FloatArray, tokens: float, rates: _Rates
) -> FloatArray:
    """(B,) seconds of linear attention or Mamba-2 over ``tokens`` new tokens a sequence.

    With chunks of C tokens, keys of d_k and values of d_v elements, each token and head takes 2 C (d_k + d_v)
    FLOPs within its chunk and 4 d_k d_v with the state (Dao & Gu, "Transformers are SSMs", 2024, section 6). The
    delta rule's triangular system adds 2 C (2 d_k + d_v) and 2 d_k d_v (Yang et al., "Parallelizing Linear
    Transformers with the Delta Rule over Sequence Length", 2024). Each chunk's state is written and read.
    """
    chunk = _CHUNK_TOKENS[attention.kind]
    key, value = attention.head_dim, attention.value_head_dim
    heads, groups = -(-attention.heads // degree), max(1, -(-attention.kv_heads // degree))
    flops = 2 * chunk * (key + value) + 4 * key * value
    if attention.kind == "linear":
        flops += 2 * chunk * (2 * key + value) + 2 * key * value
    chunks = -(-tokens // chunk)
    moved = tokens * 2 * (heads * value + groups * key) * dtype_bytes(model.base_dtype)
    moved += 2 * chunks * attention.state_bytes_per_sequence(degree, model.base_dtype)
    compute = sequences * tokens * heads * flops / rates.attention_flops
    return np.maximum(compute, sequences * moved / rates.bytes_per_s) + rates.kernel_s


def _indexer_s(attention: Attention, sequences: FloatArray, pairs: float, tokens: float, rates: _Rates) -> FloatArray:
    """(B,) seconds of scoring ``pairs`` of queries and index keys, of ``tokens`` kept tokens a sequence."""
    heads, size = attention.index_heads or 0, attention.index_head_dim or 0
    # A compressed layer has one key for several tokens; its bytes are per token already.
    tokens_per_key = attention.compression_tokens or 1
    # Keys of 8 bits are multiplied in 8 bits, each with its scale.
    narrow = attention.index_bytes_per_token * tokens_per_key < 2 * size
    flops = rates.index_flops if narrow else rates.attention_flops
    compute = sequences * 2 * heads * size * pairs / tokens_per_key / flops
    moved = tokens * attention.index_bytes_per_token
    return np.maximum(compute, sequences * moved / rates.bytes_per_s) + rates.kernel_s


def _chosen_pairs(attention: Attention, tokens: float, context: float) -> float:
    """Query-key pairs of causal attention within the window, beyond it where compressed, and of the top k only."""
    limits = [n for n in (attention.window_tokens, attention.top_k_tokens) if n is not None]
    ratio = attention.compression_tokens
    if ratio is None:
        return _attended_pairs(tokens, context, min(limits, default=None))
    near = _attended_pairs(tokens, context, attention.window_tokens)
    far = None if attention.top_k_tokens is None else attention.top_k_tokens * ratio
    return near + _attended_pairs(tokens, context, far) / ratio


def _attended_pairs(tokens: float, context: float, window: int | None) -> float:
    """Query-key pairs of causal attention: new tokens see the cached ones and themselves, within the window."""
    if window is None or tokens + context <= window:
        return tokens * context + tokens * (tokens + 1) / 2
    growing = max(0.0, window - context)
    return growing * context + growing * (growing + 1) / 2 + (tokens - growing) * window


def _mean_context(input_tokens: float, output_tokens: float) -> float:
    """Mean tokens attended over the decode steps t = 1..S_out - 1, each over S_in + t tokens."""
    return input_tokens + output_tokens / 2
