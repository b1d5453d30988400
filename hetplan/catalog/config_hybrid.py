"""Layers of models that mix attention with linear attention, Mamba-2, or nothing in its place.

The state of a linear-attention or Mamba-2 layer has a constant size, and its short convolution keeps its
last inputs; the parameters of the convolution, the decay and the gated norm count as other parameters.
"""

from __future__ import annotations

from typing import Literal

from hetplan.catalog.config_keys import Keys
from hetplan.catalog.config_layers import (
    EXPERT_COUNT_KEYS,
    dense_layers,
    expert_counts,
    listed_types,
    read_heads,
    read_latent,
    read_state_dtype,
    step_layers,
)
from hetplan.catalog.config_matrices import Layer, Matrix, experts, matrix, mlp, output_projection, projections, router
from hetplan.catalog.dtypes import Dtype
from hetplan.catalog.model import Attention
from hetplan.errors import UnsupportedModelError

# Module paths of a Mamba-2 or attention layer in Nemotron-H, whose every layer has one mixer.
_MIXER_QKVO = ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj", "mixer.o_proj")
_NEMOTRON_LETTERS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
_NEMOTRON_TYPES = {"linear_attention": "mamba", "full_attention": "attention"}
# Widths of DeciLM's MLPs are rounded up to a multiple of this.
_DECI_MULTIPLE = 256


def qwen_hybrid(keys: Keys) -> list[Layer]:
    """Qwen3-Next and Qwen3.5: three layers with a gated delta net, then one of attention with gated output."""
    if not keys.flag("attn_output_gate", True):
        raise UnsupportedModelError(keys.where, [f"attention without gated output in {keys.architecture}"])
    hidden = keys.count("hidden_size")
    types = listed_types(keys, ("linear_attention", "full_attention"))
    if types is None:
        every = keys.count("full_attention_interval", default=4)
        count = keys.count("num_hidden_layers")
        types = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(count)]
    parts = {
        "linear_attention": ("linear", *_gated_delta_net(keys)),
        "full_attention": ("full", *_gated_attention(keys)),
    }
    # The dense models of the family have no experts to place.
    some = keys.optional_count(*EXPERT_COUNT_KEYS) is not None
    sparse = step_layers(keys, len(types)) if some else [False] * len(types)
    found = []
    for kind, with_experts in zip(types, sparse, strict=True):
        name, attention, matrices, other = parts[kind]
        second = _qwen_experts(keys) if with_experts else mlp(hidden, keys.count("intermediate_size"))
        label = f"{'moe' if with_experts else 'dense'}-{name}"
        found.append(Layer(label, attention, (*matrices, *second), other + 2 * hidden))
    return found


def _gated_delta_net(keys: Keys) -> tuple[Attention, list[Matrix], int]:
    hidden = keys.count("hidden_size")
    key_heads = keys.count("linear_num_key_heads", default=16)
    value_heads = keys.count("linear_num_value_heads", default=32)
    key_dim, value_dim = (
        keys.count("linear_key_head_dim", default=128),
        keys.count("linear_value_head_dim", default=128),
    )
    kernel = keys.count("linear_conv_kernel_dim", default=4)
    if value_heads % key_heads:
        raise keys.fault("linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads = {key_heads}")
    values, channels = value_heads * value_dim, 2 * key_heads * key_dim + value_heads * value_dim
    module = "linear_attn"
    matrices = [
        matrix("in_proj_qkv", f"{module}.in_proj_qkv", hidden, channels, fused="in_proj"),
        matrix("in_proj_z", f"{module}.in_proj_z", hidden, values, fused="in_proj"),
        matrix("in_proj_b", f"{module}.in_proj_b", hidden, value_heads, fused="in_proj_ba"),
        matrix("in_proj_a", f"{module}.in_proj_a", hidden, value_heads, fused="in_proj_ba"),
        output_projection(hidden, value_heads, value_dim, module=f"{module}.out_proj"),
    ]
    state = _state("linear", value_heads, key_heads, key_dim, value_dim, kernel, read_state_dtype(keys))
    return state, matrices, channels * kernel + 2 * value_heads + value_dim


