"""The terms of an allocation problem, by configuration and query type, from its definition (paper: eqs. 2 to 5k).

I query types, N configurations. Whole traffic of a type is meant wherever a share of it is multiplied with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from hetplan.problem.allocation import AllocationProblem, Configuration
from hetplan.units import GB, KB, SECONDS_PER_HOUR
from hetplan.verification.tables import FloatArray, IntArray

_GFLOP_PER_TFLOP = 1000.0
_MS_PER_S = 1000.0


@dataclass(frozen=True, slots=True)
class Option:
    """A configuration by its number: a model on a tier with its degrees; ``given`` where the problem lists it."""

    number: int
    model: int
    tier: int
    tensor_parallel: int
    pipeline_parallel: int
    given: Configuration | None = None

    @property
    def gpus(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def usd_per_hour(self, problem: AllocationProblem) -> float:
        """Of one replica."""
        return self.gpus * problem.tiers[self.tier].usd_per_hour if self.given is None else self.given.usd_per_hour


def option_count(problem: AllocationProblem) -> int:
    """Configurations that the problem numbers."""
    if problem.configurations:
        return len(problem.configurations)
    degrees = len(problem.tensor_parallel) * len(problem.pipeline_parallel)
    return len(problem.models) * len(problem.tiers) * degrees


def options_of(problem: AllocationProblem) -> Iterator[Option]:
    """All configurations, in the order that numbers them."""
    if problem.configurations:
        for number, one in enumerate(problem.configurations):
            yield Option(number, one.model, one.tier, one.tensor_parallel, one.pipeline_parallel, one)
        return
    lists = (range(len(problem.models)), range(len(problem.tiers)), problem.tensor_parallel, problem.pipeline_parallel)
    for number, (model, tier, tensor_parallel, pipeline_parallel) in enumerate(product(*lists)):
        yield Option(number, model, tier, tensor_parallel, pipeline_parallel)


@dataclass(frozen=True, slots=True)
class Terms:
    """What configurations cost, hold and take. Arrays of (I, N), (I,) or (N,)."""

    # By type and configuration.
    delay_s: FloatArray
    ttft_s: FloatArray
    error: FloatArray
    load: FloatArray  # replicas that all of a type keeps busy (5g)
    cache_gb: FloatArray  # KV cache of all of a type on each GPU of a single replica (5f)
    delay_usd: FloatArray
    # By configuration.
    rent_usd: FloatArray  # of a replica over the horizon
    copy_gb: FloatArray  # stored weights
    copy_usd: FloatArray
    weight_gb: FloatArray  # of each GPU
    memory_gb: FloatArray  # of each GPU; infinite where the problem gives the configuration
    pair: IntArray  # its model on its tier
    # By type.
    traffic_gb: FloatArray
    traffic_usd: FloatArray
    unserved_usd: FloatArray


def terms_of(problem: AllocationProblem, options: Sequence[Option]) -> Terms:
    """The terms of some of a problem's configurations."""
    queries, decisions = problem.query_types, problem.decisions
    models = [problem.models[one.model] for one in options]
    tiers = [problem.tiers[one.tier] for one in options]

    def by_type(name: str) -> FloatArray:
        return np.array([getattr(query, name) for query in queries], dtype=np.float64)[:, None]

    def by_model(name: str) -> FloatArray:
        return np.array([getattr(model, name) for model in models], dtype=np.float64)

    def by_tier(name: str) -> FloatArray:
        return np.array([getattr(tier, name) for tier in tiers], dtype=np.float64)

    tokens, arrivals = by_type("tokens"), by_type("requests_per_hour")
    tensor_parallel = np.array([one.tensor_parallel for one in options], dtype=np.float64)
    pipeline_parallel = np.array([one.pipeline_parallel for one in options], dtype=np.float64)
    gpus = tensor_parallel * pipeline_parallel
    weights, scale = by_model("weight_gb"), by_tier("weight_scale")
    # Weights are read once for each token.
    token_s = by_type("slowness") * weights * scale / by_tier("bandwidth_gb_per_s")
    send_s = by_model("activation_bytes_per_token") / GB / by_tier("link_gb_per_s") + by_tier("link_latency_s")
    delay = token_s * tokens / tensor_parallel + pipeline_parallel * send_s * by_type("output_tokens")
    first = token_s * by_type("input_tokens") / tensor_parallel
    capacity = problem.utilization * SECONDS_PER_HOUR * by_tier("tflops") * gpus
    load = by_model("gflop_per_token") * tokens * arrivals / _GFLOP_PER_TFLOP / capacity
    memory = by_tier("memory_gb")
    for column, one in enumerate(options):
        if one.given is not None:
            delay[:, column], first[:, column] = one.given.delay_s, one.given.ttft_s
            load[:, column] = arrivals[:, 0] / np.array(one.given.capacity_per_hour)
            memory[column] = np.inf
    kv_gb = by_model("kv_bytes_per_token") / GB
    if decisions.kv_memory == "littles_law":
        in_flight = arrivals / SECONDS_PER_HOUR * delay
    else:
        # The paper's residency time stands where a number of requests is meant.
        in_flight = tokens * kv_gb / by_tier("bandwidth_gb_per_s")
    held = scale if decisions.weights == "scaled" else np.ones_like(scale)
    times = arrivals[:, 0] * problem.horizon_hours if decisions.penalties == "per_request" else np.ones(len(queries))
    traffic_gb = (by_type("storage_kb_per_token") * KB / GB * tokens * arrivals)[:, 0]
    storage_usd_per_gb = problem.horizon_hours * problem.storage_usd_per_gb_hour
    errors = np.array([[query.errors[one.model] for one in options] for query in queries], dtype=np.float64)
    return Terms(
        delay_s=delay,
        ttft_s=first,
        error=errors.reshape(len(queries), len(options)) * by_tier("error_factor"),
        load=load,
        cache_gb=kv_gb * tokens / gpus * in_flight,
        delay_usd=by_type("delay_usd_per_ms") * _MS_PER_S * delay * times[:, None],
        rent_usd=problem.horizon_hours * np.array([one.usd_per_hour(problem) for one in options], dtype=np.float64),
        copy_gb=weights,
        copy_usd=weights * storage_usd_per_gb,
        weight_gb=weights * held / gpus,
        memory_gb=memory,
        pair=np.array([one.model * len(problem.tiers) + one.tier for one in options], dtype=np.int64),
        traffic_gb=traffic_gb,
        traffic_usd=traffic_gb * storage_usd_per_gb,
        unserved_usd=by_type("unserved_usd")[:, 0] * times,
    )
