"""From a Hugging Face config.json to a `ModelSpec`: exactly, or not at all.

The families live in `config_families`; their builders in `config_layers` and, where layers differ in more than
size, `config_hybrid`, `config_sparse` and `config_classic`, over the parts of `config_matrices`; the ways of
quantising in `config_quantization`, and the names of what is not modelled in `config_features`. This file finds
the files, picks the family and puts the parts together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetplan.catalog.config_families import FAMILIES, WRAPPERS
from hetplan.catalog.config_features import describe_unknown, unsupported_features
from hetplan.catalog.config_keys import MAX_INDEX_BYTES, Keys, read_json_object
from hetplan.catalog.config_layers import EXPERT_COUNT_KEYS, Family, build_layers
from hetplan.catalog.config_matrices import Layer, Matrix
from hetplan.catalog.config_quantization import Scheme, read_scheme
from hetplan.catalog.dtypes import DTYPE_ALIASES, Dtype
from hetplan.catalog.model import LayerKind, ModelSpec
from hetplan.errors import InvalidInputError, UnsupportedModelError

_CONFIG = "config.json"
_QUANTIZATION = "hf_quant_config.json"
_INDEX = "model.safetensors.index.json"
_FILE_SUFFIX = f"_{_CONFIG}"
_BASE_DTYPES = ("fp32", "bf16", "fp16")
_DEFAULT_BASE_DTYPE: Dtype = "bf16"
_WRAPPED_PREFIXES = ("language_model.model.layers", "model.language_model.layers")
_FAMILY_BY_NAME = {name: family for family in FAMILIES for name in (*family.architectures, *family.model_types)}
_MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")


def read_config(
    config: str | Path | Mapping[str, Any],
    *,
    name: str | None = None,
    source: str | None = None,
) -> ModelSpec:
    """Read a Hugging Face configuration.

    Parameters
    ----------
    config : path or mapping
        A config.json, a folder that holds one, or its content. hf_quant_config.json and
        model.safetensors.index.json beside it are read too; beside ``NAME_config.json`` the former is
        ``NAME_hf_quant_config.json``.
    name : str, optional
        Name to give the model; by default the folder's or file's, or ``_name_or_path``.
    source : str, optional
        Where the content comes from, for `ModelSpec.source`; by default the file's name.

    Returns
    -------
    ModelSpec

    Raises
    ------
    InvalidInputError
        If the file is not a usable configuration; the message names the file and the key.
    UnsupportedModelError
        If the architecture has parts that are not modelled; ``.features`` names them.

    Examples
    --------
    >>> spec = read_config({"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    ...                     "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    ...                     "max_position_embeddings": 512, "torch_dtype": "bfloat16"}, name="tiny")
    >>> spec.parameter_count
    95040
    """
    if isinstance(config, Mapping):
        where = name or "config"
        return _read(config, None, None, name=name, where=where, source=source or "a configuration given as a mapping")
    path = Path(config)
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        path = path / _CONFIG
    values = read_json_object(path)
    if path.name.endswith(_FILE_SUFFIX):
        stem = path.name.removesuffix(_FILE_SUFFIX)
        own_name, beside = stem.replace("--", "/"), f"{stem}_{_QUANTIZATION}"
        shown_path = path.name
    else:
        own_name, beside = folder.resolve().name or path.stem, _QUANTIZATION
        shown_path = f"{own_name}/{path.name}"
    quantization, index = folder / beside, folder / _INDEX
    return _read(
        values,
        read_json_object(quantization) if quantization.is_file() else None,
        read_json_object(index, MAX_INDEX_BYTES) if index.is_file() and path.name == _CONFIG else None,
        name=name or own_name,
        where=str(path),
        source=source or shown_path,
    )


def _read(
    values: Mapping[str, Any],
    quantization: Mapping[str, Any] | None,
    index: Mapping[str, Any] | None,
    *,
    name: str | None,
    where: str,
    source: str,
) -> ModelSpec:
    outer = Keys(values, where, "a configuration")
    family, keys, notes = _choose(outer)
    layers, pattern = build_layers(family, keys)
    base, stated = _base_dtype(keys, outer)
    if not stated:
        notes.append(f"no torch_dtype: {base} assumed")
    scheme = _scheme(outer, keys, quantization)
    wrapped = keys is not outer
    prefixes = (*family.prefixes, *_WRAPPED_PREFIXES) if wrapped else family.prefixes
    kinds, kind_of_layer = _quantized_kinds(layers, pattern, scheme, prefixes, keys)
    stored = scheme.quantization if scheme is not None else None
    if not any(matrix.quantized for kind in kinds for matrix in kind.linears):
        stored = None
    checkpoint = _checkpoint_bytes(index, where)
    if checkpoint is not None and (wrapped or any(values.get(key) for key in _MTP_KEYS)):
        # The index then also counts what is not part of this model, such as a vision tower.
        notes.append("checkpoint index not used: it counts more than the language model's own layers")
        checkpoint = None
    ends = family.ends(keys)
    return ModelSpec(
        name=name or _given_name(outer) or keys.architecture,
        architecture=keys.architecture,
        source="; ".join([source, *notes]),
        hidden_size=keys.count("hidden_size"),
        vocabulary_size=keys.count("vocab_size"),
        max_position_tokens=keys.count("max_position_embeddings", default=family.default_positions),
        layer_kinds=kinds,
        layer_pattern=kind_of_layer,
        tied_embeddings=keys.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", family.tied_by_default)),
        other_embedding_parameter_count=ends.other_embedding_parameter_count,
        head_bias=ends.head_bias,
        final_norm_parameter_count=ends.final_norm_parameter_count,
        residual_streams=ends.residual_streams,
        weight_dtype=scheme.weight_dtype if stored and scheme and scheme.weight_dtype else base,
        base_dtype=base,
        kv_dtype=(scheme.kv_dtype if scheme else None) or base,
        compute_dtype=(scheme.compute_dtype if stored and scheme else None) or base,
        quantization=stored,
        checkpoint_bytes=checkpoint,
    )


def _choose(outer: Keys) -> tuple[Family, Keys, list[str]]:
    """The family, the keys of the language model, and what to tell about the choice."""
    architecture = _architecture(outer)
    values, notes = outer.values, list[str]()
    inner = outer.section("text_config")
    if inner is not None:
        if architecture not in WRAPPERS:
            merged = {**outer.values, **inner}
            raise UnsupportedModelError(f"{outer.where} ({architecture})", describe_unknown(merged, architecture))
        values = inner
        notes.append(f"language model only (text_config of {architecture})")
        architecture = _architecture(Keys(inner, f"{outer.where} text_config", architecture))
    family = _FAMILY_BY_NAME.get(architecture)
    if family is None:
        raise UnsupportedModelError(f"{outer.where} ({architecture})", describe_unknown(values, architecture))
    lacking = unsupported_features(values, family.handles)
    if lacking:
        raise UnsupportedModelError(f"{outer.where} ({architecture})", lacking)
    architecture = family.architectures[0]
    if inner is None:
        outer.architecture = architecture
        outer.values = _respelled(outer, family)
        return family, outer, notes
    keys = Keys(values, f"{outer.where} text_config", architecture)
    keys.values = _respelled(keys, family)
    return family, keys, notes


def _respelled(keys: Keys, family: Family) -> Mapping[str, Any]:
    """The values with the family's own spellings also under the keys that are read here."""
    values = dict(keys.values)
    for own, read in family.spellings:
        if not keys.has(own):
            continue
        if values.get(read) not in (None, values[own]):
            raise keys.fault(own, values[own], f"must agree with {read} = {values[read]}; keep the right one")
        values[read] = values[own]
    return values