def _gated_attention(keys: Keys) -> tuple[Attention, list[Matrix], int]:
    heads, kv_heads, head_dim = read_heads(keys, default_kv_heads=2, default_head_dim=256)
    bias = keys.flag("attention_bias", False)
    matrices = projections(
        keys.count("hidden_size"), heads, kv_heads, head_dim, qkv_bias=bias, output_bias=bias, gated_output=True
    )
    attention = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_head_dim=head_dim)
    return attention, matrices, 2 * head_dim


def _qwen_experts(keys: Keys) -> list[Matrix]:
    hidden, (count, active) = keys.count("hidden_size"), expert_counts(keys)
    return [
        router(hidden, count, module="mlp.gate"),
        *experts(hidden, keys.count("moe_intermediate_size"), count, active),
        *mlp(
            hidden,
            keys.count("shared_expert_intermediate_size"),
            module="mlp.shared_expert",
            prefix="shared_experts.",
        ),
        matrix("shared_expert_gate", "mlp.shared_expert_gate", hidden, 1, split="none", quantized=False),
    ]


def kimi_linear(keys: Keys) -> list[Layer]:
    """Kimi Linear: Kimi delta attention (KDA), then latent attention in every fourth layer."""
    linear = keys.section("linear_attn_config")
    if linear is None:
        raise keys.fault("linear_attn_config", None, "a JSON object is needed")
    inner = Keys(linear, f"{keys.where} linear_attn_config", keys.architecture)
    if inner.flag("use_full_rank_gate", False):
        raise UnsupportedModelError(keys.where, ["output gates of full rank (linear_attn_config.use_full_rank_gate)"])
    count, hidden = keys.count("num_hidden_layers"), keys.count("hidden_size")
    full, kda = set(inner.counts("full_attn_layers")), set(inner.counts("kda_layers"))
    if full & kda or full | kda != set(range(1, count + 1)):
        raise keys.fault("linear_attn_config", "...", f"its two lists must hold each of the layers 1..{count} once")
    parts = {False: ("kda", *_delta_attention(keys, inner)), True: ("full", *read_latent(keys))}
    found = []
    for layer, with_experts in enumerate(dense_layers(keys, count, default=1)):
        name, attention, matrices, other = parts[layer + 1 in full]
        if with_experts:
            experts_held, _ = expert_counts(keys)
            second, other = deepseek_experts(keys), other + experts_held
        else:
            second = mlp(hidden, keys.count("intermediate_size"))
        label = f"{'moe' if with_experts else 'dense'}-{name}"
        found.append(Layer(label, attention, (*matrices, *second), other + 2 * hidden))
    return found


def _delta_attention(keys: Keys, linear: Keys) -> tuple[Attention, list[Matrix], int]:
    hidden = keys.count("hidden_size")
    heads, head_dim = linear.count("num_heads"), linear.count("head_dim")
    kernel = linear.count("short_conv_kernel_size", default=4)
    width, module = heads * head_dim, "self_attn"
    matrices = [
        *projections(hidden, heads, heads, head_dim),
        matrix("f_a_proj", f"{module}.f_a_proj", hidden, head_dim, split="none", fused="gates_a"),
        matrix("g_a_proj", f"{module}.g_a_proj", hidden, head_dim, split="none", fused="gates_a"),
        matrix("f_b_proj", f"{module}.f_b_proj", head_dim, width, granularity=head_dim),
        matrix("g_b_proj", f"{module}.g_b_proj", head_dim, width, granularity=head_dim),
        matrix("b_proj", f"{module}.b_proj", hidden, heads),
    ]
    # vLLM and the reference keep this state in 32 bits whatever the model's type.
    state = _state("linear", heads, heads, head_dim, head_dim, kernel, "fp32")
    return state, matrices, 3 * width * kernel + width + heads + head_dim


