"""A bound on every plan that needs no search, and the proofs that none exists.

Layer rate. A stage with option o at batch b in a pipeline of throughput T satisfies
T * sum_k n_k t_ok(b) / b <= 1, because a pipeline is no faster than its slowest stage; t_ok is the
time of both phases of a layer of kind k. With r_ok = min over b of t_ok(b) / b and any weights w_k >= 0,
T * sum_k n_k w_k <= max_k w_k / r_ok. Summed over the stages of all pipelines, total throughput is at
most the sum over machines of their best split into groups, divided by sum_k N_k w_k. The weights
are taken from each option in turn; the smallest bound wins and its weights are the certificate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetplan.errors import InfeasibleError, Reason
from hetplan.estimator.base import Estimator, FloatArray
from hetplan.plan import Certificate
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.placement.tables import FIRST, LAST, StageTables, build_tables, stage_options
from hetplan.units import GIB, format_bytes


@dataclass(frozen=True, slots=True)
class Bound:
    """A proven bound on the objective, and what a checker needs to confirm it."""

    value: float
    certificate: Certificate


def layer_rate_bound(problem: PlacementProblem, estimator: Estimator) -> Bound:
    """The layer-rate bound on the problem's objective: an upper one, or a lower one for costs.

    Raises
    ------
    InfeasibleError
        For objective "cost", if even the bound serves less than the demand.
    """
    pools = list(range(len(problem.cluster.pools)))
    tables = build_tables(problem, estimator, stage_options(problem, pools, whole_nodes=False))
    throughput, weights, rates = machine_rates(problem, tables)
    certificate = Certificate(kind="layer_rate", kind_weights=tuple(float(w) for w in weights))
    if problem.objective == "throughput_per_cost":
        ratios = [
            rate / pool.offer.billed_usd_per_hour for rate, pool in zip(rates, problem.cluster.pools, strict=True)
        ]
        return Bound(max(ratios), certificate)
    if problem.objective == "cost":
        return Bound(_least_cost(problem, rates, throughput), certificate)
    return Bound(throughput, certificate)


def machine_rates(problem: PlacementProblem, tables: StageTables) -> tuple[float, FloatArray, list[float]]:
    """Requests/s of all machines together at most, the weights of kinds that prove it, and each machine's share.

    Raises
    ------
    InfeasibleError
        If no tensor-parallel degree fits.
    """
    counts = np.asarray(problem.model.kind_counts, dtype=np.float64)
    seconds = _seconds_per_request(tables)
    best: tuple[float, FloatArray, list[float]] | None = None
    for weights in seconds:
        rates = _pool_rates(problem, tables, seconds, weights)
        total = sum(pool.count * rate for pool, rate in zip(problem.cluster.pools, rates, strict=True))
        throughput = total / float(counts @ weights)
        if best is None or throughput < best[0]:
            best = (throughput, weights, rates)
    if best is None:
        raise _no_degree(problem)
    throughput, weights, rates = best
    per_request = float(counts @ weights)
    return throughput, weights, [rate / per_request for rate in rates]


def _seconds_per_request(tables: StageTables) -> FloatArray:
    """(O, K) least seconds per request in flight of one layer, over all batches: r_ok."""
    batches = np.arange(1, tables.max_batch + 1)
    both = tables.layer_s[:, 0, :, 1:] + tables.layer_s[:, 1, :, 1:]
    return np.asarray((both / batches).min(axis=-1))


def _pool_rates(
    problem: PlacementProblem, tables: StageTables, seconds: FloatArray, weights: FloatArray
) -> list[float]:
    """Weighted layers per second of one machine of each pool, split into its best groups."""
    option_rates = (weights / seconds).max(axis=1)
    rates = []
    for index in range(len(problem.cluster.pools)):
        mine = [o for o, option in enumerate(tables.options) if option.pool == index]
        if not mine:
            rates.append(0.0)
            continue
        gpus = tables.options[mine[0]].machine.gpu_count
        best = [0.0] * (gpus + 1)
        for used in range(1, gpus + 1):
            for o in mine:
                degree = tables.options[o].degree
                if degree <= used:
                    best[used] = max(best[used], best[used - degree] + float(option_rates[o]))
        rates.append(max(best))
    return rates


def _least_cost(problem: PlacementProblem, machine_rates: list[float], throughput: float) -> float:
    """Fractional knapsack: machines by price per request until the demand is met."""
    wanted = problem.workload.requests_per_s or 0.0
    if throughput < wanted:
        reason = Reason("demand", problem.model.name, wanted, throughput, "req/s")
        raise InfeasibleError(
            f"{problem.model.name} is asked for {wanted:g} req/s; this cluster serves at most {throughput:.4g}. "
            "Add machines or lower requests_per_s",
            [reason],
        )
    offers = sorted(
        (pool.offer.billed_usd_per_hour / rate, pool.count * rate)
        for pool, rate in zip(problem.cluster.pools, machine_rates, strict=True)
        if rate > 0
    )
    cost = 0.0
    for usd_per_request, most in offers:
        served = min(wanted, most)
        cost += served * usd_per_request
        wanted -= served
        if wanted <= 0:
            break
    return cost


def _no_degree(problem: PlacementProblem) -> InfeasibleError:
    model = problem.model
    nodes = ", ".join(f"{t.name} ({t.gpu_count} GPUs)" for t in problem.cluster.instance_types)
    degrees = model.valid_tensor_parallel(64)
    return InfeasibleError(
        f"{model.name} runs at tensor-parallel degrees {degrees}; none fits {nodes}",
        [Reason("tensor_parallel", model.name, min(degrees), 0, "GPUs")],
    )


def refuse_infeasible(problem: PlacementProblem, estimator: Estimator) -> None:
    """Raise `InfeasibleError` where memory or a hard latency limit rules every plan out; else return."""
    pools = list(range(len(problem.cluster.pools)))
    tables = build_tables(problem, estimator, stage_options(problem, pools, whole_nodes=False))
    if not tables.options:
        raise _no_degree(problem)
    _refuse_by_memory(problem, tables)
    if problem.slo is not None and problem.slo.hard:
        _refuse_by_latency(problem, estimator, tables)


def _refuse_by_memory(problem: PlacementProblem, tables: StageTables) -> None:
    """A plan needs, in one region or in regions that zone links join, room for all weights and the longest request."""
    model = problem.model
    counts = np.asarray(model.kind_counts)
    degrees = np.array([option.degree for option in tables.options])
    # What the ends take of some group: the embedding of one, the head and the sampler of another, or both of one.
    taken = (tables.room_bytes[:, :1] - tables.room_bytes) * degrees[:, np.newaxis]
    ends = float(min(taken[:, FIRST].min() + taken[:, LAST].min(), taken[:, FIRST | LAST].min()))
    group_of = {index: number for number, group in enumerate(problem.cluster.pool_groups()) for index in group}
    room: dict[int, float] = {}
    layers: dict[int, int] = {}
    # Per GPU of the group times the group: replicated parts make larger groups need more, never less.
    needed_each = (tables.weight_bytes + tables.longest_bytes) * degrees[:, None]
    needed = float((needed_each.min(axis=0) * counts).sum()) + max(ends, 0.0)
    for index, pool in enumerate(problem.cluster.pools):
        mine = [o for o, option in enumerate(tables.options) if option.pool == index]
        if not mine:
            continue
        place = group_of[index]
        gpus = tables.options[mine[0]].machine.gpu_count
        per_gpu = max(int(tables.room_bytes[o, 0]) for o in mine)
        room[place] = room.get(place, 0.0) + pool.count * gpus * max(per_gpu, 0)
        smallest = (tables.weight_bytes + tables.longest_bytes).min(axis=1)
        held = max(int(max(tables.room_bytes[o, 0], 0) // smallest[o]) * (gpus // degrees[o]) for o in mine)
        layers[place] = layers.get(place, 0) + pool.count * held
    most = max(room.values(), default=0.0)
    where = "the cluster" if len(room) == 1 else "the largest region"
    advice = _advice(problem, needed, most)
    if needed > most:
        short = needed - most
        if len(room) > 1 and sum(room.values()) >= needed:
            advice = f"join regions by zone_links, or {advice}"
        raise InfeasibleError(
            f"{model.name} needs {format_bytes(needed)} in {model.weight_dtype} with one request of "
            f"{problem.longest_request_tokens:,} tokens; {where} has {format_bytes(most)} for it. "
            f"Add {format_bytes(short)}, or {advice}",
            [Reason("memory", model.name, needed / GIB, most / GIB, "GiB")],
        )
    fits = max(layers.values(), default=0)
    if fits < model.layer_count:
        raise InfeasibleError(
            f"{model.name} has {model.layer_count} layers; the GPUs of {where} hold {fits} whole ones with one request "
            f"of {problem.longest_request_tokens:,} tokens. Add machines, or {advice}",
            [
                Reason("memory", model.name, needed / GIB, needed / GIB * fits / model.layer_count, "GiB"),
                Reason("layers", model.name, model.layer_count, fits, "layers"),
            ],
        )


def _advice(problem: PlacementProblem, needed: float, most: float) -> str:
    """The way out besides more machines: fp8 where it would be enough, else a smaller model or shorter requests."""
    model = problem.model
    if model.quantization is None:
        saved = model.computed_weight_bytes - model.with_dtypes(weight_dtype="fp8").computed_weight_bytes
        if needed - saved <= most:
            return "use weight_dtype='fp8'"
    if problem.handover_sequences:
        return "keep less for a second engine: lower handover_sequences or handover_layers"
    return "use a smaller model" if problem.max_model_len is None else "lower max_model_len, or use a smaller model"


def _refuse_by_latency(problem: PlacementProblem, estimator: Estimator, tables: StageTables) -> None:
    """No plan is faster than every layer on its fastest option at its fastest batch, without sends or ends."""
    if not estimator.micro_batches or problem.slo is None:
        return
    counts = np.asarray(problem.model.kind_counts, dtype=np.float64)
    both, alone = _both_and_alone(tables.layer_s.swapaxes(1, 2))
    least = {"e2e_s": float(both.min(axis=(0, 2)) @ counts), "ttft_s": float(alone.min(axis=0) @ counts)}
    steps = estimator.decode_steps(problem.workload.mean_output_tokens)
    if steps == 0:
        least["ttft_s"] = least["e2e_s"]
    rests = [_both_and_alone(table) for table in (tables.end_s, tables.send_s)]
    if steps > 0 and all(bool((b >= a[..., np.newaxis]).all()) for b, a in rests):
        after_first = (both - alone[..., np.newaxis]).min(axis=(0, 2))
        least["tpot_s"] = float(after_first @ counts) / steps
    broken = [(name, limit, least[name]) for name, limit in problem.slo.limits().items() if least.get(name, 0) > limit]
    if broken:
        said = "; ".join(f"{name} <= {limit:g} s, at least {value:.4g} s" for name, limit, value in broken)
        raise InfeasibleError(
            f"no plan keeps the hard limit on this cluster: {said}. Relax it, or add faster GPUs",
            [Reason(name, problem.model.name, value, limit, "s") for name, limit, value in broken],
        )


def _both_and_alone(seconds: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Over (..., 2, B): (..., B) both phases of a micro-batch, and (...) the prefill of one sequence alone."""
    return seconds[..., 0, 1:] + seconds[..., 1, 1:], seconds[..., 0, 1]