def _architecture(keys: Keys) -> str:
    architectures = keys.texts("architectures")
    named = architectures[0] if architectures else keys.text("model_type")
    if not named:
        raise InvalidInputError(
            f"{keys.where}: neither 'architectures' nor 'model_type' is given; is it a model's config.json?"
        )
    return named


def _given_name(keys: Keys) -> str | None:
    path = keys.text("_name_or_path")
    return path.rstrip("/") if path else None


def _base_dtype(keys: Keys, outer: Keys) -> tuple[Dtype, bool]:
    for place in (keys, outer):
        for key in ("torch_dtype", "dtype"):
            given = place.text(key)
            if given is None:
                continue
            dtype = DTYPE_ALIASES.get(given.removeprefix("torch."))
            if dtype not in _BASE_DTYPES:
                raise place.fault(key, given, "bfloat16, float16 or float32 is needed")
            return dtype, True
    return _DEFAULT_BASE_DTYPE, False


def _scheme(outer: Keys, keys: Keys, beside: Mapping[str, Any] | None) -> Scheme | None:
    for place in (outer, keys):
        inline = place.section("quantization_config")
        if inline:
            return read_scheme(inline, f"{place.where} quantization_config", keys.architecture)
    if beside is None:
        return None
    where = f"{outer.where} {_QUANTIZATION}"
    inner = Keys(beside, where, keys.architecture).section("quantization")
    if inner is None:
        raise InvalidInputError(f"{where}: missing key 'quantization'")
    return read_scheme({"quant_method": "modelopt", **inner}, where, keys.architecture)


