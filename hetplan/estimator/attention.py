"""Time of one attention kernel on one GPU, prefill and decode.

Parametric in what the hardware does, so that it extrapolates to shapes nobody measured: FLOPs, bytes, tiles that one
processor works through alone, launches. On top lies a small smooth correction of what the form misses; it fades
away from the measured shapes. `hetplan.calibration.attention` fits both.

Heads, KV heads and bytes are those of one GPU of a tensor-parallel group. All functions broadcast.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hetplan.catalog.kernels import DecodeAttentionFit, PrefillAttentionFit
from hetplan.estimator.correction import correction_factor

FloatArray = NDArray[np.float64]

# Rows of one query block: FlashAttention 2 and 3 tile 128 queries at head dim 128.
QUERY_BLOCK_TOKENS = 128
# Below this context one block reads all of a head's KV; measured splits begin between 128 and 256 tokens.
SPLIT_FROM_TOKENS = 192
# Times that overlap in part add as a p-norm: exponent 5/4 in prefill, where a block's loads and products alternate,
# 2 in decode. Tried on vLLM's kernels on A100-SXM, H100-SXM and L40S: with 1.1 to 1.5 the error changes by 0.8 points
# at most, with 2.5 by 0.6.
PREFILL_OVERLAP = 1.25
# Element bytes and head dim of the kernels that the correction was learnt on.
REFERENCE_ROW_BYTES = 512


def prefill_attention_seconds(
    fit: PrefillAttentionFit,
    *,
    sequences: ArrayLike,
    tokens: ArrayLike,
    context: ArrayLike,
    heads: ArrayLike,
    kv_heads: ArrayLike,
    head_dim: ArrayLike,
    value_head_dim: ArrayLike,
    pairs: ArrayLike | None = None,
    kv_element_bytes: float = 2.0,
    element_bytes: float = 2.0,
) -> FloatArray:
    """Causal attention of a prompt, or of a chunk of it behind a cached prefix.

    Parameters
    ----------
    fit : PrefillAttentionFit
    sequences : array_like
        Prompts in the batch, positive; may be fractional.
    tokens : array_like
        New tokens of each, >= 1.
    context : array_like
        Tokens that the last one attends to: cached prefix and the new ones; a sliding window caps it.
    heads, kv_heads, head_dim, value_head_dim : array_like
        Of this GPU.
    pairs : array_like, optional
        Attended query-key pairs of one sequence. By default causal over the whole context.
    kv_element_bytes, element_bytes : float
        Bytes of a cached element, and of one in queries and outputs.

    Returns
    -------
    float array
        Seconds.
    """
    new, reach, batch = _number(tokens), _number(context), _number(sequences)
    queries, keys = _number(heads), _number(kv_heads)
    width = _number(head_dim) + _number(value_head_dim)
    attended = new * (reach - 0.5 * new + 0.5) if pairs is None else _number(pairs)
    batch_heads = batch * queries
    row_flops = 2.0 * width
    pair_s = row_flops / fit.compute_flops
    blocks = np.ceil(new * (1.0 / QUERY_BLOCK_TOKENS))
    compute = batch_heads * (attended * pair_s + new * (0.5 * fit.padding_tokens * pair_s) + blocks * fit.block_s)
    longest = (reach + fit.padding_tokens) * (QUERY_BLOCK_TOKENS / fit.block_flops * row_flops)
    outer = batch_heads * new * (width * element_bytes)
    # New keys and values pass twice (cache write, kernel), a cached prefix once.
    inner = batch * (new + reach) * (0.5 * keys * width * kv_element_bytes)
    # Rates of memory and of cache, mixed by how much of the traffic misses: half of it once it fills the cache.
    filled = (outer + inner) * (1.0 / fit.cache_bytes)
    gain = 1.0 - fit.memory_bytes_per_s / fit.cached_bytes_per_s
    slower = 1.0 - gain / (1.0 + filled * filled)
    memory = (outer * (1.0 / fit.memory_bytes_per_s) + inner * (1.0 / fit.kv_bytes_per_s)) * slower
    work = compute**PREFILL_OVERLAP + longest**PREFILL_OVERLAP + memory**PREFILL_OVERLAP
    seconds = fit.launch_s + work ** (1 / PREFILL_OVERLAP)
    if fit.correction is not None:
        seconds = seconds * correction_factor(fit.correction, queries, keys, batch, new)
    return np.asarray(seconds, dtype=np.float64)


def decode_attention_seconds(
    fit: DecodeAttentionFit,
    *,
    sequences: ArrayLike,
    context: ArrayLike,
    heads: ArrayLike,
    kv_heads: ArrayLike,
    head_dim: ArrayLike,
    value_head_dim: ArrayLike,
    kv_bytes: ArrayLike | None = None,
    kv_element_bytes: float = 2.0,
) -> FloatArray:
    """Attention of one new token per sequence over its KV cache.

    Parameters
    ----------
    fit : DecodeAttentionFit
    sequences : array_like
        Sequences in the batch, positive; may be fractional.
    context : array_like
        Tokens that each attends to, positive; a sliding window caps it.
    heads, kv_heads, head_dim, value_head_dim : array_like
        Of this GPU. Latent attention: one KV head, the latent's width and that of its value part.
    kv_bytes : array_like, optional
        Bytes of one cached token in this layer on this GPU, where keys and values are not stored apart: the
        latent's, say. By default ``kv_heads * (head_dim + value_head_dim) * kv_element_bytes``.
    kv_element_bytes : float
        Bytes of a cached element.

    Returns
    -------
    float array
        Seconds.
    """
    reach, batch = _number(context), _number(sequences)
    queries, keys = _number(heads), _number(kv_heads)
    width = _number(head_dim) + _number(value_head_dim)
    token_bytes = keys * width * kv_element_bytes if kv_bytes is None else _number(kv_bytes)
    read = batch * reach * token_bytes
    # The same, to the 8th power: KV is streamed, and a smaller cache holds nothing of it when the next run begins.
    filled = read * (1.0 / fit.cache_bytes)
    filled = filled * filled
    filled = filled * filled
    gain = 1.0 / fit.memory_bytes_per_s - 1.0 / fit.cached_bytes_per_s
    memory = read * (1.0 / fit.memory_bytes_per_s - gain / (1.0 + filled * filled))
    overhead = batch * (keys * fit.unit_s + queries * fit.head_s)
    row_bytes = token_bytes / keys
    shared = 1.0 * (queries > keys)
    slope = shared / fit.split_bytes_per_s + (1.0 - shared) / fit.unsplit_bytes_per_s
    longest = reach * (row_bytes * slope)
    compute = (batch * reach) * (queries * width * (2.0 / fit.compute_flops))
    work = memory * memory + overhead * overhead + longest * longest + compute * compute
    seconds = fit.launch_s + np.sqrt(work) + (fit.split_s * shared) * (reach >= SPLIT_FROM_TOKENS)
    if fit.correction is not None:
        seconds = seconds * correction_factor(
            fit.correction, queries, keys, batch, reach * (row_bytes / REFERENCE_ROW_BYTES)
        )
    return np.asarray(seconds, dtype=np.float64)


def _number(value: ArrayLike) -> FloatArray | float:
    """An array, or a plain float for a plain number: Python multiplies two of those ten times as fast as numpy."""
    return float(value) if isinstance(value, (int, float)) else np.asarray(value, dtype=np.float64)
