"""What a certificate of kind ``layer_rate`` proves, computed again from its weights.

A stage that spends p seconds in prefill and d in decode belongs to a pipeline of at most
b / (p + d) requests per second, since the pipeline waits for its slowest prefill and its slowest
decode. So with r(o, k) = the least (prefill + decode) / b of one layer of kind k on option o (machine,
tensor-parallel degree) over the batches b that fit, a group of GPUs passes at most
max_k w_k / r(o, k) weighted layers per second, whatever layers it holds, and a request needs
sum_k N_k w_k of them. Sends, engine steps, embedding and head only add time, and leaving them out
keeps the bound a bound.

Two things limit b. A stage of option o that holds a layer of kind k holds no larger batch than a stage of
that layer alone. And every stage of a pipeline keeps at least b sequences, so at b the machines of the
whole cluster together must have room for the model's layers once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.catalog.hardware import InstanceType
from hetplan.catalog.model import Attention, ModelSpec
from hetplan.estimator.base import Estimator
from hetplan.plan import StageMemory
from hetplan.problem.placement import PlacementProblem

_MOST_GPUS = 64
_ROLES = ((False, False), (True, False), (False, True), (True, True))


@dataclass(frozen=True, slots=True)
class Proven:
    """What a certificate proves.

    Attributes
    ----------
    bound : float
        In the objective's unit.
    why : str
        By what it is proven or, where it does not hold, what contradicts the certificate.
    """

    bound: float
    why: str
    holds: bool


def degree_allowed(attention: Attention, tensor_parallel: int) -> bool:
    """True when the heads divide over the GPUs, and the KV heads divide or replicate.

    An MLA latent always replicates, the key heads of linear attention never; a layer without attention allows all.
    """
    if attention.kind == "none":
        return tensor_parallel >= 1
    if tensor_parallel < 1 or attention.heads % tensor_parallel != 0:
        return False
    if attention.kind == "mla":
        return True
    if attention.kind == "linear":
        return attention.kv_heads % tensor_parallel == 0
    return attention.kv_heads % tensor_parallel == 0 or tensor_parallel % attention.kv_heads == 0


def allowed_degrees(model: ModelSpec, machine: InstanceType) -> list[int]:
    """Degrees within one machine that every layer of the model allows."""
    # A damaged plan may state any number of GPUs; a machine has at most so many.
    most = min(machine.gpu_count, _MOST_GPUS)
    return [
        degree
        for degree in range(1, most + 1)
        if all(degree_allowed(kind.attention, degree) for kind in model.layer_kinds)
    ]


def covered_degrees(model: ModelSpec, machine: InstanceType) -> list[int]:
    """Degrees that certificates speak of: those that also divide the machine's GPUs."""
    return [degree for degree in allowed_degrees(model, machine) if machine.gpu_count % degree == 0]


def layer_rate_bound(problem: PlacementProblem, estimator: Estimator, kind_weights: Sequence[float]) -> float:
    """The bound on the problem's objective that ``kind_weights`` prove.

    Parameters
    ----------
    problem : PlacementProblem
        Objective "throughput" or "throughput_per_cost" (an upper bound follows) or "cost" (a lower bound).
    estimator : Estimator
        The problem's own.
    kind_weights : sequence of float
        One non-negative weight for each of the model's layer kinds.

    Returns
    -------
    float
        In the objective's unit; infinite when the weights prove nothing, or when no fleet can serve the demand.

    Raises
    ------
    ValueError
        If the weights do not match the model's kinds, are negative or not finite, or weigh no layer of it.

    Notes
    -----
    A bound over a larger range of batches is looser, and just as true.
    """
    model = problem.model
    counts = [model.layer_pattern.count(kind) for kind in range(len(model.layer_kinds))]
    if len(kind_weights) != len(counts):
        raise ValueError(f"{len(kind_weights)} weights for {len(counts)} kinds of layers")
    if not all(math.isfinite(weight) and weight >= 0 for weight in kind_weights):
        raise ValueError(f"weights must be finite and non-negative, got {list(kind_weights)}")
    demanded = _weighted(counts, kind_weights)
    if demanded <= 0:
        raise ValueError("no layer of the model has a positive weight")

    machines = {machine.name: machine for machine in problem.cluster.instance_types}
    used = {pool.offer.instance_type: machines[pool.offer.instance_type] for pool in problem.cluster.pools}
    limit = _largest_pipeline_batch(problem, estimator, used)
    rates = {
        name: _machine_rate(problem, estimator, machine, kind_weights, limit) / demanded
        for name, machine in used.items()
    }
    offered = [
        (rates[pool.offer.instance_type], pool.offer.billed_usd_per_hour, pool.count) for pool in problem.cluster.pools
    ]
    if problem.objective == "throughput":
        return math.fsum(count * rate for rate, _, count in offered)
    if problem.objective == "throughput_per_cost":
        return max((rate / price if price > 0 else math.inf) for rate, price, _ in offered)
    return _least_cost(offered, problem.workload.requests_per_s or 0.0)


