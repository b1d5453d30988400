"""Sizes computed or measured outside this project: parameters, weights, KV cache, usable memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from builders import TINY_LLAMA, problem_of, tiny_llama, verified

import hetplan as hp
from hetplan.catalog.models import list_models
from hetplan.catalog.tables import get_gpu
from hetplan.estimator.base import make_estimator
from hetplan.units import GIB, MIB


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [("llama-3.1-8b", 131_072), ("llama-2-7b", 524_288), ("qwen3-32b", 262_144), ("deepseek-v3", 61 * 576 * 2)],
)
def test_kv_bytes_per_token(name: str, kv_bytes: int) -> None:
    assert hp.ModelSpec.get(name).kv_bytes_per_token() == kv_bytes


@pytest.mark.parametrize("degree", [1, 2, 4, 8, 16])
def test_a_latent_is_whole_on_every_gpu(degree: int) -> None:
    assert hp.ModelSpec.get("deepseek-v3").kv_bytes_per_token(tensor_parallel=degree) == 70_272


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_head_dim_is_read_not_derived(head_dim: int) -> None:
    """Hidden size over heads is 128 here; the configuration's own head_dim decides."""
    spec = tiny_llama(head_dim=head_dim)
    assert spec.kv_bytes_per_token() == 4 * 4 * head_dim * 2 * 2


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama-3.1-70b", 70_553_706_496), ("llama-3.2-1b", 1_235_814_400), ("mixtral-8x7b", 46_702_792_704)],
)
def test_parameters(name: str, parameters: int) -> None:
    assert hp.ModelSpec.get(name).parameter_count == parameters


