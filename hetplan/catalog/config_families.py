"""The model families that are read: one small entry each.

An entry says which keys the family reads and how its layers are put together, with the defaults of
the transformers class of that name; what no entry describes is refused by `config_features`.
"""

from __future__ import annotations

from hetplan.catalog.config_classic import (
    biased_head_ends,
    bloom,
    bloom_ends,
    falcon,
    gpt_j,
    gpt_neox,
    layer_norm_ends,
    phi,
    phi3,
)
from hetplan.catalog.config_hybrid import deci, kimi_linear, nemotron_h, qwen_hybrid
from hetplan.catalog.config_layers import ALWAYS, Family, Switch
from hetplan.catalog.config_sparse import deepseek_v4, gemma4, llama4, minimax_m3, sparse_latent, v4_ends

_ATTENTION_BIAS = Switch("attention_bias", False)
_DEEPSEEK_HANDLES = frozenset({"experts", "mla"})
_LINEAR_HANDLES = frozenset({"linear_attention", "linear_num_value_heads", "attn_output_gate"})
_BLOOM_SPELLINGS = (
    ("n_embed", "hidden_size"),
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
)
_BLOCK_SPARSE_MODULES = ("experts.{e}.w1", "experts.{e}.w3", "experts.{e}.w2")

FAMILIES = (
    Family(
        ("LlamaForCausalLM",),
        ("llama",),
        qkv_bias=_ATTENTION_BIAS,
        output_bias=_ATTENTION_BIAS,
        mlp_bias=Switch("mlp_bias", False),
    ),
    Family(("Qwen2ForCausalLM",), ("qwen2",), qkv_bias=ALWAYS, window="from_layer", default_window=4096),
    Family(
        ("Qwen3ForCausalLM",),
        ("qwen3", "qwen3_vl_text"),
        qkv_bias=_ATTENTION_BIAS,
        output_bias=_ATTENTION_BIAS,
        qk_norm="head",
        default_head_dim=128,
        window="from_layer",
        default_window=4096,
    ),
    Family(("MistralForCausalLM",), ("mistral",), default_kv_heads=8, window="given", default_window=4096),
    Family(
        ("MixtralForCausalLM",),
        ("mixtral",),
        default_kv_heads=8,
        window="given",
        experts="all",
        moe_module="block_sparse_moe",
        expert_modules=_BLOCK_SPARSE_MODULES,
        expert_size_keys=("moe_intermediate_size", "intermediate_size"),
        handles=frozenset({"experts"}),
    ),
    Family(
        ("Qwen2MoeForCausalLM",),
        ("qwen2_moe",),
        qkv_bias=Switch("qkv_bias", True),
        window="by_types",
        default_window=4096,
        experts="by_step",
        shared="size",
        handles=frozenset({"experts"}),
    ),
    Family(
        ("Qwen3MoeForCausalLM",),
        ("qwen3_moe", "qwen3_vl_moe_text"),
        qkv_bias=_ATTENTION_BIAS,
        output_bias=_ATTENTION_BIAS,
        qk_norm="head",
        window="switched",
        default_window=4096,
        experts="by_step",
        handles=frozenset({"experts"}),
    ),
    Family(
        ("DeepseekV2ForCausalLM",),
        ("deepseek_v2",),
        attention="mla",
        qkv_bias=_ATTENTION_BIAS,
        output_bias=_ATTENTION_BIAS,
        mlp_bias=Switch("mlp_bias", False),
        experts="after_first",
        shared="count",
        correction=lambda keys: keys.text("topk_method") == "noaux_tc",
        handles=_DEEPSEEK_HANDLES,
    ),
    Family(
        ("DeepseekV3ForCausalLM",),
        ("deepseek_v3",),
        attention="mla",
        qkv_bias=_ATTENTION_BIAS,
        output_bias=_ATTENTION_BIAS,
        experts="after_first",
        default_dense_layers=3,
        shared="count",
        correction=lambda keys: keys.text("topk_method") in (None, "noaux_tc"),
        handles=_DEEPSEEK_HANDLES,
    ),
    Family(
        ("MiniMaxM2ForCausalLM",),
        ("minimax_m2",),
        qk_norm="projection",
        experts="all",
        moe_module="block_sparse_moe",
        expert_modules=_BLOCK_SPARSE_MODULES,
        expert_size_keys=("moe_intermediate_size", "intermediate_size"),
        correction=lambda keys: keys.flag("use_routing_bias", True),
        handles=frozenset({"experts", "projection_qk_norm"}),
    ),
    Family(
        ("GptOssForCausalLM",),
        ("gpt_oss",),
        qkv_bias=Switch("attention_bias", True),
        output_bias=Switch("attention_bias", True),
        default_kv_heads=8,
        default_head_dim=64,
        window="alternating",
        default_window=128,
        experts="all",
        expert_modules=("experts.gate_up_proj", "experts.gate_up_proj", "experts.down_proj"),
        router_module="router",
        expert_size_keys=("moe_intermediate_size", "intermediate_size"),
        expert_bias=True,
        sinks=True,
        handles=frozenset({"experts"}),
    ),
    # ---- layers that a function builds
    Family(
        ("Qwen3_5MoeForCausalLM",),
        ("qwen3_5_moe_text",),
        build=qwen_hybrid,
        handles=_LINEAR_HANDLES | {"experts"},
    ),
    Family(("Qwen3_5ForCausalLM",), ("qwen3_5_text",), build=qwen_hybrid, handles=_LINEAR_HANDLES),
    Family(("Qwen3NextForCausalLM",), ("qwen3_next",), build=qwen_hybrid, handles=_LINEAR_HANDLES | {"experts"}),
    Family(
        ("KimiLinearForCausalLM",),
        ("kimi_linear",),
        build=kimi_linear,
        spellings=(("model_max_length", "max_position_embeddings"), ("num_shared_experts", "n_shared_experts")),
        handles=frozenset({"experts", "mla", "linear_attn_config"}),
    ),
    Family(
        ("NemotronHForCausalLM",),
        ("nemotron_h",),
        build=nemotron_h,
        prefixes=("model.layers", "backbone.layers"),
        handles=frozenset(
            {
                "experts",
                "hybrid_override_pattern",
                "mamba",
                "linear_attention",
                "mlp",
                "mamba_num_heads",
                "moe_latent_size",
                "moe_shared_expert_intermediate_size",
            }
        ),
    ),
    Family(("DeciLMForCausalLM",), ("nemotron-nas",), build=deci, handles=frozenset({"block_configs"})),
    Family(
        ("DeepseekV32ForCausalLM",),
        ("deepseek_v32",),
        build=sparse_latent,
        handles=_DEEPSEEK_HANDLES | {"index_topk"},
    ),
    Family(
        ("GlmMoeDsaForCausalLM",),
        ("glm_moe_dsa",),
        build=sparse_latent,
        handles=_DEEPSEEK_HANDLES | {"index_topk", "mlp_layer_types", "deepseek_sparse_attention", "indexed_attention"},
    ),
    Family(
        ("DeepseekV4ForCausalLM",),
        ("deepseek_v4",),
        build=deepseek_v4,
        ends=v4_ends,
        prefixes=("model.layers", "layers"),
        handles=frozenset({"experts", "index_topk", "compress_ratios", "hc_mult", "o_lora_rank"}),
    ),
    Family(
        ("MiniMaxM3ForCausalLM",),
        ("minimax_m3", "minimax_m3_vl_text"),
        build=minimax_m3,
        handles=frozenset(
            {"experts", "sparse_attention_config", "dense_intermediate_size", "shared_intermediate_size"}
        ),
    ),
    Family(
        ("Llama4ForCausalLM",),
        ("llama4_text",),
        build=llama4,
        handles=frozenset(
            {"experts", "attention_chunk_size", "interleave_moe_layer_step", "chunked_attention"},
        ),
    ),
    Family(
        ("Gemma4ForCausalLM",),
        ("gemma4_text",),
        build=gemma4,
        spellings=(("top_k_experts", "num_experts_per_tok"),),
        tied_by_default=True,
        handles=frozenset(
            {
                "experts",
                "enable_moe_block",
                "attention_k_eq_v",
                "global_head_dim",
                "num_global_key_value_heads",
            }
        ),
    ),
    Family(
        ("GPTJForCausalLM",),
        ("gptj",),
        build=gpt_j,
        ends=biased_head_ends,
        spellings=(
            ("n_embd", "hidden_size"),
            ("n_layer", "num_hidden_layers"),
            ("n_head", "num_attention_heads"),
            ("n_positions", "max_position_embeddings"),
        ),
        prefixes=("transformer.h",),
    ),
    Family(
        ("GPTNeoXForCausalLM",),
        ("gpt_neox",),
        build=gpt_neox,
        ends=layer_norm_ends,
        prefixes=("gpt_neox.layers",),
        handles=frozenset({"use_parallel_residual"}),
    ),
    Family(
        ("FalconForCausalLM",),
        ("falcon", "RWForCausalLM", "RefinedWeb", "RefinedWebModel"),
        build=falcon,
        ends=layer_norm_ends,
        spellings=(*_BLOOM_SPELLINGS, ("num_kv_heads", "num_key_value_heads"), ("n_head_kv", "num_key_value_heads")),
        default_positions=2048,
        tied_by_default=True,
        prefixes=("transformer.h",),
        handles=frozenset({"alibi", "parallel_attn", "new_decoder_architecture"}),
    ),
    Family(
        ("BloomForCausalLM",),
        ("bloom",),
        build=bloom,
        ends=bloom_ends,
        spellings=(*_BLOOM_SPELLINGS, ("seq_length", "max_position_embeddings")),
        # ALiBi has no limit of its own; BLOOM was trained on 2,048 tokens.
        default_positions=2048,
        tied_by_default=True,
        prefixes=("transformer.h",),
    ),
    Family(("PhiForCausalLM",), ("phi",), build=phi, ends=biased_head_ends),
    Family(("Phi3ForCausalLM",), ("phi3",), build=phi3),
)

# Models around a language model: only that part is read.
WRAPPERS = frozenset(
    {
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "MiniMaxM3SparseForConditionalGeneration",
        "MiniMaxM3VLForConditionalGeneration",
    }
)
