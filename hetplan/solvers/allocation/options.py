"""Options: a model on a tier at its degrees, as arrays over query types (I) and options (O).

Everything that a solver asks of an `AllocationProblem` stands here: money, delay, time to first token, error, and the
share of one replica that all of a query type would take. Shares are of the limit, so every capacity is 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetplan.problem.allocation import AllocationProblem
from hetplan.units import GB, KB, SECONDS_PER_HOUR

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MS_PER_S = 1000.0
_GFLOP_PER_TFLOP = 1000.0
# Room for rounding where a share meets its limit.
SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a problem; I query types, O options, P pairs of model and tier.

    Attributes
    ----------
    number : (O,) int
        Of the configuration in the problem: see `hetplan.plan.RowPrices`.
    model, tier, tensor_parallel, pipeline_parallel, gpus, pair : (O,) int
        ``pair`` numbers the pairs of model and tier that have an option, from 0.
    rent_usd : (O,) float
        Of one replica over the horizon.
    pair_gb, pair_usd : (P,) float
        Stored weights of a pair's model, and their cost over the horizon.
    storage_gb, storage_usd : (I,) float
        Of all a type's traffic.
    unit_usd : (I, O) float
        What all of a type costs on an option beside rent and stored weights: its traffic's storage and its delay.
    delay, error, ttft : (I, O) float
        As shares of the type's limit; ``ttft`` is None where no type has a limit.
    load, cache : (I, O) float
        Share of one replica's compute, and of its memory for KV cache, that all of the type takes.
    most : (I, O) float
        The largest fraction of a type that one replica can serve; 0 where it can serve none.
    """

    problem: AllocationProblem
    number: IntArray
    model: IntArray
    tier: IntArray
    tensor_parallel: IntArray
    pipeline_parallel: IntArray
    gpus: IntArray
    pair: IntArray
    rent_usd: FloatArray
    pair_gb: FloatArray
    pair_usd: FloatArray
    storage_gb: FloatArray
    storage_usd: FloatArray
    unit_usd: FloatArray
    delay: FloatArray
    error: FloatArray
    ttft: FloatArray | None
    load: FloatArray
    cache: FloatArray
    most: FloatArray
    unserved_usd: FloatArray
    max_unserved: FloatArray

    @property
    def count(self) -> int:
        return len(self.model)

    @property
    def pairs(self) -> int:
        return len(self.pair_gb)

    @property
    def many(self) -> bool:
        """Whether an option may be bought more than once."""
        return self.problem.decisions.replicas == "many"

    @property
    def stored_per_type(self) -> bool:
        """Whether weights are stored once more for each type (the paper's literal reading)."""
        return self.problem.decisions.model_storage == "per_query_type"

    @property
    def served(self) -> bool:
        """Whether mean delay and error are of the served share."""
        return self.problem.decisions.slo_on == "served"

    def most_replicas(self) -> IntArray:
        """(O,) replicas that the budget allows, at least 1."""
        if not self.many:
            return np.ones(self.count, dtype=np.int64)
        with np.errstate(divide="ignore"):
            affordable = np.floor(self.problem.budget_usd / self.rent_usd + SLACK)
        # No type needs more replicas than all of it fills, and one more for each that is alone there.
        needed = np.ceil(np.maximum(self.load, np.where(np.isfinite(self.cache), self.cache, 0.0)).sum(axis=0)) + 1
        most: IntArray = np.maximum(np.minimum(affordable, needed), 1).astype(np.int64)
        return most

    def subset(self, keep: NDArray[np.bool_] | IntArray) -> Options:
        """Some of the options; pairs are numbered as before."""
        return Options(
            problem=self.problem,
            **{name: getattr(self, name)[keep] for name in _BY_OPTION},
            **{name: getattr(self, name)[:, keep] for name in _BY_TYPE_AND_OPTION},
            ttft=None if self.ttft is None else self.ttft[:, keep],
            **{name: getattr(self, name) for name in _OTHER},
        )


_BY_OPTION = ("number", "model", "tier", "tensor_parallel", "pipeline_parallel", "gpus", "pair", "rent_usd")
_BY_TYPE_AND_OPTION = ("unit_usd", "delay", "error", "load", "cache", "most")
_OTHER = ("pair_gb", "pair_usd", "storage_gb", "storage_usd", "unserved_usd", "max_unserved")


