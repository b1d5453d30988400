"""Attention that is not one softmax over all cached tokens: states of constant size, and indexers that choose."""

from __future__ import annotations

import numpy as np

from hetplan.catalog.dtypes import dtype_bytes
from hetplan.catalog.model import Attention, ModelSpec
from hetplan.estimator.base import FloatArray
from hetplan.estimator.kernels import GroupKernels

# Tokens of a chunk in the prefill of linear attention (the kernels of flash-linear-attention) and of Mamba-2
# (chunk_size of Nemotron-H).
_CHUNK_TOKENS = {"linear": 64, "mamba": 128}


def state_update_s(model: ModelSpec, attention: Attention, sequences: FloatArray, kernels: GroupKernels) -> FloatArray:
    """(N,) seconds of one decode step of linear attention or Mamba-2: the whole state is read and written.

    Multiply-adds per element of the state: decay and outer product, and the product with the query; the delta
    rule also takes the product with the key away first.
    """
    products = 3 if attention.kind == "linear" else 2
    elements = -(-attention.heads // kernels.degree) * attention.head_dim * attention.value_head_dim
    moved = 2 * attention.state_bytes_per_sequence(kernels.degree, model.base_dtype)
    compute = sequences * 2 * products * elements / kernels.flops
    return np.maximum(compute, sequences * moved / kernels.bytes_per_s) + kernels.kernel_s


def chunked_scan_s(
    model: ModelSpec, attention: Attention, sequences: FloatArray, tokens: FloatArray, kernels: GroupKernels
) -> FloatArray:
    """(N,) seconds of linear attention or Mamba-2 over ``tokens`` new tokens a sequence.

    With chunks of C tokens, keys of d_k and values of d_v elements, each token and head takes 2 C (d_k + d_v)
    FLOPs within its chunk and 4 d_k d_v with the state (Dao & Gu, "Transformers are SSMs", 2024, section 6). The
    delta rule's triangular system adds 2 C (2 d_k + d_v) and 2 d_k d_v (Yang et al., "Parallelizing Linear
    Transformers with the Delta Rule over Sequence Length", 2024). Each chunk's state is written and read.
    """
    chunk = _CHUNK_TOKENS[attention.kind]
    key, value = attention.head_dim, attention.value_head_dim
    heads, groups = -(-attention.heads // kernels.degree), max(1, -(-attention.kv_heads // kernels.degree))
    flops = 2 * chunk * (key + value) + 4 * key * value
    if attention.kind == "linear":
        flops += 2 * chunk * (2 * key + value) + 2 * key * value
    chunks = np.ceil(tokens / chunk)
    moved = tokens * 2 * (heads * value + groups * key) * dtype_bytes(model.base_dtype)
    moved = moved + 2 * chunks * attention.state_bytes_per_sequence(kernels.degree, model.base_dtype)
    compute = sequences * tokens * heads * flops / kernels.flops
    seconds = np.maximum(compute, sequences * moved / kernels.bytes_per_s) + kernels.kernel_s
    return np.asarray(seconds, dtype=np.float64)


def indexer_s(
    attention: Attention, sequences: FloatArray, pairs: FloatArray, tokens: FloatArray, kernels: GroupKernels
) -> FloatArray:
    """(N,) seconds of scoring ``pairs`` of queries and index keys, of ``tokens`` kept tokens a sequence."""
    heads, size = attention.index_heads or 0, attention.index_head_dim or 0
    # A compressed layer has one key for several tokens; its bytes are per token already.
    tokens_per_key = attention.compression_tokens or 1
    # Keys of 8 bits are multiplied in 8 bits, each with its scale.
    narrow = attention.index_bytes_per_token * tokens_per_key < 2 * size
    flops = kernels.index_flops if narrow else kernels.flops
    compute = sequences * 2 * heads * size * pairs / tokens_per_key / flops
    moved = tokens * attention.index_bytes_per_token
    return np.maximum(compute, sequences * moved / kernels.bytes_per_s) + kernels.kernel_s


def chosen_pairs(attention: Attention, tokens: FloatArray, context: FloatArray) -> FloatArray:
    """Query-key pairs of causal attention within the window, beyond it where compressed, and of the top k only."""
    limits = [n for n in (attention.window_tokens, attention.top_k_tokens) if n is not None]
    ratio = attention.compression_tokens
    if ratio is None:
        return attended_pairs(tokens, context, min(limits, default=None))
    near = attended_pairs(tokens, context, attention.window_tokens)
    far = None if attention.top_k_tokens is None else attention.top_k_tokens * ratio
    return near + attended_pairs(tokens, context, far) / ratio


def attended_pairs(tokens: FloatArray, context: FloatArray, window: int | None) -> FloatArray:
    """Query-key pairs of causal attention: new tokens see the cached ones and themselves, within the window."""
    # Tokens that still see everything before them; the later ones see a full window.
    growing = tokens if window is None else np.clip(window - context, 0.0, tokens)
    pairs = growing * context + growing * (growing + 1) / 2
    return np.asarray(pairs if window is None else pairs + (tokens - growing) * window, dtype=np.float64)


def attended_entries(attention: Attention, tokens: FloatArray) -> FloatArray:
    """Cached entries that the next token after ``tokens`` attends to, as `Attention.attended_entries`."""
    near = tokens if attention.window_tokens is None else np.minimum(tokens, attention.window_tokens)
    top = attention.top_k_tokens
    if attention.compression_tokens is None:
        return near if top is None else np.minimum(near, top)
    far = tokens / attention.compression_tokens
    return near + (far if top is None else np.minimum(far, top))
