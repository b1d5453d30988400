"""Reading config.json: bad input is refused with file, key, value and limit; quantisation comes out exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetplan.catalog.config_reader import read_config
from hetplan.catalog.model import ModelSpec
from hetplan.errors import InvalidInputError, UnsupportedModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write(folder: Path, content: object, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def quantised(quantization: dict[str, Any], config: dict[str, Any] = LLAMA) -> ModelSpec:
    return read_config(config | {"quantization_config": quantization}, name="quantised")


def scheme(weights: dict[str, Any], activations: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]} | more


# ---- bad input


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1, 2]", "object is needed at the top"),
        ("{", "not readable as JSON"),
        ("", "not readable as JSON"),
        ('{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' appears twice"),
        ('{"hidden_size": NaN}', "NaN"),
        ("[" * 100_000, r"nested too deeply|not readable"),
        ('{"hidden_size": ' + "9" * 10_000 + "}", "not readable as JSON"),
        ("{}", "neither 'architectures' nor 'model_type'"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, problem: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InvalidInputError, match=problem) as refusal:
        read_config(path)
    assert str(path) in str(refusal.value)


def test_oversized_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"larger than 4\.0 MiB"):
        read_config(write(tmp_path, '{"a": "' + "x" * 2**22 + '"}'))
    with pytest.raises(InvalidInputError, match="no such file"):
        read_config(tmp_path / "nowhere.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInputError, match=r"config\.json: no such file"):
        read_config(tmp_path / "empty")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInputError, match="not readable as JSON"):
        read_config(tmp_path / "binary.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", True),
        ("hidden_size", 0),
        ("hidden_size", -4),
        ("hidden_size", 256.0),
        ("hidden_size", "256"),
        ("hidden_size", [256]),
        ("hidden_size", 2**40),
        ("num_hidden_layers", 10**9),
        ("num_key_value_heads", 3),
        ("num_attention_heads", 7),
        ("tie_word_embeddings", 1),
        ("torch_dtype", "float8_e4m3fn"),
        ("torch_dtype", "auto"),
        ("architectures", "LlamaForCausalLM"),
        ("layer_types", [1]),
        ("quantization_config", "fp8"),
    ],
)
def test_bad_values_name_key_and_value(key: str, value: object) -> None:
    config = LLAMA | {"num_key_value_heads": None} if key == "num_attention_heads" else LLAMA
    with pytest.raises(InvalidInputError) as refusal:
        read_config(config | {key: value}, name="bad")
    assert key in str(refusal.value)
    assert str(value).strip("[]") in str(refusal.value)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
def test_a_missing_key_is_named_with_its_architecture(key: str) -> None:
    with pytest.raises(InvalidInputError, match=f"'{key}'.*LlamaForCausalLM"):
        read_config({k: v for k, v in LLAMA.items() if k != key})


def test_more_active_experts_than_experts() -> None:
    with pytest.raises(InvalidInputError, match="num_experts_per_tok = 9"):
        read_config(MIXTRAL | {"num_experts_per_tok": 9})


def test_spellings_that_disagree() -> None:
    with pytest.raises(InvalidInputError, match="disagree"):
        read_config(MIXTRAL | {"num_experts": 8})


# ---- what is not modelled


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"num_local_experts": 8}, "experts (num_local_experts)"),
        ({"kv_lora_rank": 512}, "latent attention (kv_lora_rank)"),
        ({"index_topk": 2048}, "sparse attention indexer (index_topk)"),
        ({"layer_types": ["linear_attention"] * 12}, "linear attention layers (layer_types: linear_attention)"),
        (
            {"layer_types": ["sliding_attention"] * 12},
            "sliding attention layers by list (layer_types) in LlamaForCausalLM",
        ),
        ({"hybrid_override_pattern": "M*"}, "Mamba layers (hybrid_override_pattern)"),
        ({"block_configs": [{}]}, "per-layer block_configs (DeciLM)"),
        ({"attn_output_gate": True}, "gated attention output (attn_output_gate)"),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, "attention_bias in MistralForCausalLM"),
        (
            {"architectures": ["OddForCausalLM"], "rotary_pct": 0.25},
            "layers of the architecture OddForCausalLM, with keys of its own: rotary_pct",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "layers of the architecture LlamaForSequenceClassification",
        ),
        ({"architectures": ["JambaForCausalLM"], "mamba_d_state": 16}, "Mamba layers (mamba_d_state)"),
    ],
)
def test_a_refusal_names_the_feature(changes: dict[str, Any], feature: str) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        read_config(LLAMA | changes, name="odd")
    assert feature in refusal.value.features


def test_switched_off_features_are_no_obstacle() -> None:
    off = {
        "index_topk": None,
        "num_local_experts": 0,
        "attn_output_gate": False,
        "layer_types": ["full_attention"] * 12,
    }
    assert read_config(LLAMA | off).parameter_count == read_config(LLAMA).parameter_count


# ---- families


def test_expert_counts_in_any_spelling() -> None:
    plain = {k: v for k, v in MIXTRAL.items() if k != "num_local_experts"}
    counts = {
        read_config(plain | {key: 4}).parameter_count
        for key in ("num_local_experts", "n_routed_experts", "num_experts", "num_moe_experts")
    }
    assert counts == {read_config(MIXTRAL).parameter_count}
    renamed = {k: v for k, v in MIXTRAL.items() if k != "intermediate_size"} | {"moe_intermediate_size": 512}
    assert read_config(renamed).parameter_count == read_config(MIXTRAL).parameter_count


def test_a_model_type_stands_in_for_the_architecture() -> None:
    spec = read_config({k: v for k, v in LLAMA.items() if k != "architectures"})
    assert spec.architecture == "LlamaForCausalLM"


def test_heads_default_to_attention_heads() -> None:
    for config in (LLAMA | {"num_key_value_heads": None}, {k: v for k, v in LLAMA.items() if "value" not in k}):
        assert read_config(config).layer_kinds[0].attention.kv_heads == 8


def test_sliding_windows() -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert read_config(mistral | {"sliding_window": 64}).layer_kinds[0].attention.window_tokens == 64
    assert read_config(mistral | {"sliding_window": None}).layer_kinds[0].attention.window_tokens is None
    assert read_config(mistral).layer_kinds[0].attention.window_tokens == 4096  # transformers' default
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 9}
    assert read_config(qwen).layer_pattern == (0,) * 12
    sliding = read_config(qwen | {"use_sliding_window": True})
    windows = [sliding.layer_kinds[kind].attention.window_tokens for kind in sliding.layer_pattern]
    assert windows == [None] * 9 + [64] * 3


def test_dtype_comes_from_either_key_and_is_told_when_absent() -> None:
    without = {k: v for k, v in LLAMA.items() if k != "torch_dtype"}
    assert read_config(without | {"dtype": "float16"}).base_dtype == "fp16"
    assumed = read_config(without)
    assert assumed.base_dtype == "bf16"
    assert "bf16 assumed" in assumed.source


def test_splits_and_fused_groups() -> None:
    linears = {m.name: m for m in read_config(MIXTRAL).layer_kinds[0].linears}
    assert {linears[name].fused for name in ("q_proj", "k_proj", "v_proj")} == {"qkv"}
    assert (linears["o_proj"].split, linears["o_proj"].granularity) == ("inputs", 32)
    assert (linears["router"].split, linears["router"].quantized) == ("none", False)
    down = linears["experts.down_proj"]
    assert (down.split, down.experts, down.active_experts) == ("inputs", 4, 2)


# ---- folders and names


def test_a_folder_with_index_and_quantisation(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    write(folder, LLAMA)
    write(folder, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, "hf_quant_config.json")
    computed = read_config(folder).weight_bytes
    write(folder, {"metadata": {"total_size": computed + 960}, "weight_map": {}}, "model.safetensors.index.json")
    spec = read_config(folder)
    assert spec.weight_bytes == computed + 960
    assert (spec.name, spec.source, spec.weight_dtype, spec.kv_dtype) == (
        "my-model",
        "my-model/config.json",
        "fp8",
        "fp8",
    )
    assert read_config(str(folder / "config.json")) == spec
    assert read_config(folder, name="other").name == "other"


@pytest.mark.parametrize("total", [True, -1, "12", 10**12])
def test_an_index_that_cannot_be_of_this_model(tmp_path: Path, total: object) -> None:
    write(tmp_path, LLAMA)
    write(tmp_path, {"metadata": {"total_size": total}}, "model.safetensors.index.json")
    with pytest.raises(InvalidInputError, match=r"total_size|not of the same model"):
        read_config(tmp_path)


def test_an_index_that_counts_mtp_layers_is_not_used(tmp_path: Path) -> None:
    write(tmp_path, LLAMA | {"num_nextn_predict_layers": 1})
    write(tmp_path, {"metadata": {"total_size": 123}}, "model.safetensors.index.json")
    spec = read_config(tmp_path)
    assert spec.checkpoint_bytes is None
    assert "index not used" in spec.source


def test_siblings_of_a_named_file(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA, "org--model_config.json")
    write(tmp_path, {"quantization": {"quant_algo": "FP8"}}, "org--model_hf_quant_config.json")
    write(tmp_path, {"quantization": {"quant_algo": "NVFP4"}}, "hf_quant_config.json")
    spec = read_config(path)
    assert (spec.name, spec.weight_dtype, spec.kv_dtype) == ("org/model", "fp8", "bf16")


# ---- quantisation

FP8 = {"num_bits": 8, "type": "float"}
INT8 = {"num_bits": 8, "type": "int"}
INT4 = {"num_bits": 4, "type": "int"}
FP4 = {"num_bits": 4, "type": "float"}


@pytest.mark.parametrize(
    ("config", "weight", "compute", "kv", "o_proj_bytes"),
    [
        # o_proj is 256 x 256: 65,536 bytes in 8 bits, 32,768 in 4.
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8", "fp8", "bf16", 65_536 + 4),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", "fp8", "bf16", 65_536 + 4 * 4),
        ({"quant_method": "fbgemm_fp8"}, "fp8", "fp8", "bf16", 65_536 + 256 * 4),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4", "bf16", "bf16", 32_768 + 512 * 5 // 2),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "int4", "bf16", "bf16", 32_768 + 1024 * 5 // 2),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4", "bf16", "bf16", 32_768 + 512 * 5 // 2),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8", "bf16", "bf16", 65_536 + 256 * 3),
        (scheme(FP8 | {"strategy": "tensor"}, FP8), "fp8", "fp8", "bf16", 65_536 + 2),
        (scheme(FP8 | {"strategy": "channel"}, FP8), "fp8", "fp8", "bf16", 65_536 + 256 * 2),
        (scheme(INT8 | {"strategy": "channel"}, INT8), "int8", "int8", "bf16", 65_536 + 256 * 2),
        (scheme(INT8 | {"strategy": "channel"}), "int8", "bf16", "bf16", 65_536 + 256 * 2),
        (scheme(INT4 | {"strategy": "group", "group_size": 128}), "int4", "bf16", "bf16", 32_768 + 512 * 2),
        (scheme(INT4 | {"strategy": "group", "group_size": 128}, FP8), "int4", "fp8", "bf16", 32_768 + 512 * 2),
        (
            scheme(INT4 | {"strategy": "group", "group_size": 128, "symmetric": False}),
            "int4",
            "bf16",
            "bf16",
            32_768 + 512 * 5 // 2,
        ),
        (
            scheme(FP8 | {"strategy": "block", "block_structure": [128, 128]}, FP8),
            "fp8",
            "fp8",
            "bf16",
            65_536 + 4 * 2,
        ),
        (
            scheme(FP4 | {"strategy": "tensor_group", "group_size": 16}, FP4, kv_cache_scheme=FP8),
            "fp4",
            "fp4",
            "fp8",
            32_768 + 4096,
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", "fp8", "bf16", 65_536 + 4),
        ({"quant_algo": "FP8", "kv_cache_scheme": "FP8"}, "fp8", "fp8", "fp8", 65_536 + 4),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
            "fp4",
            "fp4",
            "fp8",
            32_768 + 4096,
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "int4", "bf16", "bf16", 32_768 + 512 * 2),
    ],
)
def test_storage_and_types(config: dict[str, Any], weight: str, compute: str, kv: str, o_proj_bytes: int) -> None:
    spec = quantised(config)
    assert (spec.weight_dtype, spec.compute_dtype, spec.kv_dtype) == (weight, compute, kv)
    output = next(m for m in spec.layer_kinds[0].linears if m.name == "o_proj")
    assert output.weight_bytes(1, spec.base_dtype, spec.quantization) == o_proj_bytes
    assert spec.parameter_count == read_config(LLAMA).parameter_count


def test_only_the_cache_may_be_quantised() -> None:
    spec = quantised({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"})
    assert (spec.quantization, spec.weight_dtype, spec.kv_dtype) == (None, "bf16", "fp8")


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        (["lm_head"], {}),
        (["model.layers.1.self_attn.o_proj"], {1: {"o_proj"}}),
        (["model.layers.1.self_attn"], {1: {"q_proj", "k_proj", "v_proj", "o_proj"}}),
        (["model.layers.1.self_attn*"], {1: {"q_proj", "k_proj", "v_proj", "o_proj"}}),
        (["model.layers.1.*"], {1: set(MATRICES)}),
        (["model.layers.1*"], {1: set(MATRICES), 10: set(MATRICES), 11: set(MATRICES)}),
        (["model.layers.1"], {1: set(MATRICES)}),
        (["re:.*layers\\.1\\.mlp.*"], {1: {"gate_proj", "up_proj", "down_proj"}}),
        (["re:.*\\.down_proj$"], {layer: {"down_proj"} for layer in range(12)}),
        (["gate"], {}),
        (["down_proj"], {layer: {"down_proj"} for layer in range(12)}),
        (["model.layers.*.self_attn"], {layer: {"q_proj", "k_proj", "v_proj", "o_proj"} for layer in range(12)}),
    ],
)
@pytest.mark.parametrize("method", ["fp8", "compressed-tensors", "modelopt"])
def test_ignore_lists(method: str, entries: list[str], kept: dict[int, set[str]]) -> None:
    config: dict[str, Any] = {
        "fp8": {"quant_method": "fp8", "modules_to_not_convert": entries},
        "compressed-tensors": scheme(FP8, FP8, ignore=entries),
        "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": entries},
    }[method]
    spec = quantised(config)
    for layer, kind in enumerate(spec.layer_pattern):
        linears = spec.layer_kinds[kind].linears
        assert {m.name for m in linears if not m.quantized} == kept.get(layer, set())
    assert len({kind.name for kind in spec.layer_kinds}) == len(spec.layer_kinds)


def test_everything_ignored_is_not_quantised() -> None:
    spec = quantised({"quant_method": "fp8", "modules_to_not_convert": ["model"]})
    assert (spec.quantization, spec.weight_dtype, spec.compute_dtype) == (None, "bf16", "bf16")


def test_targets_limit_what_is_quantised() -> None:
    groups = {"group_0": {"targets": ["re:.*mlp.*"], "weights": FP8, "input_activations": FP8}}
    spec = quantised({"quant_method": "compressed-tensors", "config_groups": groups})
    assert {m.name for m in spec.layer_kinds[0].linears if m.quantized} == {"gate_proj", "up_proj", "down_proj"}


def test_routers_are_never_quantised() -> None:
    for config in ({"quant_method": "fp8"}, scheme(FP8, FP8), {"quant_method": "awq", "bits": 4, "group_size": 64}):
        spec = quantised(config, MIXTRAL)
        assert {m.name for m in spec.layer_kinds[0].linears if not m.quantized} == {"router"}


def test_experts_of_one_layer_go_together() -> None:
    every = [f"model.layers.0.block_sparse_moe.experts.{expert}.w2" for expert in range(4)]
    spec = quantised({"quant_method": "fp8", "modules_to_not_convert": every}, MIXTRAL)
    assert spec.kind_counts == (1, 11)
    with pytest.raises(UnsupportedModelError, match="experts of one layer quantised differently"):
        quantised({"quant_method": "fp8", "modules_to_not_convert": every[1:2]}, MIXTRAL)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"quant_method": "bitsandbytes"}, "quantisation method 'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "3-bit gptq weights"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}, "quantised LM head"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "'MIXED_PRECISION'"),
        ({"quant_algo": "NVFP4", "quantized_layers": {"a": {}}}, "differs by layer"),
        (scheme(FP8 | {"strategy": "token"}), "strategy 'token'"),
        (scheme({"num_bits": 6, "type": "int"}), "6-bit int numbers"),
        (scheme(FP8, FP8, sparsity_config={"format": "sparse-24-bitmask"}), "sparse weights"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": FP8, "targets": ["x"]}, "b": {"weights": INT4, "targets": ["y"]}},
            },
            "several quantisation schemes",
        ),
        (scheme(FP8, FP8, kv_cache_scheme="INT3"), "KV cache type 'INT3'"),
    ],
)
def test_unknown_quantisation_is_refused_by_name(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnsupportedModelError, match=problem):
        quantised(config)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"bits": 4}, "missing key 'quant_method'"),
        ({"quant_method": "awq", "bits": 4}, "missing key 'group_size'"),
        ({"quant_method": "awq", "bits": True, "group_size": 128}, "bits = True"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size = \[128\]"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert = 'lm_head'"),
        ({"quant_method": "compressed-tensors"}, "missing key 'config_groups'"),
        (scheme(INT4 | {"strategy": "group"}), "group_size = None"),
        (scheme(FP8, FP8, ignore=["re:("]), "not a regular expression"),
    ],
)
def test_bad_quantisation_values(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        quantised(config)
