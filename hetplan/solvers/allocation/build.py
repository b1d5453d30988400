"""From replicas and shares to a plan: deployments, routes, predictions by the problem's own table, totals."""

from __future__ import annotations

import math

from hetplan import __version__
from hetplan.errors import InfeasibleError, Reason
from hetplan.plan import (
    OPTIMALITY_GAP,
    Deployment,
    Pipeline,
    PipelinePredictions,
    Plan,
    Prediction,
    Provenance,
    Route,
    Stage,
)
from hetplan.problem.allocation import AllocationProblem
from hetplan.solvers.allocation.options import Options
from hetplan.solvers.base import AllocationSolution
from hetplan.solvers.build import relative_gap
from hetplan.units import GB, SECONDS_PER_HOUR

_SOURCE = "the problem's own table; no band is known"
_EXPLICIT_SOURCE = "estimated when the problem was made, at its utilisation; no band is known"


def build_allocation_plan(problem: AllocationProblem, solution: AllocationSolution, *, solver: str, seed: int) -> Plan:
    """The plan of a solution: one deployment for each configuration that is bought, the dearest first.

    Raises
    ------
    InfeasibleError
        If nothing is bought: a plan serves something.
    """
    o, answer = solution.options, solution.assignment
    bought = sorted((n for n, count in enumerate(answer.replicas.tolist()) if count), key=lambda n: (-o.rent_usd[n], n))
    if not bought:
        rent = float(o.rent_usd.min()) if o.count else math.inf
        raise InfeasibleError(
            f"serving nothing costs least: all penalties for unserved traffic add up to ${answer.usd:.2f}, and the "
            f"cheapest configuration alone to ${rent:.2f} over the horizon. Raise unserved_usd, or lower max_unserved",
            [Reason("unserved_usd", "all query types together", rent, answer.usd, "$")],
        )
    deployments = tuple(
        Deployment(model=problem.models[int(o.model[n])].name, pipelines=(_pipeline(problem, solution, n),))
        for n in bought
    )
    routes = tuple(
        Route(query_type=query.name, deployment=d, fraction=min(float(answer.shares[i, n]), 1.0))
        for i, query in enumerate(problem.query_types)
        for d, n in enumerate(bought)
        if answer.shares[i, n] > 0
    )
    shares = [min(float(row.sum()), 1.0) for row in answer.shares]
    served = [share * q.requests_per_hour for share, q in zip(shares, problem.query_types, strict=True)]
    tokens = math.fsum(rate * q.output_tokens for rate, q in zip(served, problem.query_types, strict=True))
    cost = math.fsum(d.pipelines[0].count * d.pipelines[0].cost_usd_per_hour for d in deployments)
    gap = None if solution.bound is None else relative_gap(solution.bound, answer.usd)
    return Plan(
        problem=problem,
        deployments=deployments,
        routes=routes,
        requests_per_s=math.fsum(served) / SECONDS_PER_HOUR,
        cost_usd_per_hour=cost,
        usd_per_million_output_tokens=cost / tokens * 1e6 if tokens > 0 else 0.0,
        status="optimal" if gap is not None and gap <= OPTIMALITY_GAP else "feasible",
        objective_name="total_usd",
        objective=answer.usd,
        bound=solution.bound,
        gap=gap,
        certificate=solution.certificate,
        provenance=Provenance(solver=solver, parameters=dict(solution.parameters), seed=seed, version=__version__),
    )


def _pipeline(problem: AllocationProblem, solution: AllocationSolution, number: int) -> Pipeline:
    o, answer = solution.options, solution.assignment
    model, tier = problem.models[int(o.model[number])], problem.tiers[int(o.tier[number])]
    tensor, depth = int(o.tensor_parallel[number]), int(o.pipeline_parallel[number])
    gpus, count = tensor * depth, int(answer.replicas[number])
    explicit = problem.configurations[int(o.number[number])] if problem.configurations else None
    if explicit is None:
        instance, per_node = f"{tier.name} x{gpus}", gpus
        nodes: tuple[str, ...] = (instance,)
    else:
        instance = tier.name if tier.instance_type is None else tier.instance_type.name
        nodes = (tier.name if tier.offer is None else tier.offer.name,) * explicit.machines
        whole = math.ceil(gpus / explicit.machines) if tier.instance_type is None else tier.instance_type.gpu_count
        # Stages fill one machine after the other, and none stands in two.
        per_node = max(whole // tensor, 1) * tensor
    scale = tier.weight_scale if problem.decisions.weights == "scaled" else 1.0
    weights = round(model.weight_gb * GB * scale / gpus)
    cuts = [s * model.layers // depth for s in range(depth + 1)]
    stages = tuple(
        Stage(
            layers=(cuts[s], cuts[s + 1]),
            node=s * tensor // per_node,
            instance_type=instance,
            gpu_indices=tuple(g % per_node for g in range(s * tensor, (s + 1) * tensor)),
            tensor_parallel=tensor,
            compute_dtype=tier.weight_dtype,
            weight_bytes=weights,
            activation_bytes=0,
            kv_cache_bytes=max(int(tier.memory_gb * GB) - weights, 0),
        )
        for s in range(depth)
    )
    queries = [(i, q) for i, q in enumerate(problem.query_types) if answer.shares[i, number] > 0]
    rates = [float(answer.shares[i, number]) * q.requests_per_hour / SECONDS_PER_HOUR / count for i, q in queries]
    rate = math.fsum(rates)

    def mean(values: list[float]) -> float:
        return math.fsum(r * v for r, v in zip(rates, values, strict=True)) / rate if rate > 0 else 0.0

    delays = [float(o.delay[i, number]) * q.delay_limit_s for i, q in queries]
    firsts = [_first_token_s(problem, o, i, number) for i, _ in queries]
    steps = [(d - f) / max(q.output_tokens - 1, 1) for d, f, (_, q) in zip(delays, firsts, queries, strict=True)]
    in_flight = max(1, math.ceil(rate * mean(delays)))
    source = _SOURCE if explicit is None else _EXPLICIT_SOURCE
    return Pipeline(
        nodes=nodes,
        stages=stages,
        count=count,
        max_num_seqs=in_flight,
        micro_batch=max(1, math.ceil(in_flight / depth)),
        max_model_len=max((math.ceil(q.tokens) for _, q in queries), default=1),
        predictions=PipelinePredictions(
            requests_per_s=_certain(rate, source),
            ttft_s=_certain(mean(firsts), source),
            tpot_s=_certain(mean(steps), source),
            latency_s=_certain(mean(delays), source),
            output_tokens_per_s=_certain(
                math.fsum(r * q.output_tokens for r, (_, q) in zip(rates, queries, strict=True)), source
            ),
        ),
        cost_usd_per_hour=float(o.rent_usd[number]) / problem.horizon_hours,
    )


def _first_token_s(problem: AllocationProblem, options: Options, query: int, number: int) -> float:
    """Of a type on an option: by the paper's formula, or as the configuration was estimated."""
    if problem.configurations:
        return problem.configurations[int(options.number[number])].ttft_s[query]
    asked, tier = problem.query_types[query], problem.tiers[int(options.tier[number])]
    token_s = (
        asked.slowness
        * problem.models[int(options.model[number])].weight_gb
        * tier.weight_scale
        / tier.bandwidth_gb_per_s
    )
    return token_s * asked.input_tokens / int(options.tensor_parallel[number])


def _certain(value: float, source: str) -> Prediction:
    return Prediction(value=value, low=value, high=value, level=0.0, source=source)