def test_active_parameters_of_a_mixture() -> None:
    assert hp.ModelSpec.get("mixtral-8x7b").active_parameter_count == pytest.approx(12.88e9, rel=5e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_embedding_counts_once(tied: bool) -> None:
    matrix = TINY_LLAMA["vocab_size"] * TINY_LLAMA["hidden_size"]
    spec, untied = tiny_llama(tie_word_embeddings=tied), tiny_llama(tie_word_embeddings=False)
    assert untied.parameter_count - spec.parameter_count == (matrix if tied else 0)
    assert untied.weight_bytes - spec.weight_bytes == (2 * matrix if tied else 0)


def test_weights_of_70b() -> None:
    spec = hp.ModelSpec.get("llama-3.1-70b")
    assert spec.weight_bytes / GIB == pytest.approx(131.42, abs=0.005)
    fp8 = spec.with_dtypes(weight_dtype="fp8")
    assert fp8.weight_bytes / GIB == pytest.approx(67.67, abs=0.05)
    assert fp8.embedding_bytes() == spec.embedding_bytes()
    assert fp8.head_bytes() == spec.head_bytes()


EXPERT_KEYS = ("num_local_experts", "n_routed_experts", "num_experts")


@pytest.mark.parametrize(("count_key", "own_size"), list(itertools.product(EXPERT_KEYS, (False, True))))
def test_any_spelling_of_a_mixture_is_read(count_key: str, own_size: bool) -> None:
    size = {"moe_intermediate_size": 512, "intermediate_size": 2816} if own_size else {"intermediate_size": 512}
    mixture = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", count_key: 8, "num_experts_per_tok": 2}
    spec = tiny_llama(**mixture, **size)
    expert = 3 * 1024 * 512
    dense = tiny_llama(intermediate_size=512)
    router = 8 * 1024
    assert spec.parameter_count == dense.parameter_count + 4 * (7 * expert + router)
    assert spec.active_parameter_count == dense.parameter_count + 4 * (expert + router)


@pytest.mark.parametrize(("weights", "kv"), list(itertools.product(["bf16", "fp8", "int8", "int4"], ["bf16", "fp8"])))
def test_dtypes_are_independent(weights: Any, kv: Any) -> None:
    spec = tiny_llama().with_dtypes(weight_dtype=weights, kv_dtype=kv)
    assert spec.kv_bytes_per_token() == tiny_llama().kv_bytes_per_token() // (1 if kv == "bf16" else 2)
    kept = spec.embedding_bytes() + spec.head_bytes()
    share = {"bf16": 1, "fp8": 2, "int8": 2, "int4": 4}[weights]
    layers = tiny_llama().weight_bytes - kept
    assert spec.weight_bytes - kept == pytest.approx(layers / share, rel=0.01)
    # Four-bit weights are unpacked and multiplied in 16 bit.
    assert spec.compute_dtype == ("bf16" if weights == "int4" else weights)


@pytest.mark.parametrize(
    ("gpu", "mib"),
    [("H100", 81_559), ("A100-SXM", 81_920), ("L40S", 46_068), ("L4", 23_034), ("A10", 23_028), ("T4", 15_360)],
)
def test_usable_memory_is_what_the_driver_reports(gpu: str, mib: int) -> None:
    assert get_gpu(gpu).memory_bytes == mib * MIB


# ---- what fits

SHORT = hp.Workload(input_tokens=700, output_tokens=200)
FP8_70B: dict[str, Any] = {
    "model": "llama-3.1-70b",
    "weight_dtype": "fp8",
    "cluster": {"p5.4xlarge": 1},
    "gpu_memory_utilization": 0.95,
}


def test_70b_fp8_on_one_h100_leaves_little_for_the_kv_cache() -> None:
    """An engine logged 75.22 usable - 67.72 weights - 4.84 activations - 0.13 = 2.53 GiB, about 8,290 tokens."""
    spec = hp.ModelSpec.get("llama-3.1-70b").with_dtypes(weight_dtype="fp8")
    problem = problem_of(spec, {"p5.4xlarge": 1}, gpu_memory_utilization=0.95)
    machine = problem.cluster.instance_type("p5.4xlarge")
    memory = make_estimator(problem).stage_memory(
        spec, machine, layers=(0, 80), tensor_parallel=1, first=True, last=True
    )
    assert memory.usable_bytes / GIB == pytest.approx(75.22, abs=0.05)
    assert memory.weight_bytes / GIB == pytest.approx(67.72, abs=0.1)
    assert memory.activation_bytes / GIB == pytest.approx(4.84, abs=0.15)
    assert memory.other_bytes / GIB == pytest.approx(0.13, abs=0.01)
    assert memory.kv_cache_bytes / GIB == pytest.approx(2.53, abs=0.2)
    assert memory.kv_cache_bytes / spec.kv_bytes_per_token() == pytest.approx(8_290, rel=0.08)


def test_a_request_longer_than_that_cache_is_infeasible_with_the_numbers() -> None:
    workload = hp.Workload(input_tokens=15_000, output_tokens=1_000)
    with pytest.raises(hp.InfeasibleError, match=r"16,000 tokens.*GiB") as refusal:
        hp.optimize(**FP8_70B, workload=workload)
    assert {reason.unit for reason in refusal.value.reasons} <= {"GiB", "layers"}
    for reason in refusal.value.reasons:
        assert reason.needed > reason.available > 0


def test_a_request_that_fits_that_cache_is_served() -> None:
    plan = verified(hp.optimize(**FP8_70B, workload=SHORT, max_model_len=7_500))
    (pipeline,) = plan.deployments[0].pipelines
    assert pipeline.max_model_len == 7_500


@pytest.mark.parametrize("max_model_len", [9_000, 16_000, 33_000, 36_000, 131_072])
def test_no_plan_serves_a_request_beyond_that_cache(max_model_len: int) -> None:
    with pytest.raises((hp.InfeasibleError, hp.NoSolutionError)):
        hp.optimize(**FP8_70B, workload=SHORT, max_model_len=max_model_len)


@pytest.mark.parametrize("max_model_len", [36_000, 131_072])
def test_the_longest_request_is_in_the_reason(max_model_len: int) -> None:
    with pytest.raises(hp.InfeasibleError, match=f"{max_model_len:,} tokens"):
        hp.optimize(**FP8_70B, workload=SHORT, max_model_len=max_model_len)


@pytest.mark.parametrize("model", ["llama-3.1-405b", "deepseek-v3", "qwen3-235b-a22b"])
def test_too_large_a_model_states_the_shortfall(model: str) -> None:
    spec = hp.ModelSpec.get(model)
    with pytest.raises(hp.InfeasibleError, match=r"Add [\d,.]+ GiB") as refusal:
        hp.optimize(model=model, cluster={"p5.4xlarge": 1}, workload=hp.Workload(input_tokens=763, output_tokens=232))
    (reason,) = refusal.value.reasons
    assert (reason.constraint, reason.subject, reason.unit) == ("memory", model, "GiB")
    assert reason.needed == pytest.approx(spec.weight_bytes / GIB, rel=0.02)
    assert 60 < reason.available < 80


def test_405b_on_one_h100_as_a_replica() -> None:
    with pytest.raises(hp.InfeasibleError, match="GiB short") as refusal:
        hp.predict("llama-3.1-405b", "H100")
    (reason,) = refusal.value.reasons
    assert reason.needed - reason.available == pytest.approx(756 + 5 + 0.6 - 71.3, abs=2)


@pytest.mark.parametrize("name", list_models())
def test_no_model_is_larger_or_smaller_than_its_parameters(name: str) -> None:
    """Between 4 bit each and 16 bit each, plus scales."""
    spec = hp.ModelSpec.get(name)
    assert 0.5 * spec.parameter_count < spec.weight_bytes <= 2.01 * spec.parameter_count
    assert 0 < spec.active_parameter_count <= spec.parameter_count
