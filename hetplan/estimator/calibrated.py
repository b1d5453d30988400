"""The default estimator: fitted kernels, composed into engine steps, with overheads and the engine's memory.

Where it departs from Table 2 and eqs. 1-6 of ShuntServe:

- each operation takes the time of its kernel as fitted on the GPU (`hetplan.estimator.gemm`, `.attention`,
  `.collectives`), not the larger of two ratios;
- projections take n_heads * head_dim, not H; GQA, MLA and experts as the model has them;
- attention in prefill is causal and stays within a sliding window; sparse attention sees the tokens that its
  indexer chooses, and pays for scoring all of them;
- linear attention and Mamba-2 read and write a state of constant size in decode, and scan chunks in prefill;
- a layer without attention, or without MLP, pays for what it has;
- the LM head runs on the last token of each sequence, on the last stage; embedding and head weigh where they live;
- a send takes the slower of both network cards, and of the zone link between them where there is one;
- norms, rotary, activation functions, KV writes and the engine's own work cost time;
- the first token comes from prefill, so S_out tokens take S_out - 1 decode steps;
- D_PP micro-batches are in flight, so that each stage works on a D_PP-th of the sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from hetplan.catalog.dtypes import dtype_bytes
from hetplan.catalog.hardware import InstanceType, Link
from hetplan.catalog.model import Attention, LayerKind, ModelSpec
from hetplan.estimator.attention import decode_attention_seconds, prefill_attention_seconds
from hetplan.estimator.base import FloatArray, LayerwiseEstimator, Phase, batch_array
from hetplan.estimator.communication import boundary_link, send_s
from hetplan.estimator.identity import Same
from hetplan.estimator.kernels import GroupKernels, group_kernels
from hetplan.estimator.memory import (
    MAX_NUM_SEQS,
    engine_memory,
    kv_sequence_bytes,
    sampler_sequence_bytes,
)
from hetplan.estimator.recurrent import (
    attended_entries,
    attended_pairs,
    chosen_pairs,
    chunked_scan_s,
    indexer_s,
    state_update_s,
)
from hetplan.plan import Stage, StageMemory
from hetplan.problem.placement import PlacementProblem

# Kernels of half a layer beside its GEMMs and attention: norm with residual, and rotary with KV write or activation.
_SMALL_KERNELS = 2
# Fewer sequences than this in a step are none: it keeps logarithms of counts finite.
_NOTHING = 1e-9
# Elements moved per token by a norm with residual: the state, the residual and the result, twice each.
_NORM_ELEMENTS = 6


@dataclass(frozen=True, slots=True)
class StepWork:
    """What an engine step works on, (N,) each: prompts of so many new tokens after so many cached ones, and
    sequences that decode one token each after ``context`` cached ones. Counts may be fractions: shares of a step.
    """

    prompts: FloatArray
    prompt_tokens: FloatArray
    prompt_context: FloatArray
    sequences: FloatArray
    context: FloatArray
    prefills: bool
    decodes: bool

    @property
    def tokens(self) -> FloatArray:
        return self.prompts * self.prompt_tokens + self.sequences

    @property
    def sampled(self) -> FloatArray:
        """Rows of hidden states that the LM head sees."""
        return self.prompts + self.sequences


def step_work(
    *,
    prompts: ArrayLike = 0.0,
    prompt_tokens: ArrayLike = 0.0,
    prompt_context: ArrayLike = 0.0,
    sequences: ArrayLike = 0.0,
    context: ArrayLike = 0.0,
) -> StepWork:
    """A `StepWork` of broadcast values."""
    given = [
        np.asarray(value, dtype=np.float64) for value in (prompts, prompt_tokens, prompt_context, sequences, context)
    ]
    count = max(value.size for value in given)
    # As numpy.broadcast_arrays, which takes ten times as long.
    new, each, cached, decoding, reach = (
        value if value.shape == (count,) else np.full(count, value.item()) for value in given
    )
    prefills, decodes = bool(new.max() > 0), bool(decoding.max() > 0)
    # Steps without prompts, or without decoding, stand beside others that have some: their attention takes no time.
    if prefills:
        new, each = np.maximum(new, _NOTHING), np.maximum(each, 1.0)
    if decodes:
        decoding, reach = np.maximum(decoding, _NOTHING), np.maximum(reach, 1.0)
    return StepWork(new, each, cached, decoding, reach, prefills, decodes)


class CalibratedEstimator(LayerwiseEstimator):
    """Fitted kernels, overheads, micro-batches and the engine's memory."""

    name: ClassVar[str] = "calibrated"
    micro_batches: ClassVar[bool] = True

    def __init__(self, problem: PlacementProblem) -> None:
        super().__init__(problem)
        self._kernels: dict[tuple[str, str, int], GroupKernels] = {}

    # ---- one engine step, the unit that everything is made of

    def layer_step_s(
        self, model: ModelSpec, kind: int, machine: InstanceType, degree: int, work: StepWork
    ) -> FloatArray:
        """(N,) seconds of one layer of a kind in a step."""
        layer, kernels = model.layer_kinds[kind], self.kernels(model, machine, degree)
        seconds = self.layer_tokens_s(model, kind, machine, degree, work.tokens)
        if layer.attention.kind != "none":
            if work.prefills:
                seconds = seconds + _prefill_attention_s(model, layer, work, kernels) * (work.prompts > _NOTHING)
            if work.decodes:
                seconds = seconds + _decode_attention_s(model, layer, work, kernels) * (work.sequences > _NOTHING)
        if work.prefills:
            # Where prompts are in a step, kernels are launched one by one, and the host may be the slower.
            floor = kernels.overheads.prefill_layer_s * (work.prompts > _NOTHING)
            seconds = np.maximum(seconds, floor)
        return seconds + kernels.overheads.layer_s

    def layer_tokens_s(
        self, model: ModelSpec, kind: int, machine: InstanceType, degree: int, tokens: FloatArray
    ) -> FloatArray:
        """(N,) seconds of what a layer does to each token of a step, whatever it belongs to: all but attention."""
        layer, kernels = model.layer_kinds[kind], self.kernels(model, machine, degree)
        halves = (layer.attention.kind != "none") + layer.has_mlp
        element = kernels.element_bytes
        moved = halves * _NORM_ELEMENTS * model.hidden_size * model.residual_streams * element
        moved += _mixed_bytes(model, layer, degree)
        moved += 1.5 * _activation_width(layer, degree) * element
        seconds = kernels.linear_seconds(kind, tokens)
        seconds = seconds + tokens * (moved / kernels.bytes_per_s) + halves * _SMALL_KERNELS * kernels.kernel_s
        if degree > 1:
            seconds = seconds + halves * kernels.all_reduce_seconds(tokens * (model.hidden_size * element))
        return seconds

    def layer_attention_s(
        self, model: ModelSpec, kind: int, machine: InstanceType, degree: int, work: StepWork, phase: Phase
    ) -> FloatArray:
        """(N,) seconds of a layer's attention for the part of a step that is of a phase."""
        layer, kernels = model.layer_kinds[kind], self.kernels(model, machine, degree)
        if layer.attention.kind == "none":
            return np.zeros_like(work.tokens)
        one = _prefill_attention_s if phase == "prefill" else _decode_attention_s
        return one(model, layer, work, kernels)

    def end_step_s(
        self,
        model: ModelSpec,
        machine: InstanceType,
        degree: int,
        work: StepWork,
        *,
        first: bool,
        last: bool,
    ) -> FloatArray:
        """(N,) seconds of a step beside the layers: engine, embedding, and head."""
        kernels = self.kernels(model, machine, degree)
        overheads = kernels.overheads
        tokens, sampled = work.tokens, work.sampled
        seconds = np.full_like(tokens, overheads.step_s + overheads.rank_step_s * (degree - 1))
        if work.prefills:
            seconds = seconds + overheads.prefill_step_s * (work.prompts > _NOTHING)
        row = model.hidden_size * kernels.element_bytes
        if first:
            seconds = seconds + kernels.kernel_s + tokens * (2 * row / kernels.bytes_per_s)
            if degree > 1:
                seconds = seconds + kernels.all_reduce_seconds(tokens * row)
        if last:
            seconds = seconds + kernels.head_seconds(sampled) + kernels.kernel_s
            seconds = seconds + sampled * (_NORM_ELEMENTS * row / kernels.bytes_per_s)
            if degree > 1:
                gathered = sampled * (model.vocabulary_size * kernels.element_bytes)
                seconds = seconds + kernels.all_gather_seconds(gathered)
        return seconds

    def stage_step_s(
        self, model: ModelSpec, machine: InstanceType, layers: tuple[int, int], degree: int, work: StepWork
    ) -> FloatArray:
        """(N,) seconds of a step in a stage, sends apart."""
        first, last = layers[0] == 0, layers[1] == model.layer_count
        seconds = self.end_step_s(model, machine, degree, work, first=first, last=last)
        for kind, count in enumerate(model.kind_counts_in(*layers)):
            if count > 0:
                seconds = seconds + count * self.layer_step_s(model, kind, machine, degree, work)
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
        work, steps = self._phase_work(batch, input_tokens, output_tokens, phase)
        return steps * self.layer_step_s(model, kind, instance_type, tensor_parallel, work)

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
        work, steps = self._phase_work(batch, input_tokens, output_tokens, phase)
        return steps * self.end_step_s(model, instance_type, tensor_parallel, work, first=first, last=last)

    def _phase_work(
        self, batch: FloatArray, input_tokens: float, output_tokens: float, phase: Phase
    ) -> tuple[StepWork, float]:
        """The step that a phase of a static batch repeats, and how often: decode steps at their mean context."""
        if phase == "prefill":
            return step_work(prompts=batch, prompt_tokens=input_tokens), 1.0
        context = input_tokens + output_tokens / 2
        return step_work(sequences=batch, context=context), self.decode_steps(output_tokens)

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
        between: Link | None = None,
    ) -> FloatArray:
        """The hidden states of a micro-batch over the slowest link on the way, at each step."""
        work, steps = self._phase_work(batch_array(batch), input_tokens, output_tokens, phase)
        return steps * self.send_step_s(model, sender, receiver, work, same_node=same_node, between=between)

    def send_step_s(
        self,
        model: ModelSpec,
        sender: InstanceType,
        receiver: InstanceType,
        work: StepWork,
        *,
        same_node: bool,
        between: Link | None = None,
    ) -> FloatArray:
        """(N,) seconds of sending a step's hidden states to the next stage."""
        link = boundary_link(sender, receiver, same_node=same_node, between=between)
        return send_s(work.tokens * _row_bytes(model), link)

    def sent_bytes(self, model: ModelSpec, *, input_tokens: float, output_tokens: float) -> float:
        return (input_tokens + self.decode_steps(output_tokens)) * _row_bytes(model)

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
        if prefill_tokens + decode_sequences <= 0:
            return 0.0
        work = step_work(
            prompts=1.0 if prefill_tokens > 0 else 0.0,
            prompt_tokens=prefill_tokens,
            prompt_context=prefill_context,
            sequences=decode_sequences,
            context=decode_context,
        )
        return float(self.stage_step_s(model, self.machine(stage), stage.layers, stage.tensor_parallel, work)[0])

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

    def kernels(self, model: ModelSpec, machine: InstanceType, degree: int) -> GroupKernels:
        """The kernels of a group, bound once."""
        key = (machine.name, model.name, degree)
        known = self._kernels.get(key)
        if known is None or known.model is not model:
            calibration = self.problem.calibration(machine.gpu.name)
            overheads = self.problem.step_overheads
            known = group_kernels(Same(model), Same(machine), degree, Same(calibration), Same(overheads))
            self._kernels[key] = known
        return known