def _weighted(counts: Sequence[int], weights: Sequence[float]) -> float:
    return math.fsum(count * weight for count, weight in zip(counts, weights, strict=True))


def _least_cost(offered: Sequence[tuple[float, float, int]], demand: float) -> float:
    """$/h of the cheapest fractions of machines (rate, price, count) that reach the demand."""
    useful = [machine for machine in offered if machine[0] > 0]
    missing, cost = demand, 0.0
    for rate, price, count in sorted(useful, key=lambda machine: machine[1] / machine[0]):
        if missing <= rate * count:
            return cost + price * missing / rate
        cost += price * count
        missing -= rate * count
    return cost if missing <= 0 else math.inf


def _best_split(gpu_count: int, worth: Mapping[int, float]) -> float:
    """The most that groups of the given sizes are worth together on ``gpu_count`` GPUs."""
    best = [0.0] * (gpu_count + 1)
    for gpus in range(1, gpu_count + 1):
        best[gpus] = max([best[gpus - 1], *(each + best[gpus - size] for size, each in worth.items() if size <= gpus)])
    return best[-1]


def _machine_rate(
    problem: PlacementProblem,
    estimator: Estimator,
    machine: InstanceType,
    kind_weights: Sequence[float],
    limit: int,
) -> float:
    """Weighted layers per second of a machine whose GPUs are split into groups in the best way."""
    rates = {}
    for degree in covered_degrees(problem.model, machine):
        by_kind = [0.0]
        for kind, layer in _first_layers(problem.model).items():
            most = min(limit, _largest_batch(problem, estimator, machine, degree, layer))
            if most >= 1:
                least = _least_seconds_per_request(problem, estimator, machine, degree, layer, most)
                by_kind.append(kind_weights[kind] / least)
        rates[degree] = max(by_kind)
    return _best_split(machine.gpu_count, rates)


def _first_layers(model: ModelSpec) -> dict[int, int]:
    """For each kind of layer in the model, the first layer of it."""
    return {kind: model.layer_pattern.index(kind) for kind in sorted(set(model.layer_pattern))}


@dataclass(frozen=True, slots=True)
class _Room:
    """Bytes of a group's GPU between the ends of a pipeline: in all, per sequence, and for each kind of layer."""

    total: int
    per_sequence: float
    weights: tuple[int, ...]
    cached_per_sequence: tuple[float, ...]

    def layer_costs(self, batch: int) -> list[float]:
        """Bytes of one layer of each kind with the KV cache of ``batch`` sequences."""
        return [w + batch * cached for w, cached in zip(self.weights, self.cached_per_sequence, strict=True)]

    def held(self, batch: int, values: Sequence[float]) -> float:
        """The most that layers on this group are worth together, at a value for each kind."""
        # The slack is for rounding: a stage that fits exactly must not be ruled out.
        room = max(0.0, self.total - batch * self.per_sequence) * (1 + 1e-12)
        costs = self.layer_costs(batch)
        if len(costs) == 1:
            return values[0] * math.floor(room / costs[0])
        return room * max(value / cost for value, cost in zip(values, costs, strict=True))


