"""Allocation problems, their plans and bounds, from the definition and one term at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from hetplan.plan import (
    Certificate,
    Deployment,
    Pipeline,
    PipelinePredictions,
    Plan,
    Prediction,
    Provenance,
    Route,
    RowPrices,
    Stage,
)
from hetplan.problem.allocation import AllocationProblem, Configuration


class Key(NamedTuple):
    """A configuration."""

    model: int
    tier: int
    n: int
    m: int


Counts = Mapping[Key, int]
Shares = Mapping[tuple[int, Key], float]


def keys(problem: AllocationProblem) -> list[Key]:
    if problem.configurations:
        return [Key(c.model, c.tier, c.tensor_parallel, c.pipeline_parallel) for c in problem.configurations]
    ranges = (range(len(problem.models)), range(len(problem.tiers)))
    return [Key(*each) for each in product(*ranges, problem.tensor_parallel, problem.pipeline_parallel)]


def given(problem: AllocationProblem, key: Key) -> Configuration | None:
    for number, one in enumerate(keys(problem)):
        if one == key and problem.configurations:
            return problem.configurations[number]
    return None


# ---- the terms


def usd_per_hour(problem: AllocationProblem, key: Key) -> float:
    listed = given(problem, key)
    return key.n * key.m * problem.tiers[key.tier].usd_per_hour if listed is None else listed.usd_per_hour


def delay_s(problem: AllocationProblem, i: int, key: Key) -> float:
    listed = given(problem, key)
    if listed is not None:
        return listed.delay_s[i]
    query, model, tier = problem.query_types[i], problem.models[key.model], problem.tiers[key.tier]
    computed = query.slowness * model.weight_gb * tier.weight_scale / tier.bandwidth_gb_per_s
    sent = model.activation_bytes_per_token / 1e9 / tier.link_gb_per_s + tier.link_latency_s
    return computed * (query.input_tokens + query.output_tokens) / key.n + key.m * sent * query.output_tokens


def ttft_s(problem: AllocationProblem, i: int, key: Key) -> float:
    listed = given(problem, key)
    if listed is not None:
        return listed.ttft_s[i]
    query, model, tier = problem.query_types[i], problem.models[key.model], problem.tiers[key.tier]
    return query.slowness * model.weight_gb * tier.weight_scale / tier.bandwidth_gb_per_s * query.input_tokens / key.n


def error(problem: AllocationProblem, i: int, key: Key) -> float:
    return problem.query_types[i].errors[key.model] * problem.tiers[key.tier].error_factor


def busy_replicas(problem: AllocationProblem, i: int, key: Key) -> float:
    query, model, tier = problem.query_types[i], problem.models[key.model], problem.tiers[key.tier]
    listed = given(problem, key)
    if listed is not None:
        return query.requests_per_hour / listed.capacity_per_hour[i]
    asked = model.gflop_per_token * query.tokens * query.requests_per_hour / 1000
    return asked / (problem.utilization * 3600 * tier.tflops * key.n * key.m)


def weight_share_gb(problem: AllocationProblem, key: Key) -> float:
    tier = problem.tiers[key.tier]
    scale = tier.weight_scale if problem.decisions.weights == "scaled" else 1.0
    return problem.models[key.model].weight_gb * scale / (key.n * key.m)


def cache_gb(problem: AllocationProblem, i: int, key: Key) -> float:
    query, model, tier = problem.query_types[i], problem.models[key.model], problem.tiers[key.tier]
    kv_gb = model.kv_bytes_per_token / 1e9
    if problem.decisions.kv_memory == "littles_law":
        in_flight = query.requests_per_hour / 3600 * delay_s(problem, i, key)
    else:
        in_flight = query.tokens * kv_gb / tier.bandwidth_gb_per_s
    return kv_gb * query.tokens / (key.n * key.m) * in_flight


def traffic_gb(problem: AllocationProblem, i: int) -> float:
    query = problem.query_types[i]
    return query.storage_kb_per_token * 1e3 / 1e9 * query.tokens * query.requests_per_hour


def times(problem: AllocationProblem, i: int) -> float:
    """How often a penalty is paid."""
    if problem.decisions.penalties == "per_horizon":
        return 1.0
    return problem.query_types[i].requests_per_hour * problem.horizon_hours


def delay_usd(problem: AllocationProblem, i: int, key: Key) -> float:
    return problem.query_types[i].delay_usd_per_ms * 1000 * delay_s(problem, i, key) * times(problem, i)


def storage_usd_per_gb(problem: AllocationProblem) -> float:
    return problem.horizon_hours * problem.storage_usd_per_gb_hour


def rent_usd(problem: AllocationProblem, key: Key) -> float:
    return usd_per_hour(problem, key) * problem.horizon_hours


def copy_usd_and_gb(problem: AllocationProblem, key: Key) -> tuple[float, float]:
    weight_gb = problem.models[key.model].weight_gb
    return weight_gb * storage_usd_per_gb(problem), weight_gb


def fits(problem: AllocationProblem, key: Key) -> bool:
    rent = usd_per_hour(problem, key) * problem.horizon_hours
    held = given(problem, key) is not None or weight_share_gb(problem, key) <= problem.tiers[key.tier].memory_gb
    return held and rent <= problem.budget_usd


def usable(problem: AllocationProblem, i: int, key: Key) -> bool:
    query = problem.query_types[i]
    if problem.decisions.delay == "average":
        return True
    late = query.ttft_limit_s is not None and ttft_s(problem, i, key) > query.ttft_limit_s
    return delay_s(problem, i, key) <= query.delay_limit_s and not late


# ---- the optimum


class Answer(NamedTuple):
    counts: dict[Key, int]
    shares: dict[tuple[int, Key], float]
    usd: float


def optimum(problem: AllocationProblem) -> Answer:
    """By a program of all choices as they are defined."""
    options, types = keys(problem), range(len(problem.query_types))
    pairs = sorted({(key.model, key.tier) for key in options})
    decisions = problem.decisions
    names: list[Any] = [("w", key) for key in options]
    names += [("x", i, key) for i in types for key in options]
    names += [("u", i) for i in types]
    stored = [(i, pair) for i in types for pair in pairs] if decisions.model_storage != "once" else pairs
    names += [("z", one) for one in stored]
    at = {name: number for number, name in enumerate(names)}
    most = {key: np.floor(problem.budget_usd / (usd_per_hour(problem, key) * problem.horizon_hours)) for key in options}
    upper, cost, rows = np.ones(len(names)), np.zeros(len(names)), list[tuple[dict[Any, float], float, float]]()
    spent: dict[Any, float] = {}
    kept: dict[Any, float] = {}
    for key in options:
        upper[at["w", key]] = 1 if decisions.replicas == "one" else most[key]
        spent["w", key] = usd_per_hour(problem, key) * problem.horizon_hours
        load = {("x", i, key): busy_replicas(problem, i, key) for i in types}
        rows.append((load | {("w", key): -1.0}, -np.inf, 0.0))
        if given(problem, key) is None:
            free = problem.tiers[key.tier].memory_gb - weight_share_gb(problem, key)
            held = {("x", i, key): cache_gb(problem, i, key) for i in types}
            rows.append((held | {("w", key): -free}, -np.inf, 0.0))
        pair = (key.model, key.tier)
        if decisions.model_storage == "once":
            rows.append(({("w", key): 1.0, ("z", pair): -max(most[key], 1.0)}, -np.inf, 0.0))
        for i in types:
            rows.append(({("x", i, key): 1.0, ("w", key): -1.0}, -np.inf, 0.0))
            if decisions.model_storage != "once":
                rows.append(({("x", i, key): 1.0, ("z", (i, pair)): -1.0}, -np.inf, 0.0))
            upper[at["x", i, key]] = usable(problem, i, key)
            spent["x", i, key] = traffic_gb(problem, i) * storage_usd_per_gb(problem)
            kept["x", i, key] = traffic_gb(problem, i)
            cost[at["x", i, key]] = delay_usd(problem, i, key)
    for one in stored:
        model = one[0] if decisions.model_storage == "once" else one[1][0]
        kept["z", one] = problem.models[model].weight_gb
        spent["z", one] = problem.models[model].weight_gb * storage_usd_per_gb(problem)
    for name, usd in spent.items():
        cost[at[name]] += usd
    for i, query in enumerate(problem.query_types):
        upper[at["u", i]] = query.max_unserved
        cost[at["u", i]] = query.unserved_usd * times(problem, i)
        rows.append(({("x", i, key): 1.0 for key in options} | {("u", i): 1.0}, 1.0, 1.0))
        served = {("u", i): 1.0} if decisions.slo_on == "served" else {}
        means = [(query.error_limit, error)]
        if decisions.delay == "average":
            means.append((query.delay_limit_s, delay_s))
            if query.ttft_limit_s is not None:
                means.append((query.ttft_limit_s, ttft_s))
        for limit, value in means:
            row: dict[Any, float] = {("x", i, key): value(problem, i, key) / limit for key in options}
            rows.append((row | served, -np.inf, 1.0))
    rows.append((spent, -np.inf, problem.budget_usd))
    rows.append((kept, -np.inf, problem.storage_capacity_gb))
    if decisions.replicas == "one":
        rows += [({("w", k): 1.0 for k in options if k[:2] == pair}, -np.inf, 1.0) for pair in pairs]
    matrix = np.zeros((len(rows), len(names)))
    for number, (entries, _, _) in enumerate(rows):
        for name, value in entries.items():
            matrix[number, at[name]] = value
    result = milp(
        cost,
        constraints=LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows]),
        bounds=Bounds(0, upper),
        integrality=[name[0] in "wz" for name in names],
        options={"mip_rel_gap": 1e-9},
    )
    assert result.status == 0, result.message
    counts = {key: round(result.x[at["w", key]]) for key in options}
    counts = {key: count for key, count in counts.items() if count}
    shares = {(i, key): float(result.x[at["x", i, key]]) for i in types for key in counts}
    return Answer(counts, {one: share for one, share in shares.items() if share > 1e-9}, float(result.fun))


# ---- the plan


def plan_of(problem: AllocationProblem, counts: Counts, shares: Shares, **values: Any) -> Plan:
    """The plan of an answer, with its money added up one term at a time."""
    order = list(counts)
    served = [sum(share for (i, _), share in shares.items() if i == t) for t in range(len(problem.query_types))]
    usd = sum(count * usd_per_hour(problem, key) for key, count in counts.items())
    if problem.decisions.model_storage == "once":
        copies = [model for model, _ in {(key.model, key.tier) for key in counts}]
    else:
        copies = [model for _, model, _ in {(i, key.model, key.tier) for i, key in shares}]
    stored_gb = sum(problem.models[model].weight_gb for model in copies)
    stored_gb += sum(traffic_gb(problem, i) * share for i, share in enumerate(served))
    objective = usd * problem.horizon_hours + stored_gb * storage_usd_per_gb(problem)
    objective += sum(delay_usd(problem, i, key) * share for (i, key), share in shares.items())
    objective += sum(
        query.unserved_usd * times(problem, i) * max(0.0, 1 - served[i]) for i, query in enumerate(problem.query_types)
    )
    per_hour = sum(q.requests_per_hour * share for q, share in zip(problem.query_types, served, strict=True))
    tokens = sum(
        q.requests_per_hour * share * q.output_tokens for q, share in zip(problem.query_types, served, strict=True)
    )
    whole: dict[str, Any] = {
        "problem": problem,
        "deployments": tuple(_deployment(problem, key, counts[key]) for key in order),
        "routes": tuple(
            Route(query_type=problem.query_types[i].name, deployment=order.index(key), fraction=min(share, 1.0))
            for (i, key), share in shares.items()
        ),
        "requests_per_s": per_hour / 3600,
        "cost_usd_per_hour": usd,
        "usd_per_million_output_tokens": usd / tokens * 1e6 if tokens else 0.0,
        "status": "feasible",
        "objective_name": "total_usd",
        "objective": objective,
        "provenance": Provenance(solver="hand", version="0"),
    }
    return Plan(**(whole | values))


def with_bound(plan: Plan, bound: float, certificate: Certificate) -> Plan:
    gap = abs(plan.objective - bound) / plan.objective
    status = "optimal" if gap <= 1e-6 else "feasible"
    return plan.replace(bound=bound, gap=gap, certificate=certificate, status=status)


def _deployment(problem: AllocationProblem, key: Key, count: int) -> Deployment:
    model, tier, listed = problem.models[key.model], problem.tiers[key.tier], given(problem, key)
    gpus = key.n * key.m
    if listed is None:
        nodes: tuple[str, ...] = (f"{tier.name} x{gpus}",)
        machine = nodes[0]
    else:
        nodes = (tier.name if tier.offer is None else tier.offer.name,) * listed.machines
        machine = tier.name if tier.instance_type is None else tier.instance_type.name
    weight_bytes = round(weight_share_gb(problem, key) * 1e9)
    ends = [model.layers * s // key.m for s in range(key.m + 1)]
    stages = tuple(
        Stage(
            layers=(ends[s], ends[s + 1]),
            node=0,
            instance_type=machine,
            gpu_indices=tuple(range(s * key.n, (s + 1) * key.n)),
            tensor_parallel=key.n,
            compute_dtype=tier.weight_dtype,
            weight_bytes=weight_bytes,
            activation_bytes=0,
            kv_cache_bytes=int(tier.memory_gb * 1e9) - weight_bytes,
        )
        for s in range(key.m)
    )
    some = Prediction(value=1.0, low=1.0, high=1.0, level=0.0, source="none")
    pipeline = Pipeline(
        nodes=nodes,
        stages=stages,
        count=count,
        max_num_seqs=1,
        micro_batch=1,
        max_model_len=4096,
        predictions=PipelinePredictions(
            requests_per_s=some, ttft_s=some, tpot_s=some, latency_s=some, output_tokens_per_s=some
        ),
        cost_usd_per_hour=usd_per_hour(problem, key),
    )
    return Deployment(model=model.name, pipelines=(pipeline,))


# ---- the bound of prices


def enough(problem: AllocationProblem, key: Key) -> int:
    """Replicas that hold all of every type: a cheapest answer has no more."""
    everyone = range(len(problem.query_types))
    busy = sum(busy_replicas(problem, i, key) for i in everyone)
    full = 0.0
    if given(problem, key) is None:
        free = problem.tiers[key.tier].memory_gb - weight_share_gb(problem, key)
        full = sum(cache_gb(problem, i, key) for i in everyone) / free
    return max(1, math.ceil(max(busy, full)))


def least_of_sets(
    fixed: list[float],
    pair: list[Any],
    pair_fixed: Mapping[Any, float],
    unit: list[float],
    means: list[list[float]],
    most: int = 3,
) -> float:
    """Over all sets of at most so many members, each with its best shares; means are at most 0."""
    best = np.inf
    for size in range(1, most + 1):
        for chosen in combinations(range(len(fixed)), size):
            result = linprog(
                [unit[o] for o in chosen],
                A_ub=[[mean[o] for o in chosen] for mean in means],
                b_ub=[0.0] * len(means),
                A_eq=[[1.0] * size],
                b_eq=[1.0],
            )
            if result.status == 0:
                pairs = {pair[o] for o in chosen} - {None}
                paid = sum(fixed[o] for o in chosen) + sum(pair_fixed[p] for p in pairs)
                best = min(best, paid + result.fun)
    return float(best)


def free_bound(problem: AllocationProblem) -> float:
    """What no prices at all prove: each type's shares cost least where what is rented and stored for them is free."""
    options = [key for key in keys(problem) if fits(problem, key)]
    total = 0.0
    for i, query in enumerate(problem.query_types):
        usd = traffic_gb(problem, i) * storage_usd_per_gb(problem)
        result = linprog(
            [usd + delay_usd(problem, i, key) for key in options] + [query.unserved_usd * times(problem, i)],
            A_ub=[
                [delay_s(problem, i, key) / query.delay_limit_s for key in options] + [1.0],
                [error(problem, i, key) / query.error_limit for key in options] + [1.0],
            ],
            b_ub=[1.0, 1.0],
            A_eq=[[1.0] * (len(options) + 1)],
            b_eq=[1.0],
        )
        total += float(result.fun)
    return total


