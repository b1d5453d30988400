"""What a configuration holds that hetplan does not model, by name: the reason behind every refusal.

A key that a builder would ignore can change the architecture, so known families are checked too:
a Llama with experts is refused rather than read as a dense Llama.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from hetplan.catalog.config_layers import EXPERT_COUNT_KEYS

_KNOWN_LAYER_TYPES = ("full_attention", "attention", "sliding_attention", "dense", "moe", "sparse")
_GIVEN_KEYS_SHOWN = 8

# key -> what its presence means. Values that switch the part off (null, false, 0, empty) do not count.
_PARTS = {
    "index_topk": "sparse attention indexer",
    "sparse_attention_config": "block-sparse attention",
    "compress_ratios": "compressed KV cache",
    "hc_mult": "hyper-connections",
    "o_lora_rank": "low-rank output projection",
    "hybrid_override_pattern": "Mamba layers",
    "mamba_num_heads": "Mamba layers",
    "mamba_d_state": "Mamba layers",
    "block_configs": "per-layer block_configs (DeciLM)",
    "linear_attn_config": "linear attention layers",
    "linear_num_value_heads": "linear attention layers",
    "attn_output_gate": "gated attention output",
    "attention_output_gate": "gated attention output",
    "mla_use_output_gate": "gated attention output",
    "attention_chunk_size": "chunked attention",
    "interleave_moe_layer_step": "experts every few layers",
    "num_kv_shared_layers": "KV cache shared between layers",
    "attention_k_eq_v": "one projection for keys and values",
    "global_head_dim": "two attention head sizes",
    "num_global_key_value_heads": "two numbers of KV heads",
    "enable_moe_block": "dense and expert MLP in one layer",
    "hidden_size_per_layer_input": "per-layer embeddings",
    "moe_latent_size": "experts in a latent space",
    "routed_expert_hidden_size": "experts in a latent space",
    "attn_res_block_size": "residual connections by attention",
    "expert_dtype": "experts stored in a type of their own",
    "use_double_wide_mlp": "MLP of double width",
    "qk_layernorm": "layer norms of queries and keys",
    "mlp_layer_types": "dense and expert layers by list",
    "share_expert_dim": "shared experts of their own size",
    "dense_intermediate_size": "dense layers of their own size",
    "shared_intermediate_size": "shared experts of their own size",
    "moe_shared_expert_intermediate_size": "shared experts of their own size",
    "cross_attention_layers": "cross-attention layers",
    "is_encoder_decoder": "encoder and decoder",
    "attention_sink": "attention sinks",
    "num_sink_tokens": "attention sinks",
    "add_swa_attention_sink_bias": "attention sinks",
    "add_full_attention_sink_bias": "attention sinks",
    "alibi": "ALiBi positions",
    "parallel_attn": "attention and MLP in parallel",
    "use_parallel_residual": "attention and MLP in parallel",
    "new_decoder_architecture": "attention and MLP in parallel",
}
# Activations of gated MLPs; others come with an MLP of another form.
_GATED_ACTIVATIONS = ("silu", "swish", "swiglu", "gelu")

# Keys that say nothing about an unknown architecture: shared by all, or about training and tokens.
_COMMON = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_bias",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "initializer_range",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "mlp_bias",
        "model_type",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "pad_token_id",
        "pretraining_tp",
        "quantization_config",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "text_config",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "vision_config",
        "vocab_size",
    }
)


def unsupported_features(values: Mapping[str, Any], handles: frozenset[str]) -> list[str]:
    """Names of the parts of a configuration that a family which ``handles`` some does not describe."""
    found = []
    if "mla" not in handles and _on(values.get("kv_lora_rank")):
        found.append("latent attention (kv_lora_rank)")
    experts = [key for key in EXPERT_COUNT_KEYS if _on(values.get(key))]
    if "experts" not in handles and experts:
        found.append(f"experts ({experts[0]})")
    found += _layer_types(values, handles)
    found += [
        name if name.endswith(")") else f"{name} ({key})"
        for key, name in _PARTS.items()
        if key not in handles and _on(values.get(key))
    ]
    if values.get("qk_norm_type", "per_layer") != "per_layer" and "projection_qk_norm" in handles:
        found.append(f"query and key norms of another form (qk_norm_type: {values['qk_norm_type']})")
    return list(dict.fromkeys(found))


def describe_unknown(values: Mapping[str, Any], architecture: str) -> list[str]:
    """Why an architecture without a family is refused: its parts, else the keys it alone has."""
    found = unsupported_features(values, frozenset({"mla", "experts"}))
    for key in ("hidden_act", "mlp_hidden_act", "hidden_activation"):
        activation = values.get(key)
        if isinstance(activation, str) and not activation.startswith(_GATED_ACTIVATIONS):
            found.append(f"MLP of another form ({key}: {activation})")
    if found:
        return found
    own = sorted(key for key in values if key not in _COMMON and _on(values[key]))[:_GIVEN_KEYS_SHOWN]
    told = f", with keys of its own: {', '.join(own)}" if own else ""
    return [f"layers of the architecture {architecture}{told}"]


def _layer_types(values: Mapping[str, Any], handles: frozenset[str]) -> list[str]:
    """Layers that are not plain attention, from the lists that name each layer's type."""
    found, known = [], {*_KNOWN_LAYER_TYPES, *handles}
    for key in ("layer_types", "layers_block_type"):
        types = values.get(key)
        if isinstance(types, list | tuple):
            counts = Counter(kind for kind in types if isinstance(kind, str) and kind not in known)
            found += [f"{kind.replace('_', ' ')} layers ({key}: {kind})" for kind in counts]
    types = values.get("attn_type_list")
    if isinstance(types, list | tuple) and any(kind != 1 for kind in types):
        found.append("linear attention layers (attn_type_list)")
    return found


def _on(value: object) -> bool:
    if isinstance(value, list | tuple | Mapping):
        return len(value) > 0
    return value is not None and value is not False and value not in (0, "")