def _largest_pipeline_batch(
    problem: PlacementProblem, estimator: Estimator, machines: Mapping[str, InstanceType]
) -> int:
    """The largest batch at which the cluster's machines have room for all layers of the model.

    Whatever layers are valued at, those of the model are worth no more than all that the groups can hold. Values in
    proportion to the bytes on one of the options say most.
    """
    model = problem.model
    counts = [model.layer_pattern.count(kind) for kind in _first_layers(model)]
    rooms = {
        name: {degree: _room(problem, estimator, machine, degree) for degree in covered_degrees(model, machine)}
        for name, machine in machines.items()
    }
    options = [room for by_degree in rooms.values() for room in by_degree.values()]

    def fits(batch: int) -> bool:
        scales = [option.layer_costs(batch) for option in options] if len(counts) > 1 else [[1.0]]
        return all(worth_held(batch, values) >= _weighted(counts, values) for values in scales)

    def worth_held(batch: int, values: Sequence[float]) -> float:
        held = {
            name: _best_split(machines[name].gpu_count, {d: room.held(batch, values) for d, room in by_degree.items()})
            for name, by_degree in rooms.items()
        }
        return math.fsum(pool.count * held[pool.offer.instance_type] for pool in problem.cluster.pools)

    low, high = 0, max(estimator.batch_limit(machine) for machine in machines.values())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _room(problem: PlacementProblem, estimator: Estimator, machine: InstanceType, degree: int) -> _Room:
    work = problem.workload

    def bytes_of(layers: tuple[int, int]) -> tuple[StageMemory, float]:
        memory = estimator.stage_memory(
            problem.model, machine, layers=layers, tensor_parallel=degree, first=False, last=False
        )
        sequence = estimator.sequence_bytes(
            problem.model,
            machine,
            layers=layers,
            tensor_parallel=degree,
            tokens=work.mean_input_tokens + work.mean_output_tokens,
            input_tokens=work.mean_prefill_tokens,
            last=False,
        )
        return memory, sequence

    empty, per_sequence = bytes_of((0, 0))
    single = [bytes_of((layer, layer + 1)) for layer in _first_layers(problem.model).values()]
    return _Room(
        total=empty.kv_cache_bytes,
        per_sequence=per_sequence,
        weights=tuple(empty.kv_cache_bytes - memory.kv_cache_bytes for memory, _ in single),
        cached_per_sequence=tuple(longer - per_sequence for _, longer in single),
    )


def _largest_batch(
    problem: PlacementProblem, estimator: Estimator, machine: InstanceType, degree: int, layer: int
) -> int:
    """Sequences that a stage of one layer holds in the role that leaves most room; more layers hold fewer."""
    work, model = problem.workload, problem.model
    layers = (layer, layer + 1)
    most = 0
    for first, last in _ROLES:
        memory = estimator.stage_memory(model, machine, layers=layers, tensor_parallel=degree, first=first, last=last)
        one = estimator.sequence_bytes(
            model,
            machine,
            layers=layers,
            tensor_parallel=degree,
            tokens=work.mean_input_tokens + work.mean_output_tokens,
            input_tokens=work.mean_prefill_tokens,
            last=last,
        )
        # A layer without attention keeps nothing for a sequence.
        most = max(most, int(memory.kv_cache_bytes // one) if one > 0 else estimator.batch_limit(machine))
    return min(most, estimator.batch_limit(machine))


def _least_seconds_per_request(
    problem: PlacementProblem, estimator: Estimator, machine: InstanceType, degree: int, layer: int, most: int
) -> float:
    """Seconds of both phases in one layer, per request, at the best batch of 1 to ``most``."""
    work = problem.workload
    batches = np.arange(1, most + 1, dtype=np.float64)
    seconds = np.zeros_like(batches)
    for phase, prompt in (("prefill", work.mean_prefill_tokens), ("decode", work.mean_input_tokens)):
        with_layer, without = estimator.stage_seconds(
            problem.model,
            machine,
            layers=np.array([(layer, layer + 1), (layer, layer)]),
            tensor_parallel=degree,
            batch=batches,
            input_tokens=prompt,
            output_tokens=work.mean_output_tokens,
            first=False,
            last=False,
            phase="prefill" if phase == "prefill" else "decode",
        )
        seconds += with_layer - without
    return float(np.min(seconds / batches))
