"""How a checkpoint is quantised: config.json's quantization_config, or hf_quant_config.json.

Scales are sized as the checkpoints store them. Single scales of a whole matrix for activations
and GPTQ's g_idx (4 bytes an input) are left out; a checkpoint index, where there is one, has the exact total.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hetplan.catalog.config_keys import Keys, shown
from hetplan.catalog.dtypes import DTYPE_ALIASES, Dtype, Quantization
from hetplan.errors import InvalidInputError, UnsupportedModelError

_SCALE_FP8 = 8
_SCALE_16 = 16
_NVFP4_GROUP = 16
_MXFP4_GROUP = 32
_AWQ_GROUP = 128
_BLOCK = 128
_WEIGHT_TYPES: dict[tuple[str, int], Dtype] = {
    ("int", 4): "int4",
    ("int", 8): "int8",
    ("float", 4): "fp4",
    ("float", 8): "fp8",
}


class ModuleNames:
    """A list of modules as quantisers write it: names, ``re:`` expressions and ``*`` globs.

    A plain name stands for every module whose path holds it as whole components, so "gate" names
    mlp.gate and not mlp.gate_proj, and "model.layers.1" does not name layer 10.
    """

    def __init__(self, entries: Iterable[str], where: str) -> None:
        self.plain: set[str] = set()
        patterns: list[str] = []
        for entry in dict.fromkeys(entries):
            if entry.startswith("re:"):
                patterns.append(f"(?:{entry.removeprefix('re:')})")
            elif any(mark in entry for mark in "*?["):
                patterns += [fnmatch.translate(entry), fnmatch.translate(f"{entry}.*")]
            else:
                self.plain.add(entry)
        try:
            for pattern in patterns:
                re.compile(pattern)
            self.pattern = re.compile("|".join(patterns)) if patterns else None
        except (re.error, OverflowError) as error:
            raise InvalidInputError(f"{where}: a module pattern is not a regular expression: {error}") from None
        # Lists rarely single out experts; only then is each expert's own name looked up.
        self.names_experts = any(re.search(r"expert.*\d", text) for text in [*self.plain, *patterns])

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        if self.pattern is not None and self.pattern.match(name):
            return True
        parts = name.split(".")
        return any(
            ".".join(parts[start:stop]) in self.plain
            for start in range(len(parts))
            for stop in range(start + 1, len(parts) + 1)
        )


@dataclass(frozen=True, slots=True)
class Scheme:
    """What is stored how. ``targets`` None means every matrix that is not ignored."""

    quantization: Quantization | None
    weight_dtype: Dtype | None
    compute_dtype: Dtype | None
    kv_dtype: Dtype | None
    ignored: ModuleNames
    targets: ModuleNames | None = None

    def quantizes(self, names: Iterable[str]) -> bool:
        """True when the module, under any of its spellings, is stored quantised."""
        spellings = tuple(names)
        if any(name in self.ignored for name in spellings):
            return False
        return self.targets is None or any(name in self.targets for name in spellings)

    @property
    def names_experts(self) -> bool:
        return self.ignored.names_experts or (self.targets is not None and self.targets.names_experts)


@dataclass(frozen=True, slots=True)
class _Weights:
    """What a method's reader finds: the storage, the types, and what it applies to."""

    quantization: Quantization | None
    weight_dtype: Dtype | None
    compute_dtype: Dtype | None = None
    targets: tuple[str, ...] | None = None
    ignored: tuple[str, ...] = ()


def read_scheme(config: Mapping[str, Any], where: str, architecture: str) -> Scheme:
    """Read a quantisation description of any known method.

    Raises
    ------
    InvalidInputError
        If a key has a value that it cannot have.
    UnsupportedModelError
        If the method, or a mix of methods, is not known.
    """
    keys = Keys(config, where, architecture)
    method = (keys.text("quant_method") or ("modelopt" if "quant_algo" in config else "")).lower()
    method = method.replace("_", "-")
    if not method:
        raise InvalidInputError(f"{where}: missing key 'quant_method' in the quantisation")
    reader = _METHODS.get(method)
    if reader is None:
        raise UnsupportedModelError(where, [f"quantisation method {method!r} (known: {', '.join(sorted(_METHODS))})"])
    weights = reader(keys)
    ignored = [*weights.ignored]
    for key in ("ignore", "modules_to_not_convert", "exclude_modules"):
        ignored += keys.texts(key)
    targets = None if weights.targets is None else ModuleNames(weights.targets, where)
    return Scheme(
        quantization=weights.quantization,
        weight_dtype=weights.weight_dtype,
        compute_dtype=weights.compute_dtype,
        kv_dtype=_kv_dtype(keys),
        ignored=ModuleNames(ignored, where),
        targets=targets,
    )


