"""Layers whose attention chooses, compresses or bounds what it sees.

DeepSeek-V3.2 and GLM-5 score all tokens with a small indexer and attend to the best; MiniMax-M3 does so by
blocks; DeepSeek-V4 keeps one entry for several tokens beside a window; Llama 4 and Gemma 4 bound most layers.
Index keys are counted as vLLM keeps them.
"""

from __future__ import annotations

from hetplan.catalog.config_hybrid import deepseek_experts
from hetplan.catalog.config_keys import Keys
from hetplan.catalog.config_layers import Ends, dense_layers, expert_counts, listed_types, read_heads, read_latent
from hetplan.catalog.config_matrices import Layer, Matrix, experts, matrix, mlp, projections, router
from hetplan.catalog.model import Attention
from hetplan.errors import UnsupportedModelError

# An index key in 8 bits has a 4-byte scale for each 128 elements (vLLM's DeepseekV32IndexerCache).
_SCALE_BYTES, _SCALED_ELEMENTS = 4, 128
# vLLM keeps MiniMax-M3's index keys in 16 bits unless told otherwise.
_M3_INDEX_ELEMENT_BYTES = 2
# What stands in a row of DeepSeek-V4's compress_ratios: no compression, by 4 with an indexer, by 128 without.
_V4_INDEXED_RATIO, _V4_PLAIN_RATIO = 4, 128


def sparse_latent(keys: Keys) -> list[Layer]:
    """DeepSeek-V3.2 and GLM-5: latent attention to the tokens that an indexer chooses."""
    count, hidden = keys.count("num_hidden_layers"), keys.count("hidden_size")
    if keys.optional_count("q_lora_rank") is None:
        raise keys.fault("q_lora_rank", None, "the indexer needs it")
    bias = keys.flag("attention_bias", False)
    latent, matrices, norms = read_latent(keys, bias=bias, output_bias=bias)
    latent = latent.replace(top_k_tokens=keys.count("index_topk", default=2048))
    heads, head_dim = keys.count("index_n_heads"), keys.count("index_head_dim", default=128)
    index_bytes = _index_bytes(head_dim)
    indexed = latent.replace(index_heads=heads, index_head_dim=head_dim, index_bytes_per_token=index_bytes)
    indexer = _indexer(keys, heads, head_dim)
    found = []
    for own, with_experts in zip(_own_indexers(keys, count), dense_layers(keys, count, default=3), strict=True):
        parts = [*matrices, *(indexer if own else ())]
        # The layer norm of the index keys has a bias.
        other = norms + 2 * hidden + (2 * head_dim if own else 0)
        if with_experts:
            parts += deepseek_experts(keys)
            other += expert_counts(keys)[0]
        else:
            parts += mlp(hidden, keys.count("intermediate_size"))
        name = f"{'moe' if with_experts else 'dense'}{'' if own else '-shared-index'}"
        found.append(Layer(name, indexed if own else latent, tuple(parts), other))
    return found


