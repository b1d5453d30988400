"""What a model family is, and the builders that make its layers from a configuration.

The families themselves are entries of the table in `config_families`. Next-token-prediction (MTP)
layers are not part of the served model and are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hetplan.catalog.config_keys import Keys
from hetplan.catalog.config_matrices import (
    EXPERTS,
    Layer,
    Matrix,
    experts,
    latent_projections,
    matrix,
    mlp,
    projections,
    router,
)
from hetplan.catalog.dtypes import DTYPE_ALIASES, Dtype
from hetplan.catalog.model import Attention
from hetplan.errors import InvalidInputError, UnsupportedModelError

MAX_LAYERS = 10_000
MAX_EXPERTS = 65_536
EXPERT_COUNT_KEYS = ("num_local_experts", "n_routed_experts", "num_experts", "num_moe_experts")
_ACTIVE_EXPERTS_KEYS = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token")


class Switch(NamedTuple):
    """A yes or no that the configuration decides, or the family when ``key`` is None."""

    key: str | None
    default: bool

    def read(self, keys: Keys) -> bool:
        return self.default if self.key is None else keys.flag(self.key, self.default)


NEVER = Switch(None, False)
ALWAYS = Switch(None, True)
_WINDOWS_BY_TYPES = ("from_layer", "by_types", "alternating")


class Ends(NamedTuple):
    """What a model has before and after its layers, beside embedding and head."""

    final_norm_parameter_count: int
    other_embedding_parameter_count: int = 0
    head_bias: bool = False
    residual_streams: int = 1


def rms_ends(keys: Keys) -> Ends:
    """A root-mean-square norm at the end: one parameter an element."""
    return Ends(keys.count("hidden_size"))


@dataclass(frozen=True, slots=True)
class Family:
    """How one family's layers are built, and which keys say so."""

    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    attention: Literal["gqa", "mla"] = "gqa"
    qkv_bias: Switch = NEVER
    output_bias: Switch = NEVER
    mlp_bias: Switch = NEVER
    # One norm for each head's dimensions, or over the whole projection.
    qk_norm: Literal["none", "head", "projection"] = "none"
    default_head_dim: int | None = None
    default_kv_heads: int | None = None
    # Which layers slide: never; all when sliding_window is given; from max_window_layers on, or
    # all, when use_sliding_window is set; every other when layer_types does not say.
    window: Literal["none", "given", "from_layer", "switched", "by_types", "alternating"] = "none"
    default_window: int | None = None
    # Which layers hold experts: none; all; all after first_k_dense_replace; every decoder_sparse_step-th.
    experts: Literal["none", "all", "after_first", "by_step"] = "none"
    default_dense_layers: int = 0
    moe_module: str = "mlp"
    expert_modules: tuple[str, str, str] = EXPERTS
    router_module: str = "gate"
    expert_size_keys: tuple[str, ...] = ("moe_intermediate_size",)
    expert_bias: bool = False
    shared: Literal["none", "count", "size"] = "none"
    correction: Callable[[Keys], bool] = lambda keys: False
    sinks: bool = False
    # Parts of a configuration that the family describes: "experts", "mla", keys and layer types.
    handles: frozenset[str] = frozenset()
    # Layers that the fields above cannot describe: the function gives each in order.
    build: Callable[[Keys], list[Layer]] | None = None
    ends: Callable[[Keys], Ends] = rms_ends
    # The family's own spellings: its key -> the key that is read here.
    spellings: tuple[tuple[str, str], ...] = ()
    default_positions: int | None = None
    tied_by_default: bool = False
    prefixes: tuple[str, ...] = ("model.layers",)


def build_layers(family: Family, keys: Keys) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    """The kinds of layer of a configuration, and the kind of each layer in order."""
    count = keys.count("num_hidden_layers", maximum=MAX_LAYERS)
    if family.build is not None:
        built = family.build(keys)
        if len(built) != count:
            raise keys.fault("num_hidden_layers", count, f"the configuration lists {len(built)} layers")
        unlike = tuple(dict.fromkeys(built))
        return unlike, tuple(unlike.index(layer) for layer in built)
    _check_ignored(family, keys)
    windows = _windows(family, keys, count)
    with_experts = _expert_layers(family, keys, count)
    looks = list(zip(windows, with_experts, strict=True))
    kinds = list(dict.fromkeys(looks))
    mixed = len(set(windows)) > 1
    layers = tuple(_layer(family, keys, window, experts, mixed=mixed) for window, experts in kinds)
    return layers, tuple(kinds.index(look) for look in looks)


def _check_ignored(family: Family, keys: Keys) -> None:
    """Refuse keys that would change the layers but that this family does not read."""
    unread = [
        f"{key} in {keys.architecture}"
        for key, switch in (("attention_bias", family.qkv_bias), ("mlp_bias", family.mlp_bias))
        if switch == NEVER and keys.flag(key, False)
    ]
    if family.window not in _WINDOWS_BY_TYPES and "sliding_attention" in keys.texts("layer_types"):
        unread.append(f"sliding attention layers by list (layer_types) in {keys.architecture}")
    if family.qk_norm == "projection" and not keys.flag("use_qk_norm", True):
        unread.append(f"attention without query and key norms (use_qk_norm) in {keys.architecture}")
    if unread:
        raise UnsupportedModelError(f"{keys.where} ({keys.architecture})", unread)