def _kv_dtype(keys: Keys) -> Dtype | None:
    """Type of the KV cache that the checkpoint was calibrated for, if any."""
    given: Any = keys.values.get("kv_cache_quant_algo")
    if given is None:
        given = keys.values.get("kv_cache_scheme")
    if given is None or (isinstance(given, str) and given.lower() in ("none", "auto", "")):
        return None
    found: Dtype | None = None
    if isinstance(given, str):
        found = DTYPE_ALIASES.get(given.lower())
    elif isinstance(given, Mapping):
        found = _typed(Keys(given, f"{keys.where} kv_cache_scheme", keys.architecture))
    if found is None:
        raise UnsupportedModelError(keys.where, [f"KV cache type {shown(given)}"])
    return found


def _typed(keys: Keys) -> Dtype:
    """Dtype of a compressed-tensors description: its type and num_bits."""
    pair = keys.text("type") or "int", keys.count("num_bits")
    if pair not in _WEIGHT_TYPES:
        raise UnsupportedModelError(keys.where, [f"{pair[1]}-bit {pair[0]} numbers (num_bits, type)"])
    return _WEIGHT_TYPES[pair]


def _fp8(keys: Keys) -> _Weights:
    block = keys.counts("weight_block_size")
    if not block:
        return _Weights(Quantization(method="fp8", bits=8), "fp8", "fp8")
    if len(block) != 2 or min(block) < 1:
        raise keys.fault("weight_block_size", list(block), "two positive whole numbers are needed")
    return _Weights(Quantization(method="fp8", bits=8, group_outputs=block[0], group_inputs=block[1]), "fp8", "fp8")


def _fbgemm_fp8(keys: Keys) -> _Weights:
    return _Weights(Quantization(method="fbgemm_fp8", bits=8, group_outputs=1), "fp8", "fp8")


def _awq(keys: Keys) -> _Weights:
    bits = keys.count("bits", "w_bit")
    zeros = bits if keys.flag("zero_point", True) else 0
    return _weight_only(keys, "awq", bits, _group(keys, "group_size", "q_group_size"), zeros)


def _gptq(keys: Keys) -> _Weights:
    if keys.flag("lm_head", False):
        raise UnsupportedModelError(keys.where, ["quantised LM head (lm_head: true)"])
    if keys.values.get("dynamic"):
        raise UnsupportedModelError(keys.where, ["GPTQ settings for single modules (dynamic)"])
    bits = keys.count("bits")
    inside = keys.values.get("modules_in_block_to_quantize")
    targets = None
    if inside:
        groups = inside if isinstance(inside, list) else [inside]
        names = [name for group in groups for name in (group if isinstance(group, list) else [group])]
        targets = Keys({"names": names}, keys.where, keys.architecture).texts("names")
    # qzeros are stored for symmetric checkpoints too.
    weights = _weight_only(keys, "gptq", bits, _group(keys, "group_size"), bits)
    return _Weights(weights.quantization, weights.weight_dtype, targets=targets)


def _group(keys: Keys, *spellings: str) -> int | None:
    """Inputs under one scale; -1 means all of them."""
    if any(keys.values.get(key) == -1 for key in spellings):
        return None
    return keys.count(*spellings)


def _weight_only(keys: Keys, method: str, bits: int, group: int | None, zero_point_bits: int) -> _Weights:
    dtype = _WEIGHT_TYPES.get(("int", bits))
    if dtype is None:
        raise UnsupportedModelError(keys.where, [f"{bits}-bit {method} weights (4 and 8 are known)"])
    stored = Quantization(
        method=method,
        bits=bits,
        group_inputs=group,
        group_outputs=1,
        scale_bits=_SCALE_16,
        zero_point_bits=zero_point_bits,
    )
    return _Weights(stored, dtype)


def _compressed_tensors(keys: Keys) -> _Weights:
    sparsity = keys.section("sparsity_config")
    if sparsity and sparsity.get("format", "dense") != "dense":
        raise UnsupportedModelError(keys.where, [f"sparse weights (sparsity_config: {shown(sparsity.get('format'))})"])
    groups = keys.section("config_groups")
    if not groups:
        raise InvalidInputError(f"{keys.where}: missing key 'config_groups', needed by compressed-tensors")
    found: list[_Weights] = []
    targets: list[str] = []
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise keys.fault(f"config_groups.{name}", group, "a JSON object is needed")
        inner = Keys(group, f"{keys.where} config_groups.{name}", keys.architecture)
        weights = inner.section("weights")
        if weights is None:
            continue
        activations = inner.section("input_activations")
        compute = None
        if activations is not None:
            compute = _typed(Keys(activations, f"{inner.where}.input_activations", keys.architecture))
        found.append(_group_weights(Keys(weights, f"{inner.where}.weights", keys.architecture), compute))
        targets += inner.texts("targets") or ("Linear",)
    if not found:
        return _Weights(None, None)
    if len(set(map(repr, found))) > 1:
        raise UnsupportedModelError(keys.where, ["several quantisation schemes in one model (config_groups)"])
    everywhere = "Linear" in targets
    return _Weights(
        found[0].quantization,
        found[0].weight_dtype,
        found[0].compute_dtype,
        targets=None if everywhere else tuple(targets),
    )


