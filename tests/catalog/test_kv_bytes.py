"""KV-cache bytes counted a second time: by hand, from the raw configuration, one small function per family.

Nothing here reads a `ModelSpec`'s layers. Each function gives, for one GPU, the bytes that one token adds over all
layers (windows in full), and the bytes that a sequence of so many tokens keeps, windows and constant states included.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest

from hetplan.catalog.models import get_model, list_models

Config = dict[str, Any]
ROWS: dict[str, Any] = json.loads(
    resources.files("hetplan.catalog").joinpath("data/models.json").read_text(encoding="utf-8")
)
SEQUENCES = (1, 100, 1_000, 5_000, 40_000)
# KV cache in 8 bits: stated in the configuration. Everything else keeps the 16 bits of the model.
EIGHT_BITS = {"nemotron-3-super-120b-a12b-fp8"}


def key_value(kv_heads: int, head_dim: int, element: int) -> int:
    return 2 * kv_heads * head_dim * element


def plain(config: Config, tokens: int, element: int) -> tuple[float, float]:
    """Grouped attention in every layer, without windows."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    one = config["num_hidden_layers"] * key_value(config.get("num_key_value_heads") or heads, head_dim, element)
    return one, one * tokens


def mistral(config: Config, tokens: int, element: int) -> tuple[float, float]:
    """A window in every layer, where the configuration gives one."""
    one, all_of_it = plain(config, tokens, element)
    window = config.get("sliding_window")
    return one, one * min(tokens, window) if window else all_of_it


def gpt_oss(config: Config, tokens: int, element: int) -> tuple[float, float]:
    """Every other layer within a window of 128 tokens."""
    one = key_value(8, 64, element)
    half = config["num_hidden_layers"] // 2
    return 2 * half * one, half * one * (tokens + min(tokens, 128))


def deepseek(config: Config, tokens: int, element: int) -> tuple[float, float]:
    """One latent of 512 and 64 rotary elements in every layer."""
    one = config["num_hidden_layers"] * (512 + 64) * element
    return one, one * tokens


def deepseek_sparse(config: Config, tokens: int, element: int) -> tuple[float, float]:
    """The latent, and in layers with an indexer of their own 128 elements of 8 bits with a 4-byte scale."""
    indexers = config["num_hidden_layers"]
    if "index_topk_freq" in config:  # GLM-5.3: the first three, then one in four
        indexers = 3 + len(range(6, config["num_hidden_layers"], 4))
    one = config["num_hidden_layers"] * 576 * element + indexers * 132
    return one, one * tokens