def deepseek_experts(keys: Keys) -> list[Matrix]:
    """Router, routed experts and the experts that every token uses, as DeepSeek names them."""
    hidden, size = keys.count("hidden_size"), keys.count("moe_intermediate_size")
    count, active = expert_counts(keys)
    shared = keys.count("n_shared_experts", default=0, minimum=0)
    found = [router(hidden, count, module="mlp.gate"), *experts(hidden, size, count, active)]
    if shared:
        found += mlp(hidden, shared * size, module="mlp.shared_experts", prefix="shared_experts.")
    return found


def nemotron_h(keys: Keys) -> list[Layer]:
    """Nemotron-H: each layer is one of Mamba-2, attention, an MLP, or experts, behind one norm."""
    hidden = keys.count("hidden_size")
    heads, kv_heads, head_dim = read_heads(keys, default_kv_heads=8, default_head_dim=128)
    attention = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_head_dim=head_dim)
    absent = attention.replace(kind="none")
    kinds = _nemotron_types(keys)
    built: dict[str, Layer] = {}
    for kind in dict.fromkeys(kinds):
        if kind == "mamba":
            state, matrices, other = _mamba(keys)
            built[kind] = Layer(kind, state, tuple(matrices), other + hidden)
        elif kind == "attention":
            projected = projections(hidden, heads, kv_heads, head_dim, modules=_MIXER_QKVO)
            built[kind] = Layer(kind, attention, tuple(projected), hidden)
        elif kind == "mlp":
            parts = _ungated(keys, keys.count("intermediate_size"), "mixer", "")
            built[kind] = Layer(kind, absent, tuple(parts), hidden)
        else:
            count, _ = expert_counts(keys)
            built[kind] = Layer(kind, absent, tuple(_latent_experts(keys)), hidden + count)
    return [built[kind] for kind in kinds]


def _nemotron_types(keys: Keys) -> list[str]:
    pattern = keys.text("hybrid_override_pattern")
    named = keys.texts("layers_block_type") or keys.texts("layer_types")
    if pattern is not None:
        key, kinds = "hybrid_override_pattern", [_NEMOTRON_LETTERS.get(letter, letter) for letter in pattern]
    else:
        key, kinds = "layers_block_type", [_NEMOTRON_TYPES.get(kind, kind) for kind in named]
    unknown = [kind for kind in kinds if kind not in _NEMOTRON_LETTERS.values()]
    if unknown or not kinds:
        raise keys.fault(key, unknown[0] if unknown else None, "mamba, attention, mlp or moe (M, *, -, E) is needed")
    return kinds


def _mamba(keys: Keys) -> tuple[Attention, list[Matrix], int]:
    hidden = keys.count("hidden_size")
    heads, head_dim = keys.count("mamba_num_heads", default=128), keys.count("mamba_head_dim", default=64)
    groups = keys.count("n_groups", "mamba_n_groups", default=8)
    state_size = keys.count("ssm_state_size", default=128)
    kernel = keys.count("conv_kernel", "mamba_d_conv", default=4)
    if heads % groups:
        raise keys.fault("mamba_num_heads", heads, f"a multiple of n_groups = {groups}")
    inner, channels = heads * head_dim, heads * head_dim + 2 * groups * state_size
    bias = keys.flag("use_bias", False)
    matrices = [
        matrix("in_proj", "mixer.in_proj", hidden, inner + channels + heads, bias=bias),
        output_projection(hidden, heads, head_dim, module="mixer.out_proj", bias=bias),
    ]
    convolution = channels * (kernel + (1 if keys.flag("use_conv_bias", True) else 0))
    dtype = read_state_dtype(keys, "mamba_ssm_cache_dtype", default="fp32")
    state = _state("mamba", heads, groups, state_size, head_dim, kernel, dtype)
    # Decay, skip and step bias of each head, and the gated norm.
    return state, matrices, convolution + 3 * heads + inner


