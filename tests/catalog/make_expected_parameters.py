"""Count parameters with transformers' own model classes, for ``expected_parameters.json``.

Run by hand, in an environment of its own with torch and transformers installed::

    python tests/catalog/make_expected_parameters.py CONFIG_FOLDER

Each configuration is built on torch's meta device as the text-only CausalLM class, without its
quantisation, and its parameters are counted: tied matrices once, router correction biases too (a
buffer in transformers, a tensor of the checkpoint), no MTP layers (transformers leaves them out) and
no vision tower. Three sections: the folder's files ("configurations"), the catalogue's rows
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
_TEXT_TYPES = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}

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
            row = {"parameters": count(json.loads(path.read_text())), "counted": counted}
        configurations[path.name] = row
    rows = json.loads(CATALOGUE.read_text())
    content = {
        "configurations": configurations,
        "catalogue": {
            name: {"parameters": count(row["config"]), "counted": counted} for name, row in sorted(rows.items())
        },
        "variants": {
            name: {"config": config, "parameters": count(config), "counted": counted}
            for name, config in VARIANTS.items()
        },
    }
    EXPECTED.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
