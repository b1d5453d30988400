"""Table 2 and equations 1 to 5 of ShuntServe for one stage and one batch, as they stand: plain numbers, nothing cached.

Dense models with grouped attention only. Shares no code with the library's estimators.
"""

from __future__ import annotations

from hetplan.catalog.hardware import InstanceType
from hetplan.problem.placement import PlacementProblem

BYTES = 2  # bf16


class Table2:
    """The paper's formulas over a problem's model, workload and calibrated rates."""

    def __init__(self, problem: PlacementProblem) -> None:
        (kind,) = problem.model.layer_kinds
        self.hidden = problem.model.hidden_size
        self.kv = kind.attention.kv_heads * kind.attention.head_dim
        self.ffn = next(m.outputs for m in kind.linears if m.name == "up_proj")
        self.vocabulary = problem.model.vocabulary_size
        self.s_in = problem.workload.mean_input_tokens
        self.s_out = problem.workload.mean_output_tokens
        rates = {
            c.gpu: (c.compute_flops.get("bf16", c.compute_flops["fp16"]).value, c.memory_bytes_per_s.value)
            for c in problem.calibrations
        }
        # FLOP/s, bytes/s, alpha and beta inside and between machines: the paper's calibrated scalars.
        self.scalars: dict[str, tuple[float, float, float, float, float, float]] = {}
        for machine in problem.cluster.instance_types:
            inside, outside = machine.intra_node_links.get(machine.gpu_count), machine.inter_node_link
            alpha, beta = (inside.latency_s, inside.bytes_per_s) if inside is not None else (0.0, 1.0)
            self.scalars[machine.name] = (*rates[machine.gpu.name], alpha, beta, outside.latency_s, outside.bytes_per_s)

    def throughput(self, stages: list[tuple[InstanceType, int]], batch: int, complete: bool) -> float:
        """Eqs. 4 and 5 for (machine, layers) stages, the last with the logits when the pipeline is complete."""
        slowest_prefill = slowest_decode = 0.0
        for number, (machine, layers) in enumerate(stages):
            final = number == len(stages) - 1
            prefill, decode = self.stage(machine, layers, batch, logits=final and complete)
            if not final:
                prefill += self.send(machine, batch * self.s_in)
                decode += self.s_out * self.send(machine, batch)
            slowest_prefill, slowest_decode = max(slowest_prefill, prefill), max(slowest_decode, decode)
        return batch / (slowest_prefill + slowest_decode)

    def stage(self, machine: InstanceType, layers: int, batch: int, *, logits: bool) -> tuple[float, float]:
        """Seconds of prefill and decode."""
        flops, bandwidth, alpha, beta, _, _ = self.scalars[machine.name]
        h, kv, f, v, d = self.hidden, self.kv, self.ffn, self.vocabulary, machine.gpu_count
        b, s_in, s_out = batch, self.s_in, self.s_out
        contexts = s_out * s_in + s_out * (s_out + 1) / 2

        def operation(work: float, elements: float) -> float:
            """Eq. 1."""
            return max(work / flops, elements * BYTES / bandwidth)

        prefill = (
            operation(b * (2 * s_in * h * h + 4 * s_in * h * kv) / d, b * s_in * h + (h * h + 2 * h * kv) / d)
            + operation(4 * b * s_in * s_in * h / d, (b * s_in * h + 2 * b * s_in * kv) / d)
            + operation(2 * b * s_in * h * h / d, (b * s_in * h + h * h) / d)
            + operation(4 * b * s_in * h * f / d, b * s_in * h + 2 * h * f / d)
            + operation(2 * b * s_in * h * f / d, (b * s_in * f + h * f) / d)
        )
        decode = (
            operation(b * s_out * (2 * h * h + 4 * h * kv) / d, s_out * (b * h + (h * h + 2 * h * kv) / d))
            + operation(4 * b * contexts * h / d, (s_out * b * h + 2 * b * contexts * kv) / d)
            + operation(2 * b * s_out * h * h / d, s_out * (b * h + h * h) / d)
            + operation(4 * b * s_out * h * f / d, s_out * (b * h + 2 * h * f / d))
            + operation(2 * b * s_out * h * f / d, s_out * (b * f + h * f) / d)
        )
        if d > 1:
            # Eq. 2.
            prefill += 4 * (alpha + b * s_in * h * BYTES / (d * beta)) * (d - 1)
            decode += s_out * 4 * (alpha + b * h * BYTES / (d * beta)) * (d - 1)
        prefill, decode = layers * prefill, layers * decode
        if logits:
            prefill += operation(2 * b * s_in * h * v / d, b * s_in * h + h * v / d)
            decode += operation(2 * b * s_out * h * v / d, s_out * (b * h + h * v / d))
        return prefill, decode

    def send(self, machine: InstanceType, tokens: float) -> float:
        """Eq. 3 over the sender's card."""
        *_, latency, bytes_per_s = self.scalars[machine.name]
        return latency + tokens * self.hidden * BYTES / bytes_per_s