def _prefill_attention_s(model: ModelSpec, layer: LayerKind, work: StepWork, kernels: GroupKernels) -> FloatArray:
    """(N,) seconds of causal attention of the prompts' new tokens over their cached ones and themselves."""
    attention, degree = layer.attention, kernels.degree
    if attention.keeps_state:
        return chunked_scan_s(model, attention, work.prompts, work.prompt_tokens, kernels)
    kv_heads = attention.heads if attention.kind == "mla" else attention.kv_heads
    seconds = prefill_attention_seconds(
        kernels.prefill_attention,
        sequences=work.prompts,
        tokens=work.prompt_tokens,
        context=_reach(attention, work.prompt_tokens + work.prompt_context),
        heads=-(-attention.heads // degree),
        kv_heads=max(1, -(-kv_heads // degree)),
        head_dim=attention.head_dim,
        value_head_dim=attention.value_head_dim,
        pairs=chosen_pairs(attention, work.prompt_tokens, work.prompt_context),
        kv_element_bytes=kernels.kv_element_bytes,
        element_bytes=kernels.element_bytes,
    )
    if attention.index_heads is not None:
        scored = attended_pairs(work.prompt_tokens, work.prompt_context, None)
        kept = work.prompt_tokens + work.prompt_context
        seconds = seconds + indexer_s(attention, work.prompts, scored, kept, kernels)
    return seconds


def _reach(attention: Attention, tokens: FloatArray) -> FloatArray:
    """Tokens that the last of ``tokens`` attends to."""
    return tokens if attention.window_tokens is None else np.minimum(tokens, float(attention.window_tokens))


def _decode_attention_s(model: ModelSpec, layer: LayerKind, work: StepWork, kernels: GroupKernels) -> FloatArray:
    """(N,) seconds of one decode step's attention."""
    attention, degree = layer.attention, kernels.degree
    if attention.keeps_state:
        return state_update_s(model, attention, work.sequences, kernels)
    heads = -(-attention.heads // degree)
    attended = attended_entries(attention, work.context)
    if attention.kind == "mla":
        # Absorbed into the query: every head reads the one latent, whose first part is the value.
        kv_heads, head_dim, value_dim = 1, attention.kv_latent_size or 0, attention.kv_lora_rank or 0
    else:
        kv_heads = max(1, -(-attention.kv_heads // degree))
        head_dim, value_dim = attention.head_dim, attention.value_head_dim
    seconds = decode_attention_seconds(
        kernels.decode_attention,
        sequences=work.sequences,
        context=attended,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=value_dim,
        kv_bytes=attention.kv_elements_per_entry(degree) * kernels.kv_element_bytes,
        kv_element_bytes=kernels.kv_element_bytes,
    )
    if attention.index_heads is not None:
        seconds = seconds + indexer_s(attention, work.sequences, work.context, work.context, kernels)
    return seconds


def _activation_width(layer: LayerKind, degree: int) -> int:
    """Elements per token on both sides of the activation functions: all gate-and-up outputs."""
    return sum(
        matrix.shape(degree)[1] * matrix.active_experts
        for matrix in layer.linears
        if matrix.fused is not None and matrix.fused.endswith("gate_up")
    )


def _row_bytes(model: ModelSpec) -> float:
    """Bytes of a token's hidden states between two layers."""
    return model.hidden_size * model.residual_streams * dtype_bytes(model.base_dtype)


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
