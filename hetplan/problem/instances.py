"""The canonical family of allocation problems: the paper's tables, seeded, at any size.

One random stream for each group of parameters (query types, models, tiers, storage), so that a change of one group's
range leaves the others alone. Above six types the archetypes repeat with other lengths and rates; models below or above
six are picked or interpolated on parameters; tiers beyond ten add five more kinds of GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hetplan.catalog.dtypes import Dtype
from hetplan.errors import InvalidInputError
from hetplan.problem.allocation import AllocationProblem, Decisions, DecisionsName, QueryDemand, ServedModel, Tier
from hetplan.units import GB, KB

_MOST = 1000
# Error of a model: this, times the type's base error, by the model's capability.
_ERROR_SCALE = 2.0
# Storage: the paper's capacity for six types, and how much more than all traffic takes where that is not enough.
_STORAGE_GB, _STORAGE_ROOM = 1000.0, 1.3
_BUDGET_USD = 100.0
# Memory bandwidth (GB/s) above which a GPU comes with the faster NVLink, and both links (GB/s).
_FAST_MEMORY, _NVLINK, _FAST_NVLINK = 2000.0, 600.0, 900.0

Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Archetype:
    name: str
    input_tokens: int
    output_tokens: int
    requests_per_hour: Range
    slowness: float
    delay_limit_s: float
    error_limit: float
    delay_usd_per_ms: Range
    unserved_usd: Range
    storage_kb_per_token: Range
    base_error: Range


# Of the tables of the family; U(low, high) where two values stand.
_ARCHETYPES = (
    _Archetype(
        "summarization", 512, 256, (18e3, 25e3), 1.0, 3.0, 0.04, (1e-4, 3e-4), (1e3, 1.5e3), (10, 14), (0.03, 0.05)
    ),
    _Archetype("code", 256, 512, (9e3, 12e3), 1.1, 6.0, 0.02, (3e-4, 6e-4), (1e3, 1.5e3), (10, 14), (0.02, 0.03)),
    _Archetype(
        "translation", 128, 128, (12e3, 16e3), 0.9, 1.5, 0.03, (1e-4, 3e-4), (1e3, 1.5e3), (10, 14), (0.02, 0.03)
    ),
    _Archetype("math", 64, 256, (5e3, 8e3), 1.2, 4.0, 0.03, (5e-4, 8e-4), (1e3, 1.5e3), (10, 14), (0.05, 0.07)),
    _Archetype("image", 32, 1024, (2e3, 4e3), 1.3, 12.0, 0.06, (5e-4, 1e-3), (2e3, 3e3), (40, 60), (0.06, 0.08)),
    _Archetype("video", 48, 2048, (1e3, 3e3), 1.5, 25.0, 0.08, (5e-4, 1e-3), (2e3, 3e3), (80, 120), (0.08, 0.1)),
)

# Name, parameters (10**9), weights at 16 bits (GB), KV cache (bytes a token), capability, layers.
_MODELS: tuple[tuple[str, float, float, float, float, int], ...] = (
    ("Llama-3.2-1B", 1, 2, 32768, 0.5, 16),
    ("Llama-3.2-3B", 3, 6, 114688, 1.5, 28),
    ("Llama-3.1-8B", 8, 16, 131072, 3.0, 32),
    ("Llama-3.2-11B-V", 11, 22, 163840, 2.5, 40),
    ("Llama-3.x-31B", 31, 62, 245760, 5.0, 60),
    ("Llama-3.1-70B", 70, 140, 327680, 8.0, 80),
)
# Hidden sizes of those models: what a token takes over a link between stages, at two bytes an element.
_HIDDEN = (2048, 3072, 4096, 4096, 6144, 8192)
# Memory (GB), bandwidth (GB/s), FP16 TFLOPS, $/h.
_GPUS = {
    "A6000": (48, 768, 38.7, 0.65),
    "RTX4090": (24, 1008, 82.6, 0.35),
    "A100-40": (40, 1555, 312, 1.20),
    "H100": (80, 3350, 989, 2.50),
    "L40S": (48, 864, 181, 0.90),
    "A100-80": (80, 2039, 312, 1.60),
    "L4": (24, 300, 60, 0.30),
    "H200": (141, 4800, 989, 3.20),
    "A10G": (24, 600, 62, 0.45),
}
# Size of the weights, factors on TFLOPS and on the error.
_PRECISIONS: dict[Dtype, tuple[float, float, float]] = {
    "fp16": (1.0, 1.0, 1.0),
    "int8": (0.5, 1.5, 1.15),
    "int4": (0.25, 2.0, 1.35),
}
_TIERS: tuple[tuple[str, Dtype], ...] = (
    ("A6000", "fp16"), ("A6000", "int8"), ("A6000", "int4"), ("RTX4090", "fp16"), ("RTX4090", "int8"),
    ("RTX4090", "int4"), ("A100-40", "fp16"), ("A100-40", "int8"), ("H100", "fp16"), ("H100", "int8"),
    ("L40S", "fp16"), ("L40S", "int8"), ("L40S", "int4"), ("A100-80", "fp16"), ("A100-80", "int8"), ("L4", "fp16"),
    ("L4", "int8"), ("H200", "fp16"), ("H200", "int8"), ("A10G", "int8"),
)  # fmt: skip
_FIRST_TIERS = 10


def canonical(
    query_types: int,
    models: int,
    tiers: int,
    seed: int,
    decisions: DecisionsName | Decisions,
    budget_usd: float | None,
    storage: Literal["scaled", "literal"],
) -> AllocationProblem:
    """An instance of the family; see `AllocationProblem.canonical`."""
    for name, size in (("query_types", query_types), ("models", models), ("tiers", tiers)):
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= _MOST:
            raise InvalidInputError(f"{name} is a whole number from 1 to {_MOST}, got {size!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InvalidInputError(f"seed is a whole number from 0, got {seed!r}")
    if storage not in ("scaled", "literal"):
        raise InvalidInputError(f"storage is 'scaled' or 'literal', got {storage!r}")
    streams = [
        np.random.default_rng(stream) for stream in np.random.SeedSequence([seed, query_types, models, tiers]).spawn(8)
    ]
    served, capabilities = _models(models, streams[1])
    demands = _query_types(query_types, capabilities, streams[0])
    offered = _tiers(tiers, streams[2])
    scale = max(1.0, query_types / len(_ARCHETYPES))
    traffic_gb = sum(q.storage_kb_per_token * KB / GB * q.tokens * q.requests_per_hour for q in demands)
    # As the family states it: a sixth of the capacity for each type.
    room_gb = max(_STORAGE_GB * query_types / len(_ARCHETYPES), _STORAGE_ROOM * traffic_gb)
    return AllocationProblem(
        query_types=demands,
        models=served,
        tiers=offered,
        budget_usd=_BUDGET_USD * scale if budget_usd is None else budget_usd,
        storage_capacity_gb=room_gb if storage == "scaled" else _STORAGE_GB * scale,
        storage_usd_per_gb_hour=_between(streams[3], 5e-4, 1e-3),
        decisions=decisions,
    )


def _between(stream: np.random.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(stream.random())


def _query_types(number: int, capabilities: list[float], stream: np.random.Generator) -> tuple[QueryDemand, ...]:
    kinds = len(_ARCHETYPES)
    picked = range(kinds) if number >= kinds else np.linspace(0, kinds - 1, number).round().astype(int).tolist()
    archetypes = [_ARCHETYPES[index] for index in picked]
    demands = []
    for index in range(number):
        kind = archetypes[index % len(archetypes)]
        # Beyond the first six, other lengths and rates.
        varied = index >= kinds
        length = float(np.exp(_between(stream, np.log(0.5), np.log(2.0)))) if varied else 1.0
        rate = float(np.exp(_between(stream, np.log(0.4), np.log(1.2)))) if varied else 1.0
        requests = _between(stream, *kind.requests_per_hour) * (rate / length if varied else 1.0)
        slowness = kind.slowness * _between(stream, 0.9, 1.1)
        delay = kind.delay_limit_s * max(length, 0.5) * (_between(stream, 0.85, 1.25) if varied else 1.0)
        error = kind.error_limit * (_between(stream, 0.85, 1.25) if varied else 1.0)
        delay_usd, unserved_usd = _between(stream, *kind.delay_usd_per_ms), _between(stream, *kind.unserved_usd)
        storage_kb = _between(stream, *kind.storage_kb_per_token)
        base = _between(stream, *kind.base_error) * _ERROR_SCALE
        demands.append(
            QueryDemand(
                name=kind.name if index < kinds and number >= kinds else f"{kind.name}-{index}",
                input_tokens=max(8, round(kind.input_tokens * length)),
                output_tokens=max(8, round(kind.output_tokens * length)),
                requests_per_hour=requests,
                delay_limit_s=delay,
                error_limit=error,
                delay_usd_per_ms=delay_usd,
                unserved_usd=unserved_usd,
                storage_kb_per_token=storage_kb,
                slowness=slowness,
                errors=tuple(base / capability for capability in capabilities),
            )
        )
    return tuple(demands)


def _models(number: int, stream: np.random.Generator) -> tuple[tuple[ServedModel, ...], list[float]]:
    sizes = np.log([model[1] for model in _MODELS])
    rows: list[tuple[str, float, float, float, float, int]] = []
    if number <= len(_MODELS):
        rows = [_MODELS[i] for i in np.linspace(0, len(_MODELS) - 1, number).round().astype(int).tolist()]
    else:
        # The 11B vision model is off the line of capability against size.
        line = [i for i, model in enumerate(_MODELS) if not model[0].endswith("-V")]
        for index, log_size in enumerate(np.linspace(sizes[0], sizes[-1], number).tolist()):
            inner = 0 < index < number - 1
            parameters = float(np.exp(log_size)) * (float(np.exp(_between(stream, -0.1, 0.1))) if inner else 1.0)
            at = np.log(parameters)
            kv_bytes = float(np.exp(np.interp(at, sizes, np.log([model[3] for model in _MODELS]))))
            known = np.log([_MODELS[i][4] for i in line])
            capability = float(np.exp(np.interp(at, sizes[line], known))) * float(np.exp(_between(stream, -0.1, 0.1)))
            layers = round(float(np.interp(at, sizes, [model[5] for model in _MODELS])))
            rows.append((f"M{index}-{parameters:.1f}B", parameters, 2 * parameters, kv_bytes, capability, layers))
    served = [
        ServedModel(
            name=name,
            weight_gb=weight_gb,
            kv_bytes_per_token=kv_bytes,
            gflop_per_token=2 * parameters,
            activation_bytes_per_token=2 * float(np.interp(np.log(parameters), sizes, _HIDDEN)),
            layers=layers,
        )
        for name, parameters, weight_gb, kv_bytes, _, layers in rows
    ]
    return tuple(served), [row[4] for row in rows]


def _tiers(number: int, stream: np.random.Generator) -> tuple[Tier, ...]:
    if number <= _FIRST_TIERS:
        picked = np.linspace(0, _FIRST_TIERS - 1, number).round().astype(int).tolist()
    else:
        picked = [index % len(_TIERS) for index in range(number)]
    tiers = []
    for index, pick in enumerate(picked):
        gpu, dtype = _TIERS[pick]
        memory, bandwidth, tflops, price = _GPUS[gpu]
        scale, faster, error = _PRECISIONS[dtype]
        again = index // len(_TIERS)
        tiers.append(
            Tier(
                name=f"{gpu}-{dtype.upper()}" + (f"-{again + 1}" if again else ""),
                gpu=gpu,
                weight_dtype=dtype,
                memory_gb=memory,
                bandwidth_gb_per_s=bandwidth,
                tflops=tflops * faster,
                usd_per_hour=price * _between(stream, 0.8, 1.2),
                weight_scale=scale,
                error_factor=error,
                link_gb_per_s=_FAST_NVLINK if bandwidth > _FAST_MEMORY else _NVLINK,
            )
        )
    return tuple(tiers)
