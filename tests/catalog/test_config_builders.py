"""Families whose layers a function builds: what they share, what they refuse, and how their heads split."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hetplan.catalog.config_reader import read_config
from hetplan.catalog.model import Attention, ModelSpec
from hetplan.catalog.models import get_model
from hetplan.errors import InvalidInputError, UnsupportedModelError

VARIANTS: dict[str, Any] = json.loads((Path(__file__).parent / "expected_parameters.json").read_text())["variants"]
ODD_VALUES: list[Any] = [None, 0, -1, 7, 2**40, 1.5, "x", True, [], ["x"], [1], {}, {"x": 1}]


def variant(name: str, **changes: Any) -> dict[str, Any]:
    return {**VARIANTS[name]["config"], **changes}


def layer_names(spec: ModelSpec) -> list[str]:
    return [spec.layer_kinds[kind].name for kind in spec.layer_pattern]


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_any_value_is_read_or_refused(name: str) -> None:
    """A wrong value, or a missing key, is the user's mistake and never an error of ours."""
    config = VARIANTS[name]["config"]
    for key in config:
        without = {k: v for k, v in config.items() if k != key}
        for changed in (without, *(config | {key: value} for value in ODD_VALUES)):
            with suppress(InvalidInputError):  # UnsupportedModelError is one, too
                read_config(changed)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("kimi_linear, first layers dense", "linear_attn_config"),
        ("minimax_m3", "sparse_attention_config"),
    ],
)
def test_any_value_inside_a_section_is_read_or_refused(name: str, part: str) -> None:
    config = VARIANTS[name]["config"]
    for key in config[part]:
        for value in ODD_VALUES:
            with suppress(InvalidInputError):
                read_config(config | {part: config[part] | {key: value}})


def test_layers_come_in_the_stated_order() -> None:
    hybrid = "nemotron_h with every kind of layer, a latent space and biases"
    assert layer_names(read_config(variant(hybrid))) == ["mamba", "moe", "attention", "mlp"]
    listed = variant(hybrid, layers_block_type=["attention", "mamba", "moe", "mlp"])
    del listed["hybrid_override_pattern"]
    assert layer_names(read_config(listed)) == ["attention", "mamba", "moe", "mlp"]
    assert layer_names(read_config(variant("qwen3_5 without experts"))) == ["dense-linear"] * 3 + ["dense-full"]
    llama4 = layer_names(read_config(variant("llama4, experts by list")))
    assert llama4 == ["dense-chunked", "moe-chunked", "moe-chunked", "dense-full"]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("nemotron_h by list, MLPs with biases", {"num_hidden_layers": 5}, "the configuration lists 4 layers"),
        ("nemotron_h by list, MLPs with biases", {"layers_block_type": ["mamba", "magic"]}, "magic"),
        ("qwen3_5 without experts", {"layer_types": ["linear_attention"]}, "must list num_hidden_layers = 4"),
        ("qwen3_5 without experts", {"linear_num_value_heads": 3}, "a multiple of linear_num_key_heads = 2"),
        ("qwen3_5 without experts", {"mamba_ssm_dtype": "float12"}, "mamba_ssm_dtype = 'float12'"),
        ("deepseek_v32 with biases", {"q_lora_rank": None}, "the indexer needs it"),
        ("glm_moe_dsa with lists", {"mlp_layer_types": ["dense"]}, "4 times dense or sparse"),
        ("glm_moe_dsa with lists", {"index_topk_pattern": "FS"}, "4 times full or shared"),
        ("deepseek_v4 with every kind of layer", {"compress_ratios": [0, 4]}, "must list num_hidden_layers = 4"),
        ("deepseek_v4 with every kind of layer", {"o_groups": 3}, "must divide num_attention_heads = 8"),
        ("minimax_m3", {"moe_layer_freq": [0, 1, 2, 1]}, "must list 0 or 1"),
        ("gptj with an MLP of its own size", {"hidden_size": 128}, "n_embd = 96: must agree with hidden_size = 128"),
        ("falcon, multi-query", {"num_ln_in_parallel_attn": 3}, "1 or 2 is needed"),
    ],
)
def test_wrong_values_are_named(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        read_config(variant(name, **changes))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3_5 without experts", {"attn_output_gate": False}, "attention without gated output"),
        ("qwen3_5 without experts", {"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "sliding"),
        ("deepseek_v4 with every kind of layer", {"compress_ratios": [0, 4, 16, 4]}, "compression by 16"),
        ("deepseek_v4 with every kind of layer", {"expert_dtype": "fp4"}, "experts stored in a type of their own"),
        ("minimax_m3", {"n_shared_experts": 2}, "several shared experts"),
        ("minimax_m3", {"qk_norm_type": "per_layer"}, "query and key norms of another form"),
        ("gemma4 without experts", {"num_kv_shared_layers": 2}, "KV cache shared between layers"),
        ("gemma4 without experts", {"hidden_size_per_layer_input": 16}, "per-layer embeddings"),
        ("gemma4 without experts", {"use_bidirectional_attention": "all"}, "attention that is not causal"),
        ("phi, few KV heads", {"qk_layernorm": True}, "layer norms of queries and keys"),
        ("phi3, few KV heads, tied", {"attention_bias": True}, "attention_bias in Phi3ForCausalLM"),
        ("falcon, multi-query", {"num_experts": 4}, "experts"),
    ],
)
def test_a_refusal_names_the_feature(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read_config(variant(name, **changes))


def deci(attention: dict[str, Any], ffn: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["DeciLMForCausalLM"], "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8,
        "vocab_size": 320, "max_position_embeddings": 512, "torch_dtype": "bfloat16",
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 4.0}}, {"attention": attention, "ffn": ffn},
        ],
    }  # fmt: skip


