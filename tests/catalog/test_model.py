"""Sizes and splits of models: published values, and what must hold for every model and degree."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.catalog.dtypes import Quantization
from hetplan.catalog.model import Linear, ModelSpec
from hetplan.catalog.models import MODELS, get_model, hugging_face_id, list_models
from hetplan.errors import InvalidInputError, UnknownNameError
from hetplan.units import GIB

# ---- published values


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("qwen2-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("deepseek-v2-lite", 15_706_484_224),
    ],
)
def test_published_parameter_count(name: str, parameters: int) -> None:
    assert get_model(name).parameter_count == parameters


@pytest.mark.parametrize(
    ("name", "active"), [("mixtral-8x7b", 12.88e9), ("qwen3-30b-a3b", 3.353e9), ("deepseek-v3", 37.55e9)]
)
def test_active_parameters(name: str, active: float) -> None:
    assert get_model(name).active_parameter_count == pytest.approx(active, rel=0.001)


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("llama-3.1-8b", 131_072),  # 32 layers x 8 heads x 128 x 2 (K, V) x 2 bytes
        ("llama-2-7b", 524_288),
        ("llama-3.1-70b", 327_680),
        ("qwen3-32b", 262_144),  # head_dim 128 is not hidden / heads = 80
        ("qwen2-7b", 57_344),
        ("deepseek-v3", 70_272),  # 61 layers x 576 x 2 bytes
    ],
)
def test_kv_bytes_per_token(name: str, kv_bytes: int) -> None:
    assert get_model(name).kv_bytes_per_token() == kv_bytes


@pytest.mark.parametrize("degree", [1, 2, 4, 8, 16])
def test_a_latent_cache_is_whole_on_every_gpu(degree: int) -> None:
    assert get_model("deepseek-v3").kv_bytes_per_token(degree) == 70_272


def test_weights_of_llama_70b() -> None:
    spec = get_model("llama-3.1-70b")
    assert spec.weight_bytes == 2 * 70_553_706_496
    assert spec.weight_bytes / GIB == pytest.approx(131.42, abs=0.005)


def test_fp8_weights_keep_embeddings_and_head_in_16_bits() -> None:
    spec = get_model("llama-3.1-70b").with_dtypes(weight_dtype="fp8")
    assert spec.weight_bytes / GIB == pytest.approx(67.67, abs=0.005)
    assert spec.kv_dtype == "bf16"
    assert spec.compute_dtype == "fp8"


def test_dtypes_are_independent() -> None:
    spec = get_model("llama-3.1-8b").with_dtypes(weight_dtype="int4", kv_dtype="fp8")
    assert (spec.weight_dtype, spec.base_dtype, spec.kv_dtype, spec.compute_dtype) == ("int4", "bf16", "fp8", "bf16")
    assert spec.kv_bytes_per_token() == 65_536


def test_other_base_dtype_forgets_the_checkpoint_size() -> None:
    spec = get_model("llama-3.2-1b")
    stored = spec.replace(checkpoint_bytes=spec.weight_bytes + 1000)
    assert stored.with_dtypes(base_dtype="fp16").weight_bytes == spec.weight_bytes + 1000
    assert stored.with_dtypes(base_dtype="fp32").weight_bytes == 2 * spec.weight_bytes


# ---- parallelism


def test_valid_degrees_of_qwen2_7b() -> None:
    assert get_model("qwen2-7b").valid_tensor_parallel(28) == [1, 2, 4, 28]


def test_three_gpus_never_split_64_heads() -> None:
    assert 3 not in get_model("llama-3.1-70b").valid_tensor_parallel(8)


def test_52_heads_do_not_split_over_8_gpus() -> None:
    assert tiny(num_attention_heads=52, num_key_value_heads=4, head_dim=8).valid_tensor_parallel(8) == [1, 2, 4]


def test_few_kv_heads_replicate() -> None:
    spec = tiny(num_attention_heads=8, num_key_value_heads=2, head_dim=16)
    per_head = 2 * 16 * 2 * spec.layer_count
    assert [spec.kv_bytes_per_token(degree) for degree in (1, 2, 4, 8)] == [2 * per_head, per_head, per_head, per_head]
    keys = next(m for m in spec.layer_kinds[0].linears if m.name == "k_proj")
    assert [keys.shape(degree)[1] for degree in (1, 2, 4)] == [32, 16, 16]


def test_a_tied_head_costs_a_copy_only_away_from_the_embedding() -> None:
    spec = get_model("llama-3.2-1b")
    matrix = 128_256 * 2048 * 2
    assert spec.embedding_bytes() == matrix
    assert spec.head_bytes(with_embedding=True) == 2 * 2048
    assert spec.head_bytes() == matrix + 2 * 2048


# ---- names


def test_short_names_and_ids_in_any_case() -> None:
    by_id = get_model("QWEN/qwen3-32b")
    assert by_id == get_model("Qwen3-32B") == ModelSpec.get("qwen3-32b")
    assert hugging_face_id("qwen3-32b") == "Qwen/Qwen3-32B"
    assert hugging_face_id("meta-llama/llama-3.1-8b-instruct") == "meta-llama/Llama-3.1-8B-Instruct"


def test_ids_of_one_row_may_differ() -> None:
    assert get_model("Qwen/Qwen2.5-7B").max_position_tokens == 131_072
    assert get_model("Qwen/Qwen2.5-7B-Instruct").max_position_tokens == 32_768
    assert get_model("mistralai/Mixtral-8x22B-Instruct-v0.1").parameter_count == 140_630_071_296


def test_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as refusal:
        get_model("llama-3.1-71b")
    assert "llama-3.1-70b" in refusal.value.nearest
    with pytest.raises(UnknownNameError, match=r"path of its config\.json"):
        get_model("")
    with pytest.raises(UnknownNameError):
        hugging_face_id("nothing-like-it")


def test_models_is_a_mapping_of_the_short_names() -> None:
    assert list(MODELS) == list(list_models())
    assert len(MODELS) == len(list_models())
    assert MODELS["llama-3.1-8b"] is get_model("llama-3.1-8b")
    assert "meta-llama/Llama-3.1-8B" not in MODELS


# ---- invariants


def tiny(**changes: Any) -> ModelSpec:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
        "torch_dtype": "bfloat16",
    }
    return ModelSpec.from_config(config | changes, name="tiny")


@given(
    heads=st.integers(1, 64),
    granularity=st.sampled_from([1, 16, 64, 128]),
    inputs=st.integers(1, 300),
    degree=st.integers(1, 16),
    split=st.sampled_from(["outputs", "inputs", "none"]),
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([None, 16, 128]),
    experts=st.integers(1, 4),
)
def test_shares_cover_the_matrix(
    heads: int, granularity: int, inputs: int, degree: int, split: Any, bits: int, group: int | None, experts: int
) -> None:
    """The GPUs of a group together hold every weight, and no GPU more than all of it."""
    size = heads * granularity
    sides = (inputs, size) if split == "outputs" else (size, inputs)
    matrix = Linear(
        name="m",
        inputs=sides[0],
        outputs=sides[1],
        split=split,
        granularity=granularity,
        experts=experts,
        bias=True,
    )
    quantization = Quantization(method="test", bits=bits, group_inputs=group, group_outputs=1)
    for storage in (None, quantization):
        whole = matrix.weight_bytes(1, "bf16", storage)
        share = matrix.weight_bytes(degree, "bf16", storage)
        assert whole <= degree * share
        assert share <= whole
    one_inputs, one_outputs = matrix.shape(degree)
    if split == "outputs":
        assert one_outputs % granularity == 0
        assert degree * one_outputs >= matrix.outputs
    else:
        assert one_outputs == matrix.outputs
    assert (one_inputs < matrix.inputs) <= (split == "inputs")


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(list_models()), degree=st.integers(1, 16))
def test_weights_and_cache_of_a_group_cover_the_model(name: str, degree: int) -> None:
    spec = get_model(name)
    layers = sum(count * spec.layer_weight_bytes(kind, degree) for kind, count in enumerate(spec.kind_counts))
    share = layers + spec.embedding_bytes(degree) + spec.head_bytes(degree, with_embedding=True)
    assert share * degree >= spec.weight_bytes
    assert share <= spec.weight_bytes
    assert spec.kv_bytes_per_token(degree) * degree >= spec.kv_bytes_per_token()


@settings(max_examples=20, deadline=None)
@given(name=st.sampled_from(list_models()), tokens=st.integers(1, 200_000))
def test_a_window_bounds_the_cache(name: str, tokens: int) -> None:
    spec = get_model(name)
    kept = sum(count * spec.layer_kv_bytes_per_sequence(kind, tokens) for kind, count in enumerate(spec.kind_counts))
    states = sum(
        count * kind.attention.state_bytes_per_sequence(1, spec.base_dtype)
        for count, kind in zip(spec.kind_counts, spec.layer_kinds, strict=True)
    )
    assert states < kept <= states + tokens * spec.kv_bytes_per_token()


@pytest.mark.parametrize("name", list_models())
def test_one_gpu_holds_exactly_the_weights(name: str) -> None:
    spec = get_model(name)
    layers = sum(count * spec.layer_weight_bytes(kind) for kind, count in enumerate(spec.kind_counts))
    assert layers + spec.embedding_bytes() + spec.head_bytes(with_embedding=True) == spec.weight_bytes
    assert spec.active_parameter_count <= spec.parameter_count
    assert ModelSpec.from_json(spec.model_dump_json()) == spec


def test_a_quantised_checkpoint_is_not_quantised_again() -> None:
    with pytest.raises(InvalidInputError, match="already quantised"):
        get_model("deepseek-v3").with_dtypes(weight_dtype="fp4")