def _index_bytes(head_dim: int) -> int:
    return head_dim + -(-head_dim // _SCALED_ELEMENTS) * _SCALE_BYTES


def _indexer(keys: Keys, heads: int, head_dim: int) -> list[Matrix]:
    hidden, module = keys.count("hidden_size"), "self_attn.indexer"
    rank = keys.count("q_lora_rank")
    return [
        matrix("indexer.wq_b", f"{module}.wq_b", rank, heads * head_dim, split="none"),
        matrix("indexer.wk", f"{module}.wk", hidden, head_dim, split="none"),
        # The weights of the heads are never quantised.
        matrix("indexer.weights_proj", f"{module}.weights_proj", hidden, heads, split="none", quantized=False),
    ]


def _own_indexers(keys: Keys, count: int) -> list[bool]:
    """Which layers have an indexer; the others take the choice of the last one before them."""
    listed = list(keys.texts("indexer_types"))
    pattern = keys.values.get("index_topk_pattern")
    if not listed and isinstance(pattern, str):
        listed = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    if listed:
        if len(listed) != count or not set(listed) <= {"full", "shared"}:
            raise keys.fault("indexer_types", listed, f"{count} times full or shared")
        return [kind == "full" for kind in listed]
    every = keys.count("index_topk_freq", default=1)
    offset = keys.count("index_skip_topk_offset", default=2, minimum=0)
    return [max(layer - offset + 1, 0) % every == 0 for layer in range(count)]


def deepseek_v4(keys: Keys) -> list[Layer]:
    """DeepSeek-V4: one shared key and value, compressed for all but a window, and hyper-connections.

    The tables of the layers that choose experts by the token's number are no parameters and are not counted.
    """
    count, hidden = keys.count("num_hidden_layers"), keys.count("hidden_size")
    ratios = keys.counts("compress_ratios")
    if len(ratios) < count:
        raise keys.fault("compress_ratios", list(ratios), f"must list num_hidden_layers = {count} layers")
    experts_held, _ = expert_counts(keys)
    # transformers takes the two for one.
    keys.count("moe_intermediate_size", "intermediate_size")
    hashed = keys.count("num_hash_layers", default=3, minimum=0)
    found = []
    for layer, ratio in enumerate(ratios[:count]):
        attention, matrices, other = _v4_attention(keys, ratio)
        streams = keys.count("hc_mult")
        mixes = streams * (streams + 2)
        for part in ("attn_hc", "ffn_hc"):
            matrices.append(
                matrix(part, f"{part}.fn", streams * hidden, mixes, split="none", quantized=False),
            )
        other += 2 * (mixes + 3) + 2 * hidden + (0 if layer < hashed else experts_held)
        name = {0: "window", _V4_INDEXED_RATIO: "indexed", _V4_PLAIN_RATIO: "compressed"}[ratio]
        name += "-hash" if layer < hashed else ""
        found.append(Layer(name, attention, (*matrices, *deepseek_experts(keys)), other))
    return found


def v4_ends(keys: Keys) -> Ends:
    """The final norm, and the mix of the streams into one hidden state."""
    hidden, streams = keys.count("hidden_size"), keys.count("hc_mult")
    return Ends(hidden + streams * streams * hidden + streams + 1, residual_streams=streams)


def _v4_attention(keys: Keys, ratio: int) -> tuple[Attention, list[Matrix], int]:
    hidden, heads, head_dim = keys.count("hidden_size"), keys.count("num_attention_heads"), keys.count("head_dim")
    if keys.count("num_key_value_heads", default=1) != 1:
        raise UnsupportedModelError(keys.where, [f"several KV heads (num_key_value_heads) in {keys.architecture}"])
    query_rank, rank, groups = keys.count("q_lora_rank"), keys.count("o_lora_rank"), keys.count("o_groups")
    if heads % groups:
        raise keys.fault("o_groups", groups, f"must divide num_attention_heads = {heads}")
    module = "self_attn"
    matrices = [
        matrix("q_a_proj", f"{module}.q_a_proj", hidden, query_rank, split="none", fused="qkv_a"),
        matrix("kv_proj", f"{module}.kv_proj", hidden, head_dim, split="none", fused="qkv_a"),
        matrix("q_b_proj", f"{module}.q_b_proj", query_rank, heads * head_dim, granularity=head_dim),
        # Each group of heads has its own projection into the group's share of the outputs.
        matrix("o_a_proj", f"{module}.o_a_proj", heads * head_dim // groups, groups * rank, granularity=rank),
        matrix("o_b_proj", f"{module}.o_b_proj", groups * rank, hidden, split="inputs", granularity=rank),
    ]
    # Sinks, and the norms of the query latent and of the key.
    other = heads + query_rank + head_dim
    attention = Attention(
        kind="mla",
        heads=heads,
        kv_heads=1,
        head_dim=head_dim,
        value_head_dim=head_dim,
        kv_latent_size=head_dim,
        kv_lora_rank=head_dim,
        window_tokens=keys.count("sliding_window", default=128),
    )
    if ratio == 0:
        return attention, matrices, other
    if ratio not in (_V4_INDEXED_RATIO, _V4_PLAIN_RATIO):
        raise UnsupportedModelError(keys.where, [f"compression by {ratio} (compress_ratios)"])
    indexed = ratio == _V4_INDEXED_RATIO
    attention = attention.replace(compression_tokens=ratio)
    compressed, more = _compressor(hidden, head_dim, ratio, overlap=indexed, module=f"{module}.compressor")
    matrices += compressed
    other += more
    if indexed:
        index_heads, index_dim = keys.count("index_n_heads"), keys.count("index_head_dim")
        place = f"{module}.compressor.indexer"
        compressed, more = _compressor(hidden, index_dim, ratio, overlap=True, module=place, name="indexer.")
        matrices += [
            *compressed,
            matrix("indexer.q_b", f"{place}.q_b_proj", query_rank, index_heads * index_dim, split="none"),
            matrix(
                "indexer.weights", f"{place}.scorer.weights_proj", hidden, index_heads, split="none", quantized=False
            ),
        ]
        other += more
        attention = attention.replace(
            top_k_tokens=keys.count("index_topk"),
            index_heads=index_heads,
            index_head_dim=index_dim,
            index_bytes_per_token=-(-_index_bytes(index_dim) // ratio),
        )
    return attention, matrices, other


def _compressor(
    hidden: int, width: int, ratio: int, *, overlap: bool, module: str, name: str = "compressor."
) -> tuple[list[Matrix], int]:
    """Key and gate of the compression, which overlapping windows have twice; the position bias and the norm."""
    wide = 2 * width if overlap else width
    parts = [
        matrix(f"{name}{part}", f"{module}.{part}", hidden, wide, split="none", fused=f"{name}kv", quantized=False)
        for part in ("kv_proj", "gate_proj")
    ]
    return parts, ratio * wide + width


def minimax_m3(keys: Keys) -> list[Layer]:
    """MiniMax-M3: grouped attention to the blocks that an indexer chooses, in all but the first layers."""
    count, hidden = keys.count("num_hidden_layers"), keys.count("hidden_size")
    section = keys.section("sparse_attention_config") or {}
    sparse = Keys(section, f"{keys.where} sparse_attention_config", keys.architecture)
    heads, kv_heads, head_dim = read_heads(keys)
    full = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_head_dim=head_dim)
    index_heads = sparse.count("sparse_num_index_heads")
    index_dim = sparse.count("sparse_index_dim")
    chosen = full.replace(
        top_k_tokens=sparse.count("sparse_topk_blocks") * sparse.count("sparse_block_size"),
        index_heads=index_heads,
        index_head_dim=index_dim,
        index_bytes_per_token=index_dim * _M3_INDEX_ELEMENT_BYTES,
    )
    if keys.count("n_shared_experts", default=1) != 1:
        raise UnsupportedModelError(keys.where, [f"several shared experts (n_shared_experts) in {keys.architecture}"])
    form = keys.text("qk_norm_type") or "per_head"
    if form != "per_head":
        raise UnsupportedModelError(keys.where, [f"query and key norms of another form (qk_norm_type: {form})"])
    if not keys.flag("use_qk_norm", True):
        raise UnsupportedModelError(keys.where, [f"attention without query and key norms in {keys.architecture}"])
    module = "self_attn.indexer"
    indexer = [
        matrix("indexer.q_proj", f"{module}.q_proj", hidden, index_heads * index_dim, split="none", fused="index_qk"),
        matrix("indexer.k_proj", f"{module}.k_proj", hidden, index_dim, split="none", fused="index_qk"),
    ]
    experts_held, active = expert_counts(keys)
    routed = [
        router(hidden, experts_held, module="block_sparse_moe.gate"),
        *experts(
            hidden,
            keys.count("moe_intermediate_size", "intermediate_size"),
            experts_held,
            active,
            module="block_sparse_moe",
        ),
        *mlp(
            hidden,
            keys.count("shared_intermediate_size"),
            module="block_sparse_moe.shared_experts",
            prefix="shared_experts.",
        ),
    ]
    dense = mlp(hidden, keys.count("dense_intermediate_size"))
    found = []
    for own, with_experts in zip(
        _per_layer(sparse, "sparse_attention_freq", count), _per_layer(keys, "moe_layer_freq", count), strict=True
    ):
        parts = [*projections(hidden, heads, kv_heads, head_dim), *(indexer if own else ())]
        parts += routed if with_experts else dense
        other = 2 * head_dim + 2 * hidden + (2 * index_dim if own else 0)
        other += experts_held if with_experts and keys.flag("use_routing_bias", True) else 0
        name = f"{'moe' if with_experts else 'dense'}-{'sparse' if own else 'full'}"
        found.append(Layer(name, chosen if own else full, tuple(parts), other))
    return found


def _per_layer(keys: Keys, key: str, count: int) -> list[bool]:
    values = keys.counts(key)
    if len(values) != count or not set(values) <= {0, 1}:
        raise keys.fault(key, list(values), f"must list 0 or 1 for num_hidden_layers = {count} layers")
    return [value == 1 for value in values]


def llama4(keys: Keys) -> list[Layer]:
    """Llama 4: chunks of attention but in every fourth layer, experts in every one or every other."""
    count, hidden = keys.count("num_hidden_layers"), keys.count("hidden_size")
    heads, kv_heads, head_dim = read_heads(keys)
    bias = keys.flag("attention_bias", False)
    matrices = projections(hidden, heads, kv_heads, head_dim, qkv_bias=bias, output_bias=bias)
    chunk = keys.optional_count("attention_chunk_size")
    if chunk is None and "attention_chunk_size" not in keys.values:
        chunk = 8192
    step = keys.count("interleave_moe_layer_step", default=1)
    sparse = set(keys.counts("moe_layers")) if keys.has("moe_layers") else set(range(step - 1, count, step))
    experts_held, active = expert_counts(keys)
    size, module = keys.count("intermediate_size"), "feed_forward"
    routed = [
        router(hidden, experts_held, module=f"{module}.router"),
        *experts(hidden, size, experts_held, active, module=module),
        *mlp(hidden, size, module=f"{module}.shared_expert", prefix="shared_experts."),
    ]
    dense = mlp(hidden, keys.count("intermediate_size_mlp"), module=module)
    found = []
    for layer, chunked in enumerate(_chunked_layers(keys, count)):
        window = chunk if chunked else None
        attention = Attention(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_head_dim=head_dim, window_tokens=window
        )
        name = f"{'moe' if layer in sparse else 'dense'}-{'full' if window is None else 'chunked'}"
        found.append(Layer(name, attention, (*matrices, *(routed if layer in sparse else dense)), 2 * hidden))
    return found


def _chunked_layers(keys: Keys, count: int) -> list[bool]:
    """Which layers attend within chunks: those with rotary positions."""
    types = listed_types(keys, ("chunked_attention", "full_attention"))
    if types is not None:
        return [kind == "chunked_attention" for kind in types]
    rotary = keys.counts("no_rope_layers")
    if not rotary:
        every = keys.count("no_rope_layer_interval", default=4)
        return [(layer + 1) % every != 0 for layer in range(count)]
    if len(rotary) != count:
        raise keys.fault("no_rope_layers", list(rotary), f"must list num_hidden_layers = {count} layers")
    return [bool(flag) for flag in rotary]


def gemma4(keys: Keys) -> list[Layer]:
    """Gemma 4: windows but in every sixth layer, whose heads are larger; experts beside the MLP if any."""
    hidden, count = keys.count("hidden_size"), keys.count("num_hidden_layers")
    if keys.text("use_bidirectional_attention") == "all":
        raise UnsupportedModelError(keys.where, ["attention that is not causal (use_bidirectional_attention: all)"])
    types = listed_types(keys, ("sliding_attention", "full_attention"))
    if types is None:
        types = ["sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(count)]
    types[-1] = "full_attention"  # transformers forces it
    bias = keys.flag("attention_bias", False)
    # The dense MLP stands beside the experts as shared experts do.
    both = keys.flag("enable_moe_block", False)
    second = mlp(hidden, keys.count("intermediate_size"), prefix="shared_experts." if both else "")
    other = 4 * hidden
    if both:
        experts_held, active = expert_counts(keys)
        second += [
            router(hidden, experts_held, module="router.proj"),
            *experts(hidden, keys.count("moe_intermediate_size"), experts_held, active, module="moe"),
        ]
        # Three more norms, the router's scale, and one for each expert.
        other += 4 * hidden + experts_held
    built = {}
    for kind in dict.fromkeys(types):
        heads, kv_heads, head_dim = read_heads(keys, default_kv_heads=4, default_head_dim=256)
        window, one_projection = keys.count("sliding_window", default=512), False
        if kind == "full_attention":
            window, head_dim = 0, keys.count("global_head_dim", default=512)
            one_projection = keys.flag("attention_k_eq_v", False)
            if one_projection:
                kv_heads = keys.count("num_global_key_value_heads", default=kv_heads)
        attention = Attention(
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_head_dim=head_dim, window_tokens=window or None
        )
        matrices = projections(
            hidden, heads, kv_heads, head_dim, qkv_bias=bias, output_bias=bias, own_values=not one_projection
        )
        name = f"{'moe' if both else 'dense'}-{'sliding' if window else 'full'}"
        built[kind] = Layer(name, attention, (*matrices, *second), other + 2 * head_dim)
    return [built[kind] for kind in types]