def bound_of(problem: AllocationProblem, prices: RowPrices) -> float:
    """What prices prove where no branch was taken."""
    decisions, every = problem.decisions, keys(problem)
    allowed = [key for key in every if fits(problem, key)]
    link = {every[o]: row for o, row in prices.link}
    pair_link = {divmod(p, len(problem.tiers)): row for p, row in prices.pair_link}
    load, cache = {every[o]: v for o, v in prices.load}, {every[o]: v for o, v in prices.cache}
    ttft, unserved = dict(prices.ttft), dict(prices.unserved)
    dollar, gigabyte = 1 + prices.budget / problem.budget_usd, prices.storage / problem.storage_capacity_gb

    def copy(model: int) -> float:
        gb = problem.models[model].weight_gb
        return gb * (dollar * storage_usd_per_gb(problem) + gigabyte)

    by_type = decisions.model_storage == "per_query_type"
    total = -prices.budget - prices.storage
    for i, query in enumerate(problem.query_types):
        fixed, pair, pair_fixed, unit = list[float](), list[Any](), dict[Any, float](), list[float]()
        delays, errors = list[float](), list[float]()
        for key in allowed:
            if not usable(problem, i, key):
                continue
            at = (key.model, key.tier)
            fixed.append(link[key][i] if key in link else 0.0)
            pair.append(at)
            pair_fixed[at] = copy(key.model) if by_type else pair_link[at][i] if at in pair_link else 0.0
            free = problem.tiers[key.tier].memory_gb - weight_share_gb(problem, key)
            unit.append(
                traffic_gb(problem, i) * (dollar * storage_usd_per_gb(problem) + gigabyte)
                + delay_usd(problem, i, key)
                + load.get(key, 0.0) * busy_replicas(problem, i, key)
                + (cache.get(key, 0.0) * cache_gb(problem, i, key) / free if given(problem, key) is None else 0.0)
                + (ttft[i] * ttft_s(problem, i, key) / (query.ttft_limit_s or 1.0) if i in ttft else 0.0)
            )
            delays.append(delay_s(problem, i, key) / query.delay_limit_s - 1 if decisions.delay == "average" else -1.0)
            errors.append(error(problem, i, key) / query.error_limit - 1)
        fixed.append(0.0)
        pair.append(None)
        served = decisions.slo_on == "served"
        unit.append(
            query.unserved_usd * times(problem, i) + unserved.get(i, 0.0) + (ttft.get(i, 0.0) if served else 0.0)
        )
        for means in (delays, errors):
            means.append(0.0 if served else -1.0)
        total += least_of_sets(fixed, pair, pair_fixed, unit, [delays, errors])
        total -= ttft.get(i, 0.0) + unserved.get(i, 0.0) * query.max_unserved
    costs = dict[tuple[int, int], list[float]]()
    for key in allowed:
        cost = dollar * usd_per_hour(problem, key) * problem.horizon_hours
        if decisions.replicas == "one" and not by_type:
            cost += copy(key.model)
        cost -= sum(link.get(key, ())) + load.get(key, 0.0) + cache.get(key, 0.0)
        most = min(problem.budget_usd // (usd_per_hour(problem, key) * problem.horizon_hours), enough(problem, key))
        costs.setdefault((key.model, key.tier), []).append(
            min(0.0, cost) * (most if decisions.replicas == "many" else 1)
        )
    for at, each in costs.items():
        total += sum(each) if decisions.replicas == "many" else min(each)
        if decisions.replicas == "many" and not by_type:
            total += min(0.0, copy(at[0]) - sum(pair_link.get(at, ())))
    return total