def _quantized_kinds(
    layers: tuple[Layer, ...], pattern: tuple[int, ...], scheme: Scheme | None, prefixes: tuple[str, ...], keys: Keys
) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """Layer kinds with each matrix marked quantised or not; layers that differ become kinds of their own."""
    if scheme is None or scheme.quantization is None:
        return tuple(_kind(layer, layer.name, None) for layer in layers), pattern
    experts = keys.optional_count(*EXPERT_COUNT_KEYS) or 1
    seen: dict[tuple[int, tuple[bool, ...]], int] = {}
    kind_of_layer = []
    for position, base in enumerate(pattern):
        stems = [f"{prefix}.{position}" for prefix in prefixes]
        marks = tuple(_is_quantized(matrix, stems, scheme, experts, keys) for matrix in layers[base].matrices)
        kind_of_layer.append(seen.setdefault((base, marks), len(seen)))
    kinds: list[LayerKind] = []
    for base, marks in seen:
        variant = sum(1 for kind in kinds if kind.name.split("#")[0] == layers[base].name)
        name = layers[base].name if variant == 0 else f"{layers[base].name}#{variant + 1}"
        kinds.append(_kind(layers[base], name, marks))
    return tuple(kinds), tuple(kind_of_layer)


def _is_quantized(matrix: Matrix, stems: list[str], scheme: Scheme, experts: int, keys: Keys) -> bool:
    if not matrix.linear.quantized:
        return False
    if "{e}" not in matrix.module:
        return scheme.quantizes(f"{stem}.{matrix.module}" for stem in stems)
    asked = range(experts) if scheme.names_experts else (0, experts - 1)
    answers = {
        scheme.quantizes(f"{stem}.{matrix.module.replace('{e}', str(expert))}" for stem in stems) for expert in asked
    }
    if len(answers) > 1:
        raise UnsupportedModelError(keys.where, [f"experts of one layer quantised differently ({stems[0]})"])
    return answers.pop()


def _kind(layer: Layer, name: str, marks: tuple[bool, ...] | None) -> LayerKind:
    linears = [matrix.linear for matrix in layer.matrices]
    if marks is not None:
        linears = [
            linear if linear.quantized == mark else linear.replace(quantized=mark)
            for linear, mark in zip(linears, marks, strict=True)
        ]
    return LayerKind(
        name=name,
        attention=layer.attention,
        linears=tuple(linears),
        other_parameter_count=layer.other_parameter_count,
    )


def _checkpoint_bytes(index: Mapping[str, Any] | None, where: str) -> int | None:
    if index is None:
        return None
    beside = f"{Path(where).parent / _INDEX}"
    metadata = Keys(index, beside, "a checkpoint index").section("metadata")
    if metadata is None:
        return None
    return Keys(metadata, f"{beside} metadata", "a checkpoint index").optional_count("total_size", maximum=2**63 - 1)