def deepseek_v4(config: Config, tokens: int, element: int) -> tuple[float, float]:
    """512 elements for each of the last 128 tokens, and for every 4 or 128 tokens; 132 bytes of index for 4."""
    ratios = config["compress_ratios"][: config["num_hidden_layers"]]
    one = sum(512 * element + (512 // ratio * element if ratio else 0) + (33 if ratio == 4 else 0) for ratio in ratios)
    kept = sum(
        512 * element * (min(tokens, 128) + (tokens / ratio if ratio else 0)) + (33 * tokens if ratio == 4 else 0)
        for ratio in ratios
    )
    return one, kept


def qwen_hybrid(config: Config, tokens: int, element: int) -> tuple[float, float]:
    """A quarter of the layers keep 2 KV heads of 256; the others 64 states of 128 x 128 in 32 bits, and 3 inputs."""
    full = config["num_hidden_layers"] // 4
    states = 64 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 64 * 128) * 2
    one = full * key_value(2, 256, element)
    return one, one * tokens + 3 * full * states


def kimi_linear(config: Config, tokens: int, element: int) -> tuple[float, float]:
    """7 of 27 layers keep a latent; the others 32 states of 128 x 128 in 32 bits, and 3 inputs of q, k and v."""
    one = 7 * 576 * element
    states = 32 * 128 * 128 * 4 + 3 * (3 * 32 * 128) * 2
    return one, one * tokens + 20 * states


def nemotron_h(config: Config, tokens: int, element: int) -> tuple[float, float]:
    """Attention where the pattern has a star; where it has an M, states of 64 x 128 and 3 inputs of the convolution."""
    pattern, heads = config["hybrid_override_pattern"], config["mamba_num_heads"]
    one = pattern.count("*") * key_value(2, 128, element)
    states = heads * 64 * 128 * 4 + 3 * (heads * 64 + 2 * 8 * 128) * 2
    return one, one * tokens + pattern.count("M") * states


def deci(config: Config, tokens: int, element: int) -> tuple[float, float]:
    """8 KV heads of 128 in the layers that have attention."""
    one = sum(key_value(8, 128, element) for block in config["block_configs"] if "no_op" not in block["attention"])
    return one, one * tokens


def llama4(config: Config, tokens: int, element: int) -> tuple[float, float]:
    """8 KV heads of 128; three of four layers keep a chunk of 8,192 at most."""
    one, layers = key_value(8, 128, element), config["num_hidden_layers"]
    return layers * one, one * (layers // 4 * tokens + 3 * layers // 4 * min(tokens, 8192))


def gemma4(config: Config, tokens: int, element: int) -> tuple[float, float]:
    """25 layers of 8 heads of 256 within 1,024 tokens, 5 of 2 heads of 512 over all."""
    near, far = 25 * key_value(8, 256, element), 5 * key_value(2, 512, element)
    return near + far, near * min(tokens, 1024) + far * tokens


def minimax_m3(config: Config, tokens: int, element: int) -> tuple[float, float]:
    """4 heads of 128 in 60 layers, and an index key of 128 elements of 16 bits in 57."""
    one = 60 * key_value(4, 128, element) + 57 * 128 * 2
    return one, one * tokens


def gpt_j(config: Config, tokens: int, element: int) -> tuple[float, float]:
    one = config["n_layer"] * key_value(config["n_head"], config["n_embd"] // config["n_head"], element)
    return one, one * tokens


def bloom(config: Config, tokens: int, element: int) -> tuple[float, float]:
    hidden = config.get("n_embed") or config["hidden_size"]
    one = config["n_layer"] * 2 * hidden * element
    return one, one * tokens


def falcon(config: Config, tokens: int, element: int) -> tuple[float, float]:
    """One KV head of 64 in the 7B, 8 in the others."""
    one = config["num_hidden_layers"] * key_value(config.get("num_kv_heads", 1), 64, element)
    return one, one * tokens


COUNTS: dict[str, Callable[[Config, int, int], tuple[float, float]]] = {
    "llama": plain,
    "qwen2": plain,
    "qwen3": plain,
    "qwen3_moe": plain,
    "mixtral": plain,
    "minimax_m2": plain,
    "gpt_neox": plain,
    "phi": plain,
    "phi3": mistral,
    "mistral": mistral,
    "gpt_oss": gpt_oss,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "deepseek_v32": deepseek_sparse,
    "glm_moe_dsa": deepseek_sparse,
    "deepseek_v4": deepseek_v4,
    "qwen3_5_moe_text": qwen_hybrid,
    "kimi_linear": kimi_linear,
    "nemotron_h": nemotron_h,
    "nemotron-nas": deci,
    "llama4_text": llama4,
    "gemma4_text": gemma4,
    "minimax_m3": minimax_m3,
    "gptj": gpt_j,
    "bloom": bloom,
    "falcon": falcon,
}


def test_at_least_forty_models_are_counted_twice() -> None:
    assert len(list_models()) >= 40


@pytest.mark.parametrize("name", list_models())
def test_a_second_count_agrees(name: str) -> None:
    spec, config = get_model(name), ROWS[name]["config"]
    element = 1 if name in EIGHT_BITS else 2
    count = COUNTS[config["model_type"]]
    assert spec.kv_bytes_per_token() == count(config, 1, element)[0]
    for tokens in SEQUENCES:
        kept = sum(spec.layer_kv_bytes_per_sequence(kind, tokens) for kind in spec.layer_pattern)
        assert kept == pytest.approx(count(config, tokens, element)[1], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "degree", "kv_bytes"),
    [
        ("qwen3.5-397b-a17b", 8, 15 * 2 * 256 * 2),  # 2 KV heads replicate over 8 GPUs: one on each
        ("nemotron-3-nano-30b-a3b", 4, 6 * 2 * 128 * 2),
        ("deepseek-v3.2", 8, 61 * (576 * 2 + 132)),  # latent and index keys are whole on every GPU
        ("minimax-m3", 4, 60 * 2 * 128 * 2 + 57 * 256),
        ("falcon-40b", 8, 60 * 2 * 64 * 2),
        ("kimi-linear-48b-a3b", 8, 7 * 576 * 2),
    ],
)
def test_a_gpu_of_a_group_keeps_its_share(name: str, degree: int, kv_bytes: int) -> None:
    assert get_model(name).kv_bytes_per_token(degree) == kv_bytes


@pytest.mark.parametrize(
    ("name", "degree", "state_bytes"),
    [
        # Heads divide; a quarter of the 64 states, and a quarter of the inputs.
        ("qwen3.5-122b-a10b", 4, 16 * 128 * 128 * 4 + 3 * (2 * 4 * 128 + 16 * 128) * 2),
        # 16 GPUs share 8 groups: each keeps one whole.
        ("nemotron-3-nano-30b-a3b", 16, 4 * 64 * 128 * 4 + 3 * (4 * 64 + 2 * 128) * 2),
    ],
)
def test_states_split_over_a_group_and_do_not_grow(name: str, degree: int, state_bytes: int) -> None:
    spec = get_model(name)
    kind = next(k for k, layer in enumerate(spec.layer_kinds) if layer.attention.keeps_state)
    assert spec.layer_kv_bytes_per_sequence(kind, 1, degree) == state_bytes
    assert spec.layer_kv_bytes_per_sequence(kind, 100_000, degree) == state_bytes
    assert spec.with_dtypes(kv_dtype="fp8").layer_kv_bytes_per_sequence(kind, 1, degree) == state_bytes