def _group_weights(keys: Keys, compute: Dtype | None) -> _Weights:
    dtype = _typed(keys)
    bits = keys.count("num_bits")
    group = keys.optional_count("group_size", minimum=-1)
    strategy = keys.text("strategy") or ("group" if group is not None and group > 0 else "tensor")
    zero_point_bits = 0 if keys.flag("symmetric", True) else bits
    sides: dict[str, int | None]
    scale = _SCALE_16
    if strategy == "tensor":
        sides = {}
    elif strategy == "channel":
        sides = {"group_outputs": 1}
    elif strategy in ("group", "tensor_group"):
        if group is None or group < 1:
            raise keys.fault("group_size", group, f"a positive whole number is needed by strategy {strategy}")
        sides = {"group_inputs": group, "group_outputs": 1}
        scale = _SCALE_FP8 if dtype == "fp4" else _SCALE_16
    elif strategy == "block":
        block = keys.counts("block_structure")
        if len(block) != 2 or min(block) < 1:
            raise keys.fault("block_structure", list(block), "two positive whole numbers are needed")
        sides = {"group_outputs": block[0], "group_inputs": block[1]}
    else:
        raise UnsupportedModelError(keys.where, [f"quantisation strategy {strategy!r}"])
    stored = Quantization(
        method="compressed-tensors", bits=bits, scale_bits=scale, zero_point_bits=zero_point_bits, **sides
    )
    return _Weights(stored, dtype, compute)


def _modelopt(keys: Keys) -> _Weights:
    if keys.values.get("quantized_layers"):
        raise UnsupportedModelError(keys.where, ["quantisation that differs by layer (quantized_layers)"])
    algorithm = keys.text("quant_algo")
    if algorithm is None:
        return _Weights(None, None)
    build = _MODELOPT.get(algorithm.upper())
    if build is None:
        known = ", ".join(sorted(_MODELOPT))
        raise UnsupportedModelError(keys.where, [f"quantisation algorithm {algorithm!r} (known: {known})"])
    return build(keys)


def _modelopt_fp8(keys: Keys) -> _Weights:
    return _Weights(Quantization(method="modelopt-fp8", bits=8), "fp8", "fp8")


def _modelopt_fp8_channel(keys: Keys) -> _Weights:
    return _Weights(Quantization(method="modelopt-fp8", bits=8, group_outputs=1), "fp8", "fp8")


def _modelopt_fp8_block(keys: Keys) -> _Weights:
    stored = Quantization(method="modelopt-fp8", bits=8, group_inputs=_BLOCK, group_outputs=_BLOCK)
    return _Weights(stored, "fp8")


def _modelopt_int8(keys: Keys) -> _Weights:
    return _Weights(Quantization(method="modelopt-int8", bits=8, group_outputs=1), "int8", "int8")


def _nvfp4(keys: Keys) -> _Weights:
    group = keys.count("group_size", default=_NVFP4_GROUP)
    stored = Quantization(
        method="nvfp4", bits=4, group_inputs=group, group_outputs=1, scale_bits=_SCALE_FP8, zero_point_bits=0
    )
    return _Weights(stored, "fp4", "fp4")


def _modelopt_int4(compute: Dtype | None) -> Callable[[Keys], _Weights]:
    def read(keys: Keys) -> _Weights:
        group = keys.count("group_size", default=_AWQ_GROUP)
        stored = Quantization(method="modelopt-awq", bits=4, group_inputs=group, group_outputs=1, scale_bits=_SCALE_16)
        return _Weights(stored, "int4", compute)

    return read


def _mxfp4(keys: Keys) -> _Weights:
    stored = Quantization(method="mxfp4", bits=4, group_inputs=_MXFP4_GROUP, group_outputs=1, scale_bits=_SCALE_FP8)
    # Engines and transformers apply it to expert matrices only, whatever the list leaves over.
    return _Weights(stored, "fp4", targets=("experts",))


_MODELOPT: dict[str, Callable[[Keys], _Weights]] = {
    "FP8": _modelopt_fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": _modelopt_fp8_channel,
    "FP8_PB_WO": _modelopt_fp8_block,
    "W8A8_SQ_PER_CHANNEL": _modelopt_int8,
    "NVFP4": _nvfp4,
    "NVFP4_AWQ": _nvfp4,
    "W4A16_AWQ": _modelopt_int4(None),
    "W4A8_AWQ": _modelopt_int4("fp8"),
}

_METHODS: dict[str, Callable[[Keys], _Weights]] = {
    "fp8": _fp8,
    "fbgemm-fp8": _fbgemm_fp8,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt-fp4": _modelopt,
    "mxfp4": _mxfp4,
}
