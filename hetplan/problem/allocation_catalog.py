"""Allocation problems from catalogued models and machines, with delays and capacities by an estimator."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hetplan.catalog.clusters import ClusterLike, resolve_cluster
from hetplan.catalog.hardware import InstanceType
from hetplan.catalog.model import ModelSpec
from hetplan.catalog.offers import Cluster, Market, Pool
from hetplan.errors import InfeasibleError, InvalidInputError, Reason, nearest_names
from hetplan.problem.allocation import (
    AllocationProblem,
    Configuration,
    Decisions,
    DecisionsName,
    QueryDemand,
    ServedModel,
    Tier,
)
from hetplan.units import GB, GIB, KB

FloatArray = NDArray[np.float64]

ServedModelLike = ServedModel | ModelSpec | str | Path | Mapping[str, Any]

_BYTES_AT_16_BITS = 2
_FLOP_PER_PARAMETER = 2
_GIGA, _TERA = 1e9, 1e12


class ReplicaEstimator(Protocol):
    """What says how fast one replica is; `hetplan.estimator.allocation.estimate_replica` by default.

    For (I,) query types, each alone on the replica: mean delay (s) and time to first token (s) at the utilisation, and
    the requests per hour of a replica that is kept full. None where not even one request of each fits.
    """

    def __call__(
        self,
        model: ModelSpec,
        machine: InstanceType,
        *,
        tensor_parallel: int,
        pipeline_parallel: int,
        input_tokens: FloatArray,
        output_tokens: FloatArray,
        utilization: float,
    ) -> tuple[FloatArray, FloatArray, FloatArray] | None: ...


def from_catalog(
    *,
    query_types: Sequence[QueryDemand | Mapping[str, Any]],
    models: Sequence[ServedModelLike],
    cluster: ClusterLike,
    estimator: ReplicaEstimator,
    budget_usd: float,
    utilization: float,
    tensor_parallel: Sequence[int],
    pipeline_parallel: Sequence[int],
    horizon_hours: float,
    storage_capacity_gb: float | None,
    storage_usd_per_gb_hour: float,
    decisions: DecisionsName | Decisions,
    region: str,
    market: Market,
    provider: str,
) -> AllocationProblem:
    """See `AllocationProblem.from_catalog`."""
    # A queue has a mean only below 1.
    if isinstance(utilization, bool) or not isinstance(utilization, (int, float)) or not 0 < utilization < 1:
        raise InvalidInputError(f"utilization is {utilization!r}; a number above 0 and below 1 is needed")
    served, aliases = _models(models)
    queries = [_query(n, query, served, aliases) for n, query in enumerate(query_types)]
    if not queries:
        raise InvalidInputError("query_types is empty; give at least one")
    machines = resolve_cluster(cluster, region=region, market=market, provider=provider)
    tiers = _tiers(machines)
    found: list[Configuration] = []
    for m, model in enumerate(served):
        for t, (tier, pool) in enumerate(zip(tiers, machines.pools, strict=True)):
            degrees = [(n, s) for n in tensor_parallel for s in pipeline_parallel]
            for n, s in degrees:
                one = _configuration(m, t, model, tier, pool, (n, s), queries, estimator, utilization)
                if one is not None:
                    found.append(one)
    if not found:
        raise _nothing_fits(served, machines)
    traffic_gb = math.fsum(q.storage_kb_per_token * KB / GB * q.tokens * q.requests_per_hour for q in queries)
    weights_gb = math.fsum(model.weight_gb for model in served) * len(tiers) * len(queries)
    return AllocationProblem(
        query_types=tuple(queries),
        models=tuple(served),
        tiers=tuple(tiers),
        tensor_parallel=tuple(tensor_parallel),
        pipeline_parallel=tuple(pipeline_parallel),
        horizon_hours=horizon_hours,
        budget_usd=budget_usd,
        storage_capacity_gb=traffic_gb + weights_gb if storage_capacity_gb is None else storage_capacity_gb,
        storage_usd_per_gb_hour=storage_usd_per_gb_hour,
        utilization=utilization,
        decisions=decisions,
        configurations=tuple(found),
    )


# ---- models and query types


def _models(given: Sequence[ServedModelLike]) -> tuple[list[ServedModel], dict[str, str]]:
    """The models with their specs, and every name that errors may be keyed by."""
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence) or not given:
        raise InvalidInputError(f"models is a list such as ['llama-3.1-8b'], got {given!r}")
    served, aliases = [], {}
    for one in given:
        model = one if isinstance(one, ServedModel) else _served(one)
        if model.spec is None:
            raise InvalidInputError(
                f"model {model.name!r} has no spec, and its delays can't be estimated; give a catalogued name, or list "
                "configurations with own delays"
            )
        served.append(model)
        aliases[model.name] = model.name
        if isinstance(one, str):
            aliases[one] = model.name
    return served, aliases


def _served(given: ModelSpec | str | Path | Mapping[str, Any]) -> ServedModel:
    if isinstance(given, ModelSpec):
        spec = given
    elif isinstance(given, str):
        spec = ModelSpec.get(given)
    elif isinstance(given, (Path, Mapping)):
        spec = ModelSpec.from_config(given)
    else:
        raise InvalidInputError(f"a model is a name, a path, a configuration or a ModelSpec, got {given!r}")
    return ServedModel(
        name=spec.name,
        weight_gb=spec.parameter_count * _BYTES_AT_16_BITS / GB,
        kv_bytes_per_token=spec.kv_bytes_per_token(),
        gflop_per_token=_FLOP_PER_PARAMETER * spec.active_parameter_count / _GIGA,
        activation_bytes_per_token=spec.hidden_size * _BYTES_AT_16_BITS,
        layers=spec.layer_count,
        spec=spec,
    )


def _query(
    number: int, given: QueryDemand | Mapping[str, Any], served: Sequence[ServedModel], aliases: Mapping[str, str]
) -> QueryDemand:
    if isinstance(given, QueryDemand):
        return given
    where = f"query_types[{number}]"
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"{where} is a mapping or a QueryDemand, got {given!r}")
    where = f"query type {given['name']!r}" if "name" in given else where
    errors = given.get("errors")
    if not isinstance(errors, Mapping):
        if errors is None:
            raise InvalidInputError(
                f"{where} has no errors: its error rate on each model can't be read from a configuration. Give them, "
                f"such as errors: {{{served[0].name}: 0.03}}"
            )
        return QueryDemand.from_dict(dict(given))
    by_name: dict[str, Any] = {}
    for name, rate in errors.items():
        if name not in aliases:
            near = ", ".join(nearest_names(str(name), aliases)) or ", ".join(aliases)
            raise InvalidInputError(f"{where}: errors names {name!r}, which is not among the models. Nearest: {near}")
        by_name[aliases[name]] = rate
    missing = [model.name for model in served if model.name not in by_name]
    if missing:
        raise InvalidInputError(f"{where}: errors lacks {', '.join(missing)}; give one for each model")
    return QueryDemand.from_dict({**given, "errors": tuple(by_name[model.name] for model in served)})


# ---- machines and configurations


def _tiers(machines: Cluster) -> list[Tier]:
    """One for each pool, called after its machine, or after its offer where several pools have that machine."""
    types = [pool.offer.instance_type for pool in machines.pools]
    tiers = []
    for pool in machines.pools:
        offer, machine = pool.offer, machines.instance_type(pool.offer.instance_type)
        gpu = machine.gpu
        if offer.price_usd_per_hour is None:
            raise InvalidInputError(
                f"{offer.name} has no price, and an allocation weighs rents; give price_usd_per_hour, such as what the "
                "machine costs you in power and write-off"
            )
        sixteen = gpu.runs_as("bf16")
        tier = {
            "name": offer.name if types.count(offer.instance_type) > 1 else offer.instance_type,
            "gpu": gpu.name,
            "weight_dtype": sixteen,
            "memory_gb": gpu.memory_bytes / GB,
            "bandwidth_gb_per_s": gpu.bandwidth_bytes_per_s / GB,
            "tflops": gpu.dense_flops[sixteen] / _TERA,
            "usd_per_hour": offer.price_usd_per_hour / machine.gpu_count,
            "instance_type": machine,
            "offer": offer,
        }
        link = machine.pair_link if machine.gpu_count > 1 else machine.inter_node_link
        tiers.append(Tier(**tier, link_gb_per_s=link.bytes_per_s / GB, link_latency_s=link.latency_s))
    return tiers


def _configuration(
    m: int,
    t: int,
    model: ServedModel,
    tier: Tier,
    pool: Pool,
    degrees: tuple[int, int],
    queries: Sequence[QueryDemand],
    estimator: ReplicaEstimator,
    utilization: float,
) -> Configuration | None:
    """A model on a tier with its degrees; None where they don't fit the model, the machine or the machines at hand."""
    (tensor, stages), machine, spec = degrees, tier.instance_type, model.spec
    if machine is None or spec is None or tier.offer is None:
        return None
    if tensor not in machine.valid_tensor_parallel(spec) or stages > spec.layer_count:
        return None
    count = -(-tensor * stages // machine.gpu_count)
    if count > pool.count:
        return None
    estimated = estimator(
        spec,
        machine,
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        input_tokens=np.array([q.input_tokens for q in queries], dtype=np.float64),
        output_tokens=np.array([q.output_tokens for q in queries], dtype=np.float64),
        utilization=utilization,
    )
    if estimated is None:
        return None
    delay_s, ttft_s, per_hour = (np.asarray(values, dtype=np.float64) for values in estimated)
    slowness = np.array([q.slowness for q in queries])
    return Configuration(
        model=m,
        tier=t,
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        machines=count,
        usd_per_hour=count * tier.offer.billed_usd_per_hour,
        delay_s=tuple((slowness * delay_s).tolist()),
        ttft_s=tuple((slowness * ttft_s).tolist()),
        # What may be planned with: the delays hold up to there and no further.
        capacity_per_hour=tuple((utilization * per_hour).tolist()),
    )


def _nothing_fits(served: Sequence[ServedModel], machines: Cluster) -> InfeasibleError:
    least = min(served, key=lambda model: model.weight_gb)
    gpus = {t.gpu.name: t.gpu.memory_bytes for t in machines.instance_types}
    largest = max(gpus, key=lambda name: gpus[name])
    needed, available = least.weight_gb * GB / GIB, gpus[largest] / GIB
    return InfeasibleError(
        f"no model fits any machine at the degrees given: the smallest, {least.name}, has {needed:.1f} GiB of weights "
        f"at 16 bits, and the largest GPU, {largest}, {available:.1f} GiB. Add machines or degrees, or shorten the "
        "longest query type",
        [Reason("memory", least.name, needed, available, "GiB")],
    )
