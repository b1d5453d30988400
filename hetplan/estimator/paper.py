"""The estimator of the paper, to the letter: Table 2 and equations 1 to 6 of ShuntServe.

| symbol | here |
|---|---|
| FLOPS, Mem. BW. | calibration's compute_flops and memory_bytes_per_s |
| alpha_intra, beta_intra | the link of the whole node's group, one for every degree |
| alpha_inter, beta_inter | the sender's network card, or a slower zone link on the way |
| M_i | memory of the stage's GPUs, all of it |
| M_activation | the largest activation tensor of a forward pass over the batch's prompts |

The full batch B is in every stage (eq. 5); embedding and head take no memory; logits are computed
for every prompt token; nothing else has a cost. GPUs are not asked whether they have the type.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from hetplan.catalog.dtypes import dtype_bytes
from hetplan.catalog.hardware import InstanceType, Link
from hetplan.catalog.model import ModelSpec
from hetplan.estimator.base import FloatArray, LayerwiseEstimator, Phase, batch_array, sum_over_layers
from hetplan.estimator.communication import all_reduce_s, group_link, send_s, slowest_link
from hetplan.estimator.memory import with_handover
from hetplan.estimator.operations import FeedForward, Work, decode_work, feed_forwards, logits_work, prefill_work
from hetplan.estimator.rates import compute_rate
from hetplan.plan import Stage, StageMemory
from hetplan.problem.placement import PlacementProblem

# Eq. 6 has no limit but memory; this one only bounds the tables.
_BATCH_LIMIT = 16384


class PaperEstimator(LayerwiseEstimator):
    """Table 2 and eqs. 1-6 of ShuntServe, literally."""

    name: ClassVar[str] = "paper"
    micro_batches: ClassVar[bool] = False

    def __init__(self, problem: PlacementProblem) -> None:
        super().__init__(problem)
        self._mlps: dict[int, list[FeedForward]] = {}

    def _feed_forwards(self, model: ModelSpec, kind: int) -> list[FeedForward]:
        """The MLPs of a layer kind, looked up once for the problem's own model."""
        if model is not self.problem.model:
            return feed_forwards(model, model.layer_kinds[kind])
        if kind not in self._mlps:
            self._mlps[kind] = feed_forwards(model, model.layer_kinds[kind])
        return self._mlps[kind]

    def _seconds(self, model: ModelSpec, instance_type: InstanceType, work: Work) -> FloatArray:
        """Eq. 1: the slower of computing and scanning."""
        calibration = self.problem.calibration(instance_type.gpu.name)
        flops = compute_rate(calibration, instance_type.gpu, model.compute_dtype).value
        compute = work.flops / flops
        scan = work.elements * dtype_bytes(model.weight_dtype) / calibration.memory_bytes_per_s.value
        return np.maximum(compute, scan)

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
        layer = model.layer_kinds[kind]
        h = model.hidden_size
        kv = layer.attention.kv_heads * layer.attention.head_dim
        mlps = self._feed_forwards(model, kind)
        if phase == "prefill":
            rows = prefill_work(h, kv, mlps, batch, input_tokens, tensor_parallel)
            steps, tokens = 1.0, batch * input_tokens
        else:
            rows = decode_work(h, kv, mlps, batch, input_tokens, output_tokens, tensor_parallel)
            steps, tokens = output_tokens, batch
        seconds = np.zeros_like(batch)
        for work in rows:
            seconds = seconds + self._seconds(model, instance_type, work)
        if tensor_parallel > 1:
            calibration = self.problem.calibration(instance_type.gpu.name)
            link = group_link(instance_type, instance_type.gpu_count, calibration)
            message = tokens * h * dtype_bytes(model.base_dtype)
            seconds = seconds + steps * 2 * all_reduce_s(message, link, tensor_parallel)
        return seconds

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
        if not last:
            return np.zeros_like(batch)
        rows, steps = (input_tokens, 1.0) if phase == "prefill" else (1.0, output_tokens)
        work = logits_work(model.hidden_size, model.vocabulary_size, rows, steps, batch, tensor_parallel)
        return self._seconds(model, instance_type, work)

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
        """Eq. 3 over the sender's network card; decode pays it at each of the S_out steps."""
        sequences = batch_array(batch)
        link = sender.pair_link if same_node else slowest_link([sender.inter_node_link], between)
        tokens, steps = (input_tokens, 1.0) if phase == "prefill" else (1.0, output_tokens)
        message = sequences * tokens * model.hidden_size * dtype_bytes(model.base_dtype)
        return np.asarray(steps * send_s(message, link))

    def sent_bytes(self, model: ModelSpec, *, input_tokens: float, output_tokens: float) -> float:
        return (input_tokens + output_tokens) * model.hidden_size * dtype_bytes(model.base_dtype)

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
        """A mixed step as the sum of a prefill of one prompt and a decode step: the paper models no mixing."""
        machine = self.machine(stage)
        first, last = stage.layers[0] == 0, stage.layers[1] == model.layer_count
        seconds = 0.0
        if prefill_tokens > 0:
            seconds += float(
                self.stage_seconds(
                    model,
                    machine,
                    layers=stage.layers,
                    tensor_parallel=stage.tensor_parallel,
                    batch=1,
                    input_tokens=prefill_tokens,
                    output_tokens=1,
                    first=first,
                    last=last,
                    phase="prefill",
                )[0, 0]
            )
        if decode_sequences > 0:
            seconds += float(
                self.stage_seconds(
                    model,
                    machine,
                    layers=stage.layers,
                    tensor_parallel=stage.tensor_parallel,
                    batch=decode_sequences,
                    input_tokens=max(decode_context - 1, 0),
                    output_tokens=1,
                    first=first,
                    last=last,
                    phase="decode",
                )[0, 0]
            )
        return seconds

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
        """M_i and M_weight of eq. 6, a GPU's share; the embedding and the head are not placed."""
        kinds = range(len(model.layer_kinds))
        held = [model.layer_weight_bytes(k, tensor_parallel) for k in kinds]
        alone = StageMemory(
            usable_bytes=instance_type.gpu.memory_bytes,
            weight_bytes=int(sum_over_layers(model, layers, held)),
            activation_bytes=0,
            other_bytes=0,
        )
        return with_handover(
            self.problem, model, instance_type, alone,
            layers=layers, tensor_parallel=tensor_parallel, layer_bytes=max(held),
        )  # fmt: skip

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
        """A GPU's share of a sequence's KV cache and of the largest activation tensor (2 H_ffn wide, V for logits)."""
        kinds = range(len(model.layer_kinds))
        per_kind = [model.layer_kv_bytes_per_sequence(k, tokens, tensor_parallel) for k in kinds]
        widest = max(
            mlp.up_matrices * mlp.intermediate_size * mlp.active for k in kinds for mlp in self._feed_forwards(model, k)
        )
        if last:
            widest = max(widest, model.vocabulary_size)
        activation = input_tokens * widest / tensor_parallel * dtype_bytes(model.base_dtype)
        return sum_over_layers(model, layers, per_kind) + activation

    def decode_steps(self, output_tokens: float) -> float:
        """S_out: the table sums t = 1..S_out."""
        return output_tokens

    def batch_limit(self, instance_type: InstanceType) -> int:
        """Memory alone limits the batch in eq. 6."""
        return self.problem.max_num_seqs or _BATCH_LIMIT
