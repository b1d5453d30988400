"""Layers that are not plain attention with a gated MLP: what their times must say, without being calibrated."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from builders import problem_of

import hetplan as hp
from hetplan.errors import UnsupportedModelError
from hetplan.estimator.base import Estimator, make_estimator
from hetplan.estimator.operations import feed_forwards
from hetplan.estimator.pipeline import StageShape, sequences_that_fit

MACHINE = "p5.48xlarge"


@cache
def scene(model: str, estimator: str = "calibrated") -> tuple[Estimator, hp.ModelSpec, Any]:
    problem = problem_of(model, {MACHINE: 2}, estimator=estimator)
    return make_estimator(problem), problem.model, problem.cluster.instance_types[0]


def layer_s(model: str, kind: str, phase: str, context: float, *, batch: float = 8, degree: int = 8) -> float:
    """Seconds of one layer of the kind of that name."""
    estimator, spec, host = scene(model)
    index = [layer.name for layer in spec.layer_kinds].index(kind)
    position = spec.layer_pattern.index(index)
    with_layer, without = estimator.stage_seconds(
        spec,
        host,
        layers=np.array([(position, position + 1), (position, position)]),
        tensor_parallel=degree,
        batch=batch,
        input_tokens=context,
        output_tokens=2,
        first=False,
        last=False,
        phase="prefill" if phase == "prefill" else "decode",
    )[:, 0]
    return float(with_layer - without)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("qwen3.5-122b-a10b", "moe-linear"),
        ("kimi-linear-48b-a3b", "moe-kda"),
        ("nemotron-3-nano-30b-a3b", "mamba"),
        ("nemotron-3-nano-30b-a3b", "moe"),
    ],
)
def test_decode_does_not_know_the_context(model: str, kind: str) -> None:
    assert layer_s(model, kind, "decode", 100) == pytest.approx(layer_s(model, kind, "decode", 100_000))


def test_decode_of_a_state_reads_and_writes_it() -> None:
    """At a large batch a Mamba layer takes at least its states' bytes, twice, over the bandwidth."""
    _, _, host = scene("nemotron-3-nano-30b-a3b")
    states = 64 * 64 * 128 * 4 / 8
    alone = layer_s("nemotron-3-nano-30b-a3b", "mamba", "decode", 1_000, batch=1)
    many = layer_s("nemotron-3-nano-30b-a3b", "mamba", "decode", 1_000, batch=1_001)
    assert many - alone > 1_000 * 2 * states / host.gpu.bandwidth_bytes_per_s


@pytest.mark.parametrize(("model", "kind"), [("qwen3.5-122b-a10b", "moe-linear"), ("nemotron-3-nano-30b-a3b", "mamba")])
def test_a_chunked_scan_is_linear_in_the_prompt(model: str, kind: str) -> None:
    short, long = (layer_s(model, kind, "prefill", tokens, batch=1) for tokens in (64_000, 256_000))
    assert long == pytest.approx(4 * short, rel=0.05)


def test_sparse_attention_wins_at_a_long_context() -> None:
    """DeepSeek-V3.2 beside V3: the indexer costs at first, and reading 2,048 tokens instead of all pays later."""
    for tokens, better in ((1_000, False), (100_000, True)):
        dense, sparse = (layer_s(model, "moe", "decode", tokens) for model in ("deepseek-v3", "deepseek-v3.2"))
        assert (sparse < dense) is better


def test_a_layer_that_shares_its_index_is_cheaper() -> None:
    for phase in ("prefill", "decode"):
        assert layer_s("glm-5.3", "moe-shared-index", phase, 50_000) < layer_s("glm-5.3", "moe", phase, 50_000)


def test_compression_bounds_what_is_read() -> None:
    """DeepSeek-V4: ten times the context costs a layer compressed by 128 far less than a full one."""
    near, far = (layer_s("deepseek-v4-flash-fp8", "compressed", "decode", tokens) for tokens in (10_000, 100_000))
    full_near, full_far = (layer_s("deepseek-v3", "moe", "decode", tokens) for tokens in (10_000, 100_000))
    assert near < far
    assert far - near < (full_far - full_near) / 20


def test_a_layer_without_attention_costs_its_mlp_only() -> None:
    model = "llama-3.3-nemotron-super-49b"
    without, with_it = (layer_s(model, kind, "prefill", 2_000) for kind in ("mlp28672", "kv8-mlp28672"))
    assert without < with_it
    # Two all-reduces become one.
    assert layer_s(model, "mlp28672", "decode", 2_000) < layer_s(model, "kv8-mlp28672", "decode", 2_000)


def test_layers_that_keep_nothing_do_not_limit_the_batch() -> None:
    problem = problem_of("llama-3.3-nemotron-super-49b", {MACHINE: 1})
    estimator, host = make_estimator(problem), problem.cluster.instance_types[0]
    spec = problem.model
    none = [spec.layer_kinds[kind].attention.kind == "none" for kind in spec.layer_pattern]
    start = next(i for i in range(spec.layer_count) if all(none[i : i + 2]))
    shape = StageShape((start, start + 2), host, 1, 0)
    assert sequences_that_fit(problem, estimator, [shape, shape]) > 0


def test_mlps_without_a_gate_have_one_matrix_up() -> None:
    spec = hp.ModelSpec.get("falcon-40b")
    (mlp,) = feed_forwards(spec, spec.layer_kinds[0])
    assert (mlp.intermediate_size, mlp.up_matrices, mlp.experts) == (32_768, 1, 1)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("deepseek-v3", "latent attention"),
        ("qwen3.5-122b-a10b", "linear attention"),
        ("nemotron-3-nano-30b-a3b", "Mamba layers"),
        ("llama-3.3-nemotron-super-49b", "layers without attention"),
        ("minimax-m3", "sparse attention"),
    ],
)
def test_the_paper_refuses_what_its_table_has_no_row_for(model: str, words: str) -> None:
    estimator, spec, host = scene(model, "paper")
    with pytest.raises(UnsupportedModelError, match=f"Table 2 has no rows for {words}; use estimator='calibrated'"):
        estimator.stage_seconds(
            spec, host, layers=(0, spec.layer_count), tensor_parallel=8, batch=1, input_tokens=100, output_tokens=2,
            first=True, last=True, phase="decode",
        )  # fmt: skip


@pytest.mark.parametrize("model", ["falcon-40b", "bloom-7b1", "phi-2", "gpt-j-6b"])
def test_the_paper_answers_for_models_before_llama(model: str) -> None:
    estimator, spec, host = scene(model, "paper")
    seconds = estimator.stage_seconds(
        spec, host, layers=(0, 2), tensor_parallel=8, batch=[1, 8], input_tokens=100, output_tokens=2, first=False,
        last=False, phase="prefill",
    )  # fmt: skip
    assert np.all(seconds > 0)