def _layer(family: Family, keys: Keys, window: int | None, experts: bool, *, mixed: bool) -> Layer:
    attend = _mla if family.attention == "mla" else _gqa
    attention, matrices, norms = attend(family, keys, window)
    other = norms + 2 * keys.count("hidden_size")
    if family.sinks:
        other += attention.heads
    if experts:
        matrices = [*matrices, *_experts(family, keys)]
        other += keys.count(*EXPERT_COUNT_KEYS) if family.correction(keys) else 0
    else:
        size = keys.count("intermediate_size")
        matrices = [*matrices, *mlp(keys.count("hidden_size"), size, bias=family.mlp_bias.read(keys))]
    name = "moe" if experts else "dense"
    if mixed:
        name += "-full" if window is None else "-sliding"
    return Layer(name, attention, tuple(matrices), other)


# ---- attention


def read_heads(
    keys: Keys, *, default_kv_heads: int | None = None, default_head_dim: int | None = None
) -> tuple[int, int, int]:
    """Heads, KV heads and head size; the defaults hold where a key is absent, not where it is null."""
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    # An explicit null means "as many as heads" in every family; absence is the class default.
    absent = default_kv_heads is not None and "num_key_value_heads" not in keys.values
    kv_heads = keys.count("num_key_value_heads", default=default_kv_heads if absent else heads)
    if heads % kv_heads:
        raise keys.fault("num_key_value_heads", kv_heads, f"must divide num_attention_heads = {heads}")
    head_dim = keys.optional_count("head_dim")
    if head_dim is None and default_head_dim is not None and "head_dim" not in keys.values:
        head_dim = default_head_dim
    if head_dim is None:
        if hidden % heads:
            raise keys.fault(
                "num_attention_heads", heads, f"must divide hidden_size = {hidden} when head_dim is absent"
            )
        head_dim = hidden // heads
    return heads, kv_heads, head_dim


def _gqa(family: Family, keys: Keys, window: int | None) -> tuple[Attention, list[Matrix], int]:
    heads, kv_heads, head_dim = read_heads(
        keys, default_kv_heads=family.default_kv_heads, default_head_dim=family.default_head_dim
    )
    matrices = projections(
        keys.count("hidden_size"),
        heads,
        kv_heads,
        head_dim,
        qkv_bias=family.qkv_bias.read(keys),
        output_bias=family.output_bias.read(keys),
    )
    norms = {"none": 0, "head": 2 * head_dim, "projection": (heads + kv_heads) * head_dim}[family.qk_norm]
    attention = Attention(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_head_dim=head_dim, window_tokens=window
    )
    return attention, matrices, norms


def _mla(family: Family, keys: Keys, window: int | None) -> tuple[Attention, list[Matrix], int]:
    bias, output_bias = family.qkv_bias.read(keys), family.output_bias.read(keys)
    attention, matrices, norms = read_latent(keys, bias=bias, output_bias=output_bias)
    return attention.replace(window_tokens=window), matrices, norms


def read_latent(keys: Keys, *, bias: bool = False, output_bias: bool = False) -> tuple[Attention, list[Matrix], int]:
    """Latent attention (MLA), its matrices and the parameters of its norms."""
    heads = keys.count("num_attention_heads")
    if "q_lora_rank" not in keys.values:
        raise InvalidInputError(
            f"{keys.where}: missing key 'q_lora_rank' (null for none), needed by {keys.architecture}"
        )
    query_rank = keys.optional_count("q_lora_rank")
    kv_rank, rope = keys.count("kv_lora_rank"), keys.count("qk_rope_head_dim")
    no_rope, value_dim = keys.count("qk_nope_head_dim"), keys.count("v_head_dim")
    matrices = latent_projections(
        keys.count("hidden_size"),
        heads,
        query_rank=query_rank,
        kv_rank=kv_rank,
        rope_dim=rope,
        no_rope_dim=no_rope,
        value_dim=value_dim,
        bias=bias,
        output_bias=output_bias,
    )
    attention = Attention(
        kind="mla",
        heads=heads,
        kv_heads=heads,
        head_dim=no_rope + rope,
        value_head_dim=value_dim,
        kv_latent_size=kv_rank + rope,
        kv_lora_rank=kv_rank,
    )
    return attention, matrices, kv_rank + (query_rank or 0)


