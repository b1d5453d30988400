"""Count parameters with transformers' own model classes, for ``expected_parameters.json``.

Run by hand, in an environment of its own with torch and transformers installed::

    python tests/catalog/make_expected_parameters.py CONFIG_FOLDER

Each configuration is built on torch's meta device as the text-only CausalLM class, without its
quantisation, and its parameters are counted: tied matrices once, router correction biases too (a
buffer in transformers, a tensor of the checkpoint), no MTP layers (transformers leaves them out) and
no vision tower (nor the tables by which some of DeepSeek-V4's layers choose experts: they hold numbers of experts,
not weights). A model that transformers has no class for is compared with its published size, within its rounding
("published"). Three sections: the folder's files ("configurations"), the catalogue's rows
("catalogue"), and small made-up configurations that turn on what those do not ("variants").

A row of a refused configuration names the feature by hand and is kept. A new file gets a row to count;
turn it into {"refused": ["feature"]} if transformers cannot build it or hetplan must not read it.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXPECTED = HERE / "expected_parameters.json"
CATALOGUE = HERE.parents[1] / "hetplan" / "catalog" / "data" / "models.json"
_TEXT_TYPES = {
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "minimax_m3": "minimax_m3_vl_text",
    "deepseek_ref": "deepseek_v4",
}

# No class in transformers: the size that the model's page on Hugging Face shows, and half of its last digit.
PUBLISHED = {"nemotron-nas": {"published": 49_900_000_000, "rounding": 50_000_000, "counted": "model page"}}

_TINY = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24}
_LINEAR = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3,
}
_MAMBA = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 3,
}
_INDEX = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 64}
_GPT = {"n_embd": 96, "n_layer": 3, "n_head": 8, "n_positions": 512, "vocab_size": 320, "torch_dtype": "float16"}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, **_TINY},
    "llama, tied, few KV heads": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "num_key_value_heads": 2,
        "head_dim": 20,
        **_TINY,
    },
    "qwen2 with sliding layers": {
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 1,
        **_TINY,
    },
    "qwen3 with biases, head_dim by default": {
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "attention_bias": True,
        **_TINY,
    },
    "mistral, KV heads by default": {"model_type": "mistral", "head_dim": 12, **_TINY},
    "mixtral": {
        "model_type": "mixtral",
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **_TINY,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_key_value_heads": 4,
        "num_experts": 6,
        "shared_expert_intermediate_size": 80,
        "mlp_only_layers": [0],
        **_EXPERTS,
        **_TINY,
    },
    "qwen2_moe without biases": {
        "model_type": "qwen2_moe",
        "num_key_value_heads": 4,
        "num_experts": 6,
        "shared_expert_intermediate_size": 80,
        "qkv_bias": False,
        **_EXPERTS,
        **_TINY,
    },
    "qwen3_moe, every other layer": {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 6,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "attention_bias": True,
        **_EXPERTS,
        **_TINY,
    },
    "deepseek_v2 with query rank and biases": {
        "model_type": "deepseek_v2",
        "q_lora_rank": 40,
        "attention_bias": True,
        "mlp_bias": True,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        **_EXPERTS,
        **_LATENT,
        **_TINY,
    },
    "deepseek_v3 without query rank": {
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "topk_method": "noaux_tc",
        "n_group": 2,
        "topk_group": 1,
        **_EXPERTS,
        **_LATENT,
        **_TINY,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **_TINY,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **_TINY,
    },
    "qwen3_5 without experts": {"model_type": "qwen3_5_text", **_LINEAR, **_TINY},
    "qwen3_5 with experts, layers by interval, biases": {
        "model_type": "qwen3_5_moe_text",
        "num_experts": 6,
        "shared_expert_intermediate_size": 80,
        "full_attention_interval": 2,
        "attention_bias": True,
        **_EXPERTS,
        **_LINEAR,
        **_TINY,
    },
    "qwen3_next, some layers without experts": {
        "model_type": "qwen3_next",
        "num_experts": 6,
        "shared_expert_intermediate_size": 80,
        "mlp_only_layers": [1],
        "layer_types": ["linear_attention", "full_attention"] * 2,
        **_EXPERTS,
        **_LINEAR,
        **_TINY,
    },
    "nemotron_h with every kind of layer, a latent space and biases": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "ME*-",
        "num_key_value_heads": 2,
        "head_dim": 20,
        "mlp_bias": False,
        "use_bias": True,
        "use_conv_bias": False,
        "n_routed_experts": 6,
        "moe_shared_expert_intermediate_size": 80,
        "moe_latent_size": 32,
        **_MAMBA,
        **_EXPERTS,
        **_TINY,
    },
    "nemotron_h by list, MLPs with biases": {
        "model_type": "nemotron_h",
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
        "num_key_value_heads": 4,
        "head_dim": 12,
        "mlp_bias": True,
        **_MAMBA,
        **_TINY,
    },
    "kimi_linear, first layers dense": {
        "model_type": "kimi_linear",
        "pad_token_id": 0,
        "q_lora_rank": None,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 2,
        "linear_attn_config": {
            "full_attn_layers": [2, 4],
            "kda_layers": [1, 3],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 3,
        },
        **_LATENT,
        **_TINY,
    },
    "deepseek_v32 with biases": {
        "model_type": "deepseek_v32",
        "q_lora_rank": 40,
        "attention_bias": True,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        **_INDEX,
        **_EXPERTS,
        **_LATENT,
        **_TINY,
    },
    "glm_moe_dsa with indexers by schedule": {
        "model_type": "glm_moe_dsa",
        "q_lora_rank": 40,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 2,
        "index_topk_freq": 2,
        "index_skip_topk_offset": 1,
        **_INDEX,
        **_EXPERTS,
        **_LATENT,
        **_TINY,
    },
    "glm_moe_dsa with lists": {
        "model_type": "glm_moe_dsa",
        "q_lora_rank": 40,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "index_topk_pattern": "FSFS",
        **_INDEX,
        **_EXPERTS,
        **_LATENT,
        **_TINY,
    },
    "deepseek_v4 with every kind of layer": {
        "model_type": "deepseek_v4",
        "num_key_value_heads": 1,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 40,
        "o_lora_rank": 24,
        "o_groups": 4,
        "hc_mult": 2,
        "compress_ratios": [0, 4, 128, 4, 0],
        "num_hash_layers": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "sliding_window": 16,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 64,
        **_EXPERTS,
        **{key: value for key, value in _TINY.items() if key != "intermediate_size"},
    },
    "minimax_m3": {
        "model_type": "minimax_m3",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "dense_intermediate_size": 320,
        "shared_intermediate_size": 64,
        "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_config": {
            "sparse_attention_freq": [0, 0, 1, 1],
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 24,
            "sparse_block_size": 16,
            "sparse_topk_blocks": 2,
            "sparse_local_block": 1,
        },
        **_TINY,
    },
    "llama4, experts by list": {
        "model_type": "llama4_text",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 320,
        "moe_layers": [1, 2],
        "attention_bias": True,
        **_TINY,
    },
    "gemma4 without experts": {
        "model_type": "gemma4_text",
        "num_key_value_heads": 4,
        "head_dim": 16,
        "global_head_dim": 24,
        "sliding_window": 64,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        **_TINY,
    },
    "gemma4 with experts, one projection for keys and values": {
        "model_type": "gemma4_text",
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "attention_bias": True,
        "head_dim": 16,
        "global_head_dim": 24,
        "sliding_window": 64,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
        **_TINY,
    },
    "gptj with an MLP of its own size": {"model_type": "gptj", "n_inner": 200, "rotary_dim": 4, **_GPT},
    "gpt_neox without attention biases": {"model_type": "gpt_neox", "attention_bias": False, **_TINY},
    "falcon, multi-query": {"model_type": "falcon", **_TINY},
    "falcon, one after the other, with biases": {
        "model_type": "falcon",
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
        "tie_word_embeddings": False,
        **_TINY,
    },
    "falcon, new decoder with one norm and a wide MLP": {
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
        "ffn_hidden_size": 300,
        **_TINY,
    },
    "bloom": {"model_type": "bloom", "hidden_size": 96, "n_layer": 3, "n_head": 8, "vocab_size": 320},
    "phi, few KV heads": {"model_type": "phi", "num_key_value_heads": 2, **_TINY},
    "phi3, few KV heads, tied": {
        "model_type": "phi3",
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        **_TINY,
    },
}


def count(config: dict[str, Any]) -> int:
    """Parameters of the language model that a config.json describes."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    text = copy.deepcopy(config.get("text_config") or config)
    if "tie_word_embeddings" in config:
        text.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
    for key in ("quantization_config", "auto_map", "architectures"):
        text.pop(key, None)
    text["model_type"] = _TEXT_TYPES.get(text["model_type"], text["model_type"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[text["model_type"]](**text))
    model.tie_weights()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return parameters + sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))


def row_of(config: dict[str, Any], counted: str) -> dict[str, Any]:
    """What a test compares with: the count, or the published size of a model without a class."""
    known = PUBLISHED.get(str(config.get("model_type")))
    return dict(known) if known else {"parameters": count(config), "counted": counted}


def main(folder: Path) -> None:
    import transformers

    counted = f"transformers {transformers.__version__} meta device"
    before = json.loads(EXPECTED.read_text())["configurations"] if EXPECTED.exists() else {}
    configurations = {}
    for path in sorted(folder.glob("*_config.json")):
        if path.name.endswith("_hf_quant_config.json"):
            continue
        row = before.get(path.name, {})
        if "refused" not in row:
            row = row_of(json.loads(path.read_text()), counted)
        configurations[path.name] = row
    rows = json.loads(CATALOGUE.read_text())
    content = {
        "configurations": configurations,
        "catalogue": {name: row_of(row["config"], counted) for name, row in sorted(rows.items())},
        "variants": {
            name: {"config": config, "parameters": count(config), "counted": counted}
            for name, config in VARIANTS.items()
        },
    }
    EXPECTED.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
