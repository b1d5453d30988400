"""A number that leaves a function says its unit in its name, or is on the list of plain numbers."""

from __future__ import annotations

import importlib
import pkgutil
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

import hetplan
from hetplan.base import Frozen

UNITS = (
    "_s", "_bytes", "_bytes_per_s", "_bytes_per_token", "_flops", "_tokens", "_requests_per_s", "_tokens_per_s",
    "_per_s", "_usd", "_usd_per_hour", "_usd_per_gb", "_per_hour", "_bits",
    # the allocation problem's own table
    "_gb", "_hours", "_kb_per_token", "_usd_per_gb_hour", "_usd_per_ms",
)  # fmt: skip

# Names whose unit is the whole name.
UNIT_NAMES = {
    "requests_per_s", "output_tokens_per_s", "usd_per_million_output_tokens", "tokens", "seconds", "bytes_per_s",
    "bytes", "usd_per_hour_per_request_rate", "gflop_per_token", "tflops",
}  # fmt: skip

# Counts, degrees, sizes of matrices in elements, fractions, indices: numbers that have no unit, or that carry it in
# another field (an objective, a prediction's value, a violation's, a calibrated quantity's).
PLAIN = {
    # fractions and ratios
    "fraction", "shares", "level", "gap", "percentile", "prefix_cache_hit_rate", "gpu_memory_utilization",
    "latency_penalty", "relative_spread", "kind_weights", "wave_fraction", "dispatch_fraction", "all_reduce_factor",
    "overlap_power",
    "availability", "overlap_fraction",
    "utilization", "error_limit", "errors", "error_factor", "slowness", "max_unserved", "weight_scale",
    "delay_spread", "error_spread", "arrival_spread", "stress", "cvar_level", "max_violation_rate", "max_extra_cost",
    # counts, degrees and indices
    "max_in_flight", "max_choices", "pipeline", "port", "weight", "revision",
    "generation", "generations", "failures", "deaths", "loaded", "targets", "machines_named", "ports_used",
    "pipelines_numbered", "shunts", "adoptions", "plan", "number",
    "scenarios", "model", "tier", "machines", "closed", "replicas", "copied", "parts",
    "layer", "rank", "ranks", "pid",
    "count", "gpu_count", "gpu_indices", "tensor_parallel", "layers", "node", "deployment", "max_num_seqs",
    "micro_batch", "max_batch", "seed", "layer_pattern", "experts", "active_experts", "intra_node_links",
    "sm_count", "cores", "threads", "line", "pipeline_parallel", "batch", "repeats",
    "handover_sequences", "handover_layers",
    "other_parameter_count", "other_embedding_parameter_count", "final_norm_parameter_count",
    # tokens, as engines call them
    "max_model_len", "max_num_batched_tokens", "max_position_tokens", "window_tokens",
    # sizes of matrices, in elements
    "inputs", "outputs", "granularity", "heads", "kv_heads", "head_dim", "value_head_dim", "kv_latent_size",
    "kv_lora_rank", "index_heads", "index_head_dim", "residual_streams", "hidden_size", "vocabulary_size",
    "intermediate_size",
    "group_inputs", "group_outputs", "bits", "fill_inputs",
    # the unit is in another field, or in the objective's name
    "objective", "bound", "value", "low", "high", "limit", "band", "shape", "parameters", "requests_per_s_change",
    "cost_usd_per_hour_change", "pool_prices",
    # dollars for a row's whole limit
    "link", "spared", "pair_link", "load", "cache", "ttft", "unserved", "budget", "storage",
    # logarithms: a length scale, and weights of measured shapes
    "reach", "weights",
}  # fmt: skip


def record_types() -> list[type[Frozen]]:
    """Every record of the package."""
    for module in pkgutil.walk_packages(hetplan.__path__, "hetplan."):
        # What runs in the engine needs torch and vllm, and has no records that leave it.
        if module.name != "hetplan.__main__" and not module.name.startswith("hetplan.runtime.vllm_plugin."):
            importlib.import_module(module.name)
    found: dict[str, type[Frozen]] = {}
    waiting: list[type[Frozen]] = [Frozen]
    while waiting:
        for cls in waiting.pop().__subclasses__():
            if cls.__module__.startswith("hetplan."):
                found[f"{cls.__module__}.{cls.__qualname__}"] = cls
                waiting.append(cls)
    return [found[name] for name in sorted(found)]


def holds_numbers(annotation: Any) -> bool:
    """Whether a field holds numbers itself, at any depth, records apart."""
    if annotation is bool or annotation is str:
        return False
    if annotation in (int, float):
        return True
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return False
    return any(holds_numbers(part) for part in typing.get_args(annotation) if part is not type(None))


def numeric_fields(cls: type[Frozen]) -> Iterator[str]:
    for name, field in cls.model_fields.items():
        if holds_numbers(field.annotation):
            yield name


RECORDS = record_types()


def test_records_of_every_room_are_found() -> None:
    names = {cls.__name__ for cls in RECORDS}
    assert {"Plan", "Stage", "Offer", "Quantity", "ModelSpec", "Workload", "Violation", "ReplicaPrediction"} <= names


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
def test_numeric_fields_name_their_unit(cls: type[Frozen]) -> None:
    unnamed = [n for n in numeric_fields(cls) if not n.endswith(UNITS) and n not in UNIT_NAMES and n not in PLAIN]
    assert unnamed == [], f"{cls.__name__}: {unnamed} state no unit"


def test_the_list_of_plain_numbers_has_no_leftovers() -> None:
    used = {name for cls in RECORDS for name in numeric_fields(cls)}
    assert used >= PLAIN
    assert used >= UNIT_NAMES


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
def test_records_are_frozen_and_refuse_unknown_keys(cls: type[Frozen]) -> None:
    assert cls.model_config.get("frozen") is True
    assert cls.model_config.get("extra") == "forbid"
    assert cls.model_config.get("allow_inf_nan") is False
