"""Table 2 of ShuntServe: FLOPs and elements scanned of each operation, per GPU of the group.

Symbols: B batch, S_in input_tokens, S_out output_tokens, H hidden_size, H_kv kv_size, H_ffn
intermediate_size, V vocabulary_size, D_TP tensor_parallel. Decode rows are already summed over the
S_out steps. The table knows dense models; for a mixture of experts (an extension of ours) each
token pays ``active`` experts' FLOPs, and the weights scanned are those of the experts that a
uniform router is expected to touch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.catalog.model import LayerKind, ModelSpec
from hetplan.errors import UnsupportedModelError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Work:
    """One operation: (B,) FLOPs and (B,) elements scanned."""

    flops: FloatArray
    elements: FloatArray


@dataclass(frozen=True, slots=True)
class FeedForward:
    """One MLP: its intermediate size, matrices before the activation (2 when gated), experts held and used."""

    intermediate_size: int
    up_matrices: int
    experts: int
    active: int


def feed_forwards(model: ModelSpec, kind: LayerKind) -> list[FeedForward]:
    """The MLPs of a layer kind, read off its matrices: each fused group of one or two matrices up is one.

    Raises
    ------
    UnsupportedModelError
        For a layer that Table 2 has no rows for, by name.
    """
    lacking = _without_rows(kind)
    if lacking:
        raise UnsupportedModelError(
            model.name, [f"{kind.name}: Table 2 has no rows for {lacking}; use estimator='calibrated'"]
        )
    groups: dict[str, list[int]] = {}
    experts: dict[str, tuple[int, int]] = {}
    for matrix in kind.linears:
        if matrix.fused is not None and matrix.fused.endswith("gate_up"):
            groups.setdefault(matrix.fused, []).append(matrix.outputs)
            experts[matrix.fused] = (matrix.experts, matrix.active_experts)
    return [FeedForward(sizes[0], len(sizes), *experts[name]) for name, sizes in groups.items()]


def _without_rows(kind: LayerKind) -> str | None:
    """What a layer has that the table does not know: it has rows for grouped attention and an MLP on its output."""
    names = {"mla": "latent attention", "linear": "linear attention", "mamba": "Mamba layers"}
    if kind.attention.kind == "none":
        return "layers without attention"
    if kind.attention.kind != "gqa":
        return names[kind.attention.kind]
    if kind.attention.top_k_tokens is not None:
        return "sparse attention"
    return None if kind.has_mlp else "layers without an MLP"


def expected_experts(experts: int, active: int, tokens: FloatArray) -> FloatArray:
    """Experts that ``tokens`` tokens touch when a router picks ``active`` of ``experts`` uniformly."""
    if experts == 1:
        return np.ones_like(tokens)
    return np.asarray(experts * -np.expm1(tokens * np.log1p(-active / experts)), dtype=np.float64)


def prefill_work(
    hidden_size: int,
    kv_size: int,
    mlps: list[FeedForward],
    batch: FloatArray,
    input_tokens: float,
    tensor_parallel: int,
) -> list[Work]:
    """Prefill rows of Table 2 for one layer: QKV, attention, output, then up-and-gate and down of each MLP."""
    h, kv, d = hidden_size, kv_size, tensor_parallel
    tokens = batch * input_tokens
    rows = [
        Work(tokens * (2 * h * h + 4 * h * kv) / d, tokens * h + (h * h + 2 * h * kv) / d),
        Work(4 * tokens * input_tokens * h / d, (tokens * h + 2 * tokens * kv) / d),
        Work(2 * tokens * h * h / d, (tokens * h + h * h) / d),
    ]
    for mlp in mlps:
        f, n = mlp.intermediate_size, mlp.up_matrices
        touched = expected_experts(mlp.experts, mlp.active, tokens)
        rows += [
            Work(2 * n * tokens * h * f * mlp.active / d, tokens * h + touched * n * h * f / d),
            Work(2 * tokens * h * f * mlp.active / d, (tokens * f * mlp.active + touched * h * f) / d),
        ]
    return rows


def decode_work(
    hidden_size: int,
    kv_size: int,
    mlps: list[FeedForward],
    batch: FloatArray,
    input_tokens: float,
    output_tokens: float,
    tensor_parallel: int,
) -> list[Work]:
    """Decode rows of Table 2 for one layer, summed over the steps t = 1..S_out."""
    h, kv, d, s = hidden_size, kv_size, tensor_parallel, output_tokens
    context_sum = s * input_tokens + s * (s + 1) / 2
    rows = [
        Work(batch * s * (2 * h * h + 4 * h * kv) / d, s * (batch * h + (h * h + 2 * h * kv) / d)),
        Work(4 * batch * context_sum * h / d, (s * batch * h + 2 * batch * context_sum * kv) / d),
        Work(2 * batch * s * h * h / d, s * (batch * h + h * h) / d),
    ]
    for mlp in mlps:
        f, n = mlp.intermediate_size, mlp.up_matrices
        touched = expected_experts(mlp.experts, mlp.active, batch)
        rows += [
            Work(2 * n * batch * s * h * f * mlp.active / d, s * (batch * h + touched * n * h * f / d)),
            Work(2 * batch * s * h * f * mlp.active / d, s * (batch * f * mlp.active + touched * h * f) / d),
        ]
    return rows


def logits_work(
    hidden_size: int,
    vocabulary_size: int,
    rows_per_sequence: float,
    steps: float,
    batch: FloatArray,
    tensor_parallel: int,
) -> Work:
    """Logits row: prefill with rows_per_sequence = S_in and one step, decode with one row and S_out steps."""
    rows = batch * rows_per_sequence
    weights = hidden_size * vocabulary_size / tensor_parallel
    return Work(2 * steps * rows * weights, steps * (rows * hidden_size + weights))
