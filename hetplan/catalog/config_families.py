"""The model families that are read: one small entry each.

An entry says which keys the family reads and how its layers are put together, with the defaults of
the transformers class of that name; what no entry describes is refused by `config_features`.
"""

from __future__ import annotations

from hetplan.catalog.config_layers import ALWAYS, Family, Switch

_ATTENTION_BIAS = Switch("attention_bias", False)
_DEEPSEEK_HANDLES = frozenset({"experts", "mla"})
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
)

# Models around a language model: only that part is read.
WRAPPERS = frozenset(
    {
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
    }
)