def make_options(problem: AllocationProblem, *, prune: bool = True) -> Options:
    """The options of a problem.

    Parameters
    ----------
    problem : AllocationProblem
    prune : bool
        Leave out what cannot be in a plan or is never better: weights that do not fit, rent above the budget, and, of
        configurations with the same number of GPUs, those with less tensor parallelism (by the paper's formulas they
        are slower and otherwise alike). Without, only what does not fit is left out.
    """
    columns = _estimated(problem, prune) if problem.configurations else _formulas(problem, prune)
    model, tier, tensor, pipeline = columns.names
    gpus, rent = tensor * pipeline, columns.rent_usd
    delay_s, ttft_s, load, cache = columns.delay_s, columns.ttft_s, columns.load, columns.cache
    queries, decisions = problem.query_types, problem.decisions
    requests = np.array([q.requests_per_hour for q in queries]) * problem.horizon_hours
    limit_s = np.array([q.delay_limit_s for q in queries])
    errors = np.array([q.errors for q in queries])
    error_factor = np.array([t.error_factor for t in problem.tiers])
    error = errors[:, model] * error_factor[tier] / np.array([q.error_limit for q in queries])[:, None]
    delay = delay_s / limit_s[:, None]
    limits = [q.ttft_limit_s for q in queries]
    ttft = None
    if any(limit is not None for limit in limits):
        ttft = ttft_s / np.array([np.inf if limit is None else limit for limit in limits])[:, None]
    hourly_gb = np.array([q.storage_kb_per_token * KB / GB * q.tokens * q.requests_per_hour for q in queries])
    usd_per_gb = problem.storage_usd_per_gb_hour * problem.horizon_hours
    times = requests if decisions.penalties == "per_request" else np.ones(len(queries))
    delay_usd = np.array([q.delay_usd_per_ms for q in queries]) * MS_PER_S * times
    pairs, pair = np.unique(model * len(problem.tiers) + tier, return_inverse=True)
    weight_gb = np.array([m.weight_gb for m in problem.models])
    pair_gb = weight_gb[pairs // len(problem.tiers)] if len(pairs) else np.zeros(0)
    return Options(
        problem=problem,
        number=columns.number,
        model=model,
        tier=tier,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        gpus=gpus,
        pair=pair.astype(np.int64),
        rent_usd=rent,
        pair_gb=pair_gb,
        pair_usd=pair_gb * usd_per_gb,
        storage_gb=hourly_gb,
        storage_usd=hourly_gb * usd_per_gb,
        unit_usd=(hourly_gb * usd_per_gb)[:, None] + delay_usd[:, None] * delay_s,
        delay=delay,
        error=error,
        ttft=ttft,
        load=load,
        cache=cache,
        most=_most(problem, delay, error, ttft, load, cache),
        unserved_usd=np.array([q.unserved_usd for q in queries]) * times,
        max_unserved=np.array([q.max_unserved for q in queries]),
    )


@dataclass(frozen=True, slots=True)
class _Columns:
    """Configurations that are options: model, tier and degrees, and their tables."""

    number: IntArray
    names: tuple[IntArray, IntArray, IntArray, IntArray]
    rent_usd: FloatArray
    delay_s: FloatArray
    ttft_s: FloatArray
    load: FloatArray
    cache: FloatArray


def _affordable(problem: AllocationProblem, rent_usd: FloatArray) -> NDArray[np.bool_]:
    return rent_usd <= problem.budget_usd * (1 + SLACK)


def _formulas(problem: AllocationProblem, prune: bool) -> _Columns:
    """Columns of all degrees on all tiers, by the paper's formulas."""
    degrees = [(n, m) for n in problem.tensor_parallel for m in problem.pipeline_parallel]
    if prune:
        # At the same number of GPUs, more tensor parallelism is never slower.
        best: dict[int, tuple[int, int]] = {}
        for n, m in degrees:
            if n > best.get(n * m, (0, 0))[0]:
                best[n * m] = (n, m)
        degrees = [best[gpus] for gpus in sorted(best)]
    model, tier, degree = np.indices((len(problem.models), len(problem.tiers), len(degrees)), dtype=np.int64).reshape(
        3, -1
    )
    tensor, pipeline = np.array(degrees, dtype=np.int64)[degree].T
    gpus = tensor * pipeline
    scale = np.array([t.weight_scale if problem.decisions.weights == "scaled" else 1.0 for t in problem.tiers])[tier]
    weight_gb = np.array([m.weight_gb for m in problem.models])[model]
    free = np.array([t.memory_gb for t in problem.tiers])[tier] - weight_gb * scale / gpus
    rent = problem.horizon_hours * np.array([t.usd_per_hour for t in problem.tiers])[tier] * gpus
    # What is left out leaves before the tables by type are made.
    keep = free > 0
    if prune:
        keep &= _affordable(problem, rent)
    every = [(n, m) for n in problem.tensor_parallel for m in problem.pipeline_parallel]
    place = np.array([every.index(pair) for pair in degrees], dtype=np.int64)[degree]
    number = (model * len(problem.tiers) + tier) * len(every) + place
    columns = (number, model, tier, tensor, pipeline, gpus)
    number, model, tier, tensor, pipeline, gpus = (column[keep] for column in columns)
    weight_gb, free, rent = weight_gb[keep], free[keep], rent[keep]
    queries = problem.query_types
    tier_of = {
        name: np.array([getattr(t, name) for t in problem.tiers])[tier]
        for name in (
            "bandwidth_gb_per_s", "tflops", "weight_scale", "link_gb_per_s", "link_latency_s",
        )
    }  # fmt: skip
    kv_gb = np.array([m.kv_bytes_per_token for m in problem.models])[model] / GB
    gflop = np.array([m.gflop_per_token for m in problem.models])[model]
    activation_gb = np.array([m.activation_bytes_per_token for m in problem.models])[model] / GB
    tokens = np.array([q.tokens for q in queries])[:, None]
    prompt = np.array([q.input_tokens for q in queries])[:, None]
    answer = np.array([q.output_tokens for q in queries])[:, None]
    per_hour = np.array([q.requests_per_hour for q in queries])[:, None]
    slowness = np.array([q.slowness for q in queries])[:, None]
    token_s = slowness * weight_gb * tier_of["weight_scale"] / tier_of["bandwidth_gb_per_s"]
    send_s = activation_gb / tier_of["link_gb_per_s"] + tier_of["link_latency_s"]
    delay_s = token_s * tokens / tensor + pipeline * send_s * answer
    capacity = problem.utilization * SECONDS_PER_HOUR * tier_of["tflops"] * gpus
    load = gflop * tokens * per_hour / _GFLOP_PER_TFLOP / capacity
    if problem.decisions.kv_memory == "littles_law":
        in_flight = per_hour / SECONDS_PER_HOUR * delay_s
    else:
        # T_res = r beta / BW: the time in which one request's cache is read once.
        in_flight = tokens * kv_gb / tier_of["bandwidth_gb_per_s"]
    cache = kv_gb * tokens / gpus * in_flight / free
    names = (model, tier, tensor, pipeline)
    return _Columns(number, names, rent, delay_s, token_s * prompt / tensor, load, cache)


def _estimated(problem: AllocationProblem, prune: bool) -> _Columns:
    """Columns of the configurations whose delays and capacities are given."""
    rent = problem.horizon_hours * np.array([c.usd_per_hour for c in problem.configurations])
    keep = _affordable(problem, rent) if prune else np.ones(len(rent), dtype=bool)
    given = [c for c, kept in zip(problem.configurations, keep.tolist(), strict=True) if kept]
    names = np.array(
        [(c.model, c.tier, c.tensor_parallel, c.pipeline_parallel) for c in given], dtype=np.int64
    ).reshape(-1, 4)
    model, tier, tensor, pipeline = names.T
    shape = (len(given), len(problem.query_types))
    per_hour = np.array([q.requests_per_hour for q in problem.query_types])[:, None]
    load = per_hour / np.array([c.capacity_per_hour for c in given]).reshape(shape).T
    delay_s = np.array([c.delay_s for c in given]).reshape(shape).T
    ttft_s = np.array([c.ttft_s for c in given]).reshape(shape).T
    # Their capacities count with the KV cache already.
    none = np.zeros_like(load)
    return _Columns(np.flatnonzero(keep), (model, tier, tensor, pipeline), rent[keep], delay_s, ttft_s, load, none)


def _most(
    problem: AllocationProblem,
    delay: FloatArray,
    error: FloatArray,
    ttft: FloatArray | None,
    load: FloatArray,
    cache: FloatArray,
) -> FloatArray:
    """(I, O) the largest fraction of a type that one replica can serve."""
    most = np.minimum.reduce([np.ones_like(load), 1 / np.maximum(load, 1e-300), 1 / np.maximum(cache, 1e-300)])
    kinds = [delay, error] if ttft is None else [delay, error, ttft]
    each = [problem.decisions.delay == "each", False, problem.decisions.delay == "each"]
    for shares, alone in zip(kinds, each, strict=False):
        if alone:
            most = np.where(shares <= 1 + SLACK, most, 0.0)
        elif problem.decisions.slo_on == "all":
            most = np.minimum(most, 1 / np.maximum(shares, 1e-300))
        elif shares.size:
            # What is too slow is made up for by the fastest, of which there is the rest.
            least = shares.min(axis=1, keepdims=True)
            with np.errstate(divide="ignore", invalid="ignore"):
                mixed = np.where(shares > 1, (1 - least) / (shares - least), 1.0)
            most = np.minimum(most, np.clip(mixed, 0.0, 1.0))
    return np.where(most > 1e-6, most, 0.0)