def _windows(family: Family, keys: Keys, count: int) -> list[int | None]:
    everywhere: list[int | None] = [None] * count
    if family.window == "none":
        return everywhere
    window = keys.optional_count("sliding_window")
    if window is None and "sliding_window" not in keys.values:
        window = family.default_window
    if family.window in ("from_layer", "switched", "by_types") and not keys.flag("use_sliding_window", False):
        window = None
    types = keys.texts("layer_types")
    if types and family.window in _WINDOWS_BY_TYPES:
        if len(types) != count:
            raise keys.fault("layer_types", len(types), f"must list num_hidden_layers = {count} layers")
        if "sliding_attention" in types and window is None:
            raise keys.fault("sliding_window", window, "a window is needed where layer_types says sliding_attention")
        return [window if kind == "sliding_attention" else None for kind in types]
    if window is None:
        return everywhere
    if family.window == "by_types":
        # transformers changed its rule for these layers, so the configuration has to say.
        raise InvalidInputError(f"{keys.where}: use_sliding_window needs layer_types in {keys.architecture}")
    if family.window == "from_layer":
        first = keys.count("max_window_layers", default=28, minimum=0)
        return [window if layer >= first else None for layer in range(count)]
    if family.window == "alternating":
        return [None if layer % 2 else window for layer in range(count)]
    return [window] * count


# ---- MLP and experts


def _expert_layers(family: Family, keys: Keys, count: int) -> list[bool]:
    if family.experts == "after_first":
        return dense_layers(keys, count, default=family.default_dense_layers)
    if family.experts == "by_step":
        return step_layers(keys, count)
    return [family.experts == "all"] * count


def dense_layers(keys: Keys, count: int, *, default: int) -> list[bool]:
    """Which layers hold experts, where the first few do not: by list, else by first_k_dense_replace."""
    listed = keys.texts("mlp_layer_types")
    if listed:
        if len(listed) != count or not set(listed) <= {"dense", "sparse"}:
            raise keys.fault("mlp_layer_types", list(listed), f"{count} times dense or sparse")
        return [kind == "sparse" for kind in listed]
    first = keys.count("first_k_dense_replace", default=default, minimum=0)
    every = keys.count("moe_layer_freq", default=1)
    return [layer >= first and layer % every == 0 for layer in range(count)]


def step_layers(keys: Keys, count: int) -> list[bool]:
    """Which layers hold experts, where a step and a list of exceptions say so."""
    step = keys.count("decoder_sparse_step", default=1)
    dense = set(keys.counts("mlp_only_layers"))
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(count)]


def listed_types(keys: Keys, known: tuple[str, ...]) -> list[str] | None:
    """layer_types, checked; None when the configuration does not list them."""
    types = list(keys.texts("layer_types"))
    if not types:
        return None
    count = keys.count("num_hidden_layers")
    if len(types) != count:
        raise keys.fault("layer_types", len(types), f"must list num_hidden_layers = {count} layers")
    unknown = [kind for kind in types if kind not in known]
    if unknown:
        raise UnsupportedModelError(f"{keys.where} ({keys.architecture})", [f"{unknown[0]} layers (layer_types)"])
    return types


def read_state_dtype(keys: Keys, key: str = "mamba_ssm_dtype", *, default: Dtype | None = None) -> Dtype:
    """Type of the state of linear attention or Mamba: as stated, else ``default``, else the model's."""
    for given in (keys.text(key), None if default else keys.text("torch_dtype") or keys.text("dtype")):
        if given is None:
            continue
        dtype = DTYPE_ALIASES.get(given.removeprefix("torch."))
        if dtype is None:
            raise keys.fault(key, given, f"one of {', '.join(sorted(DTYPE_ALIASES))} is needed")
        return dtype
    return default or "bf16"


def _experts(family: Family, keys: Keys) -> list[Matrix]:
    hidden = keys.count("hidden_size")
    count, active = expert_counts(keys)
    size = keys.count(*[key for key in family.expert_size_keys if keys.has(key)][:1] or family.expert_size_keys)
    module, bias = family.moe_module, family.expert_bias
    return [
        router(hidden, count, module=f"{module}.{family.router_module}", bias=bias),
        *experts(hidden, size, count, active, module=module, paths=family.expert_modules, bias=bias),
        *_shared_experts(family, keys, size),
    ]


def expert_counts(keys: Keys) -> tuple[int, int]:
    """Routed experts, and how many of them a token uses."""
    count = keys.count(*EXPERT_COUNT_KEYS, maximum=MAX_EXPERTS)
    active = keys.count(*_ACTIVE_EXPERTS_KEYS)
    if active > count:
        raise keys.fault("num_experts_per_tok", active, f"at most the number of experts, {count}")
    return count, active


def _shared_experts(family: Family, keys: Keys, expert_size: int) -> list[Matrix]:
    """The experts that every token uses: one MLP, as wide as all of them together."""
    hidden, bias = keys.count("hidden_size"), family.mlp_bias.read(keys)
    prefix = "shared_experts."
    if family.shared == "count":
        shared = keys.count("n_shared_experts", default=0, minimum=0)
        if not shared:
            return []
        module = f"{family.moe_module}.shared_experts"
        return mlp(hidden, shared * expert_size, module=module, prefix=prefix, bias=bias)
    if family.shared == "size":
        module = f"{family.moe_module}.shared_expert"
        gate = matrix("shared_expert_gate", f"{module}_gate", hidden, 1, split="none", quantized=False)
        size = keys.count("shared_expert_intermediate_size")
        return [*mlp(hidden, size, module=module, prefix=prefix, bias=bias), gate]
    return []