def test_deci_layers_lack_what_is_switched_off() -> None:
    """hidden 96, 4 KV heads of 12: q, o 96 x 96, k, v 96 x 48; width 2 x 4 x 96 / 3 = 256; one norm for each part."""
    attention, mlp, ends = 2 * 96 * 96 + 2 * 96 * 48 + 96, 3 * 96 * 256 + 96, 2 * 320 * 96 + 96
    whole = {"n_heads_in_group": 2}, {"ffn_mult": 4.0}
    off = {"no_op": True}
    for second, expected in (
        (whole, 2 * attention + 2 * mlp), ((off, whole[1]), attention + 2 * mlp),
        ((whole[0], off), 2 * attention + mlp), ((off, off), attention + mlp),
    ):  # fmt: skip
        spec = read_config(deci(*second))
        assert spec.parameter_count == expected + ends
    assert spec.valid_tensor_parallel(8) == [1, 2, 4, 8]
    assert spec.layer_kv_bytes_per_sequence(1, 1_000) == 0


@pytest.mark.parametrize(
    ("attention", "ffn", "words"),
    [
        ({"replace_with_linear": True}, {"ffn_mult": 1.0}, "block_configs with replace_with_linear"),
        ({"n_heads_in_group": 2, "window_length": 64}, {"ffn_mult": 1.0}, "block_configs with window_length"),
        ({"n_heads_in_group": 3}, {"ffn_mult": 1.0}, "n_heads_in_group = 3"),
        ({"n_heads_in_group": 2}, {"ffn_mult": -1}, "ffn_mult = -1"),
        ({"n_heads_in_group": 2}, {}, "ffn_mult = None"),
    ],
)
def test_deci_blocks_that_are_not_known(attention: dict[str, Any], ffn: dict[str, Any], words: str) -> None:
    with pytest.raises((InvalidInputError, UnsupportedModelError), match=words):
        read_config(deci(attention, ffn))


# ---- parallelism


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("qwen3.5-397b-a17b", [1, 2, 4, 8, 16]),  # 16 key heads, 64 value heads; 32 heads with 2 KV heads
        ("nemotron-3-nano-30b-a3b", [1, 2, 4, 8, 16, 32]),  # 8 groups replicate
        ("llama-3.3-nemotron-super-49b", [1, 2, 4, 8, 16, 32, 64]),
        ("llama-4-maverick", [1, 2, 4, 8, 40]),
        ("falcon-7b", [1]),  # 71 heads
        ("falcon-180b", [1, 2, 4, 8]),  # 232 heads, 8 KV heads
        ("bloom-176b", [1, 2, 4, 7, 8, 14, 16, 28, 56]),
    ],
)
def test_valid_degrees(name: str, degrees: list[int]) -> None:
    assert get_model(name).valid_tensor_parallel(64) == degrees


def test_key_heads_of_linear_attention_divide_and_do_not_replicate() -> None:
    attention = Attention(kind="linear", heads=64, kv_heads=16, head_dim=128, value_head_dim=128)
    assert [degree for degree in (8, 16, 32, 64) if attention.valid_degree(degree)] == [8, 16]
    assert attention.replace(kind="mamba").valid_degree(32)
    assert attention.replace(kind="none").valid_degree(3)


def test_a_state_has_no_cache_beside_it() -> None:
    with pytest.raises(ValueError, match="'linear' has no window_tokens"):
        Attention(kind="linear", heads=4, kv_heads=4, head_dim=8, value_head_dim=8, window_tokens=16)
    with pytest.raises(ValueError, match="come together"):
        Attention(heads=4, kv_heads=4, head_dim=8, value_head_dim=8, index_heads=2)


# ---- quantised checkpoints of these families


@pytest.fixture(scope="module")
def folder(data_dir: Path) -> Path:
    return data_dir / "model_configs"


def kept(spec: ModelSpec, layer: int) -> set[str]:
    return {m.name for m in spec.layer_kinds[spec.layer_pattern[layer]].linears if not m.quantized}


def test_ignore_lists_name_layers_as_the_family_does(folder: Path) -> None:
    """ "backbone.layers" in Nemotron-H, "model.language_model.layers" in Gemma 4 and Qwen3.5."""
    nano = read_config(folder / "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4_config.json")
    assert kept(nano, 4) == {"in_proj", "o_proj"}
    assert kept(nano, 2) == set()
    assert kept(nano, 5) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    gemma = read_config(folder / "nvidia--Gemma-4-26B-A4B-NVFP4_config.json")
    routed = {m.name for m in gemma.layer_kinds[0].linears if m.quantized}
    assert routed == {"experts.gate_proj", "experts.up_proj", "experts.down_proj"}
    qwen = read_config(folder / "nvidia--Qwen3.5-397B-A17B-NVFP4_config.json")
    assert {m.name for m in qwen.layer_kinds[0].linears if m.quantized} == routed


def test_index_weights_stay_in_16_bits(folder: Path) -> None:
    spec = read_config(folder / "zai-org--GLM-5-FP8_config.json")
    assert kept(spec, 5) == {"router", "indexer.weights_proj"}