def _latent_experts(keys: Keys) -> list[Matrix]:
    hidden, (count, active) = keys.count("hidden_size"), expert_counts(keys)
    bias = keys.flag("mlp_bias", False)
    latent = keys.optional_count("moe_latent_size")
    size = keys.count("moe_intermediate_size")
    shared_size = keys.count("moe_shared_expert_intermediate_size")
    if bias:
        raise UnsupportedModelError(keys.where, [f"mlp_bias in experts of {keys.architecture}"])
    if keys.count("n_shared_experts", default=1) != 1:
        raise UnsupportedModelError(keys.where, [f"several shared experts (n_shared_experts) in {keys.architecture}"])
    paths = ("experts.{e}.up_proj", "experts.{e}.down_proj")
    found = [router(hidden, count, module="mixer.gate")]
    if latent is not None:
        found.append(matrix("fc1_latent_proj", "mixer.fc1_latent_proj", hidden, latent, split="none"))
    found += experts(latent or hidden, size, count, active, module="mixer", paths=paths, gated=False)
    if latent is not None:
        found.append(matrix("fc2_latent_proj", "mixer.fc2_latent_proj", latent, hidden, split="none"))
    return [*found, *_ungated(keys, shared_size, "mixer.shared_experts", "shared_experts.")]


def _ungated(keys: Keys, size: int, module: str, prefix: str) -> list[Matrix]:
    paths = ("up_proj", "down_proj")
    bias = keys.flag("mlp_bias", False)
    return mlp(keys.count("hidden_size"), size, module=module, paths=paths, prefix=prefix, bias=bias, gated=False)


def deci(keys: Keys) -> list[Layer]:
    """DeciLM (Llama-Nemotron): a Llama whose layers differ in KV heads and MLP width, or lack either."""
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    for key in ("attention_bias", "mlp_bias"):
        if keys.flag(key, False):
            raise UnsupportedModelError(keys.where, [f"{key} in {keys.architecture}"])
    head_dim = keys.count("head_dim", default=hidden // heads)
    blocks = keys.values.get("block_configs")
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise keys.fault("block_configs", blocks, "a list of JSON objects is needed")
    found = []
    for number, block in enumerate(blocks):
        where = f"{keys.where} block_configs[{number}]"
        parts = {}
        for part in ("attention", "ffn"):
            section = Keys(block, where, keys.architecture).section(part)
            if section is None:
                raise keys.fault(f"block_configs[{number}].{part}", None, "a JSON object is needed")
            parts[part] = Keys(section, f"{where}.{part}", keys.architecture)
            for key in ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens", "unshifted_sink"):
                if parts[part].values.get(key):
                    raise UnsupportedModelError(keys.where, [f"block_configs with {key}"])
        found.append(_deci_layer(parts["attention"], parts["ffn"], hidden, heads, head_dim))
    return found


def _deci_layer(attention: Keys, ffn: Keys, hidden: int, heads: int, head_dim: int) -> Layer:
    matrices: list[Matrix] = []
    other, names = 0, []
    if attention.flag("no_op", False):
        kept = Attention(kind="none", heads=heads, kv_heads=heads, head_dim=head_dim, value_head_dim=head_dim)
    else:
        group = attention.count("n_heads_in_group")
        if heads % group:
            raise attention.fault("n_heads_in_group", group, f"must divide num_attention_heads = {heads}")
        kv_heads = heads // group
        kept = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_head_dim=head_dim)
        matrices += projections(hidden, heads, kv_heads, head_dim)
        other += hidden
        names.append(f"kv{kv_heads}")
    if not ffn.flag("no_op", False):
        multiple = ffn.values.get("ffn_mult")
        if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not 0 < multiple < 1000:
            raise ffn.fault("ffn_mult", multiple, "a positive number is needed")
        size = -(-int(2 * multiple * hidden / 3) // _DECI_MULTIPLE) * _DECI_MULTIPLE
        matrices += mlp(hidden, size)
        other += hidden
        names.append(f"mlp{size}")
    return Layer("-".join(names) or "nothing", kept, tuple(matrices), other)


def _state(
    kind: Literal["linear", "mamba"], heads: int, groups: int, key_dim: int, value_dim: int, kernel: int, dtype: Dtype
) -> Attention:
    return Attention(
        kind=kind,
        heads=heads,
        kv_heads=groups,
        head_dim=key_dim,
        value_head_dim=value_dim,
        convolution_tokens=kernel - 1,
        state_dtype=dtype,
    )
