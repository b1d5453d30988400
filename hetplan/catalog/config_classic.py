"""Layers of the models before Llama: MLPs without a gate, layer norms with a bias, one matrix for q, k and v.

A layer norm has two parameters an element. Attention and MLP in parallel run after each other here: only their
sum over the GPUs would be one collective less.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from hetplan.catalog.config_keys import Keys
from hetplan.catalog.config_layers import Ends, read_heads
from hetplan.catalog.config_matrices import Layer, mlp, projections
from hetplan.catalog.model import Attention
from hetplan.errors import UnsupportedModelError


class _Names(NamedTuple):
    """Module paths of one family: q, k, v and output projection, then the MLP and its two matrices."""

    qkvo: tuple[str, str, str, str]
    mlp: str
    paths: tuple[str, str]


def _fused(module: str, output: str) -> tuple[str, str, str, str]:
    qkv = f"{module}.query_key_value"
    return qkv, qkv, qkv, f"{module}.{output}"


_GPT_J = _Names(("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj"), "mlp", ("fc_in", "fc_out"))
_NEOX = _Names(_fused("attention", "dense"), "mlp", ("dense_h_to_4h", "dense_4h_to_h"))
_BLOOM = _Names(_fused("self_attention", "dense"), "mlp", ("dense_h_to_4h", "dense_4h_to_h"))
_PHI = _Names(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.dense"), "mlp", ("fc1", "fc2"))
_PHI3_QKV = "self_attn.qkv_proj"


def gpt_j(keys: Keys) -> list[Layer]:
    """GPT-J: attention and MLP in parallel behind one norm, biases in the MLP only."""
    hidden = keys.count("hidden_size")
    size = keys.count("n_inner", default=4 * hidden)
    return _alike(keys, _GPT_J, size, norms=1, kv_heads="heads", attention_bias=False, mlp_bias=True)


def gpt_neox(keys: Keys) -> list[Layer]:
    """GPT-NeoX: two norms, attention and MLP in parallel or not."""
    bias = keys.flag("attention_bias", True)
    return _alike(
        keys, _NEOX, keys.count("intermediate_size"), norms=2, kv_heads="heads", attention_bias=bias, mlp_bias=True
    )


def falcon(keys: Keys) -> list[Layer]:
    """Falcon: multi-query attention (7B), or grouped in the new decoder (40B, 180B)."""
    hidden, new = keys.count("hidden_size"), keys.flag("new_decoder_architecture", False)
    parallel = keys.flag("parallel_attn", True)
    norms = keys.count("num_ln_in_parallel_attn", default=2 if new else 1) if parallel else 2
    if norms not in (1, 2):
        raise keys.fault("num_ln_in_parallel_attn", norms, "1 or 2 is needed")
    bias = keys.flag("bias", False)
    kv_heads: Literal["heads", "one", "given"]
    kv_heads = "given" if new else "one" if keys.flag("multi_query", True) else "heads"
    size = keys.count("ffn_hidden_size", default=4 * hidden)
    return _alike(keys, _BLOOM, size, norms=norms, kv_heads=kv_heads, attention_bias=bias, mlp_bias=bias)


def bloom(keys: Keys) -> list[Layer]:
    """BLOOM: ALiBi positions, which have no parameters, and biases everywhere."""
    size = 4 * keys.count("hidden_size")
    return _alike(keys, _BLOOM, size, norms=2, kv_heads="heads", attention_bias=True, mlp_bias=True)


def phi(keys: Keys) -> list[Layer]:
    """Phi-1 and Phi-2: attention and MLP in parallel behind one norm, biases everywhere."""
    size = keys.count("intermediate_size", default=4 * keys.count("hidden_size"))
    return _alike(keys, _PHI, size, norms=1, kv_heads="given", attention_bias=True, mlp_bias=True)


def phi3(keys: Keys) -> list[Layer]:
    """Phi-3: a Llama whose projections, and gate and up matrices, are stored as one."""
    hidden = keys.count("hidden_size")
    heads, kv_heads, head_dim = read_heads(keys)
    for key in ("attention_bias", "mlp_bias"):
        if keys.flag(key, False):
            raise UnsupportedModelError(keys.where, [f"{key} in {keys.architecture}"])
    attention = Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=head_dim,
        window_tokens=keys.optional_count("sliding_window"),
    )
    modules = (_PHI3_QKV, _PHI3_QKV, _PHI3_QKV, "self_attn.o_proj")
    matrices = [
        *projections(hidden, heads, kv_heads, head_dim, modules=modules),
        *mlp(hidden, keys.count("intermediate_size"), paths=("gate_up_proj", "gate_up_proj", "down_proj")),
    ]
    return [Layer("dense", attention, tuple(matrices), 2 * hidden)] * keys.count("num_hidden_layers")


def layer_norm_ends(keys: Keys) -> Ends:
    """A final layer norm."""
    return Ends(2 * keys.count("hidden_size"))


def biased_head_ends(keys: Keys) -> Ends:
    """A final layer norm, and a head with a bias."""
    return Ends(2 * keys.count("hidden_size"), head_bias=True)


def bloom_ends(keys: Keys) -> Ends:
    """A layer norm after the embedding, and a final one."""
    norm = 2 * keys.count("hidden_size")
    return Ends(norm, other_embedding_parameter_count=norm)


def _alike(
    keys: Keys,
    names: _Names,
    size: int,
    *,
    norms: int,
    kv_heads: Literal["heads", "one", "given"],
    attention_bias: bool,
    mlp_bias: bool,
) -> list[Layer]:
    """Layers that are all alike: ``norms`` layer norms, an MLP without a gate."""
    hidden = keys.count("hidden_size")
    heads, given, head_dim = read_heads(keys)
    held = {"heads": heads, "one": 1, "given": given}[kv_heads]
    matrices = [
        *projections(
            hidden, heads, held, head_dim, modules=names.qkvo, qkv_bias=attention_bias, output_bias=attention_bias
        ),
        *mlp(hidden, size, module=names.mlp, paths=names.paths, bias=mlp_bias, gated=False),
    ]
    attention = Attention(heads=heads, kv_heads=held, head_dim=head_dim, value_head_dim=head_dim)
    return [Layer("dense", attention, tuple(matrices), norms * 2 * hidden)] * keys.count("num_hidden_layers")
