"""From a solver's choices to a plan: memory, predictions, GPU indices, totals, status."""

from __future__ import annotations

from hetplan import __version__
from hetplan.estimator.base import Estimator, make_estimator
from hetplan.estimator.pipeline import predictions_at, stage_memories
from hetplan.plan import OPTIMALITY_GAP, Deployment, Pipeline, Plan, Provenance, Route, Stage
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import PipelineChoice, Solution
from hetplan.solvers.placement.choice import cost_of
from hetplan.units import SECONDS_PER_HOUR


def build_plan(problem: PlacementProblem, solution: Solution, *, solver: str, seed: int) -> Plan:
    """The plan of a solution, identical pipelines merged and the best first."""
    estimator = make_estimator(problem)
    merged: dict[tuple[object, ...], list[PipelineChoice]] = {}
    for choice in solution.pipelines:
        shape = tuple((s.layers, s.machine.name, s.tensor_parallel, s.node) for s in choice.stages)
        merged.setdefault((shape, choice.offers, choice.micro_batch), []).append(choice)
    pipelines = [_pipeline(problem, estimator, same[0], len(same)) for same in merged.values()]
    pipelines.sort(key=lambda p: -p.predictions.requests_per_s.value * p.count)
    rate = sum(p.count * p.predictions.requests_per_s.value for p in pipelines)
    tokens = sum(p.count * p.predictions.output_tokens_per_s.value for p in pipelines)
    cost = cost_of(problem, solution.pipelines)
    gap = None if solution.bound is None else relative_gap(solution.bound, solution.objective)
    return Plan(
        problem=problem,
        deployments=(Deployment(model=problem.model.name, pipelines=tuple(pipelines)),),
        routes=tuple(Route(query_type=q.name, deployment=0, fraction=1.0) for q in problem.workload.query_types),
        requests_per_s=rate,
        cost_usd_per_hour=cost,
        egress_usd_per_hour=sum(choice.egress_usd_per_hour for choice in solution.pipelines),
        usd_per_million_output_tokens=cost / SECONDS_PER_HOUR / tokens * 1e6,
        status="optimal" if gap is not None and gap <= OPTIMALITY_GAP else "feasible",
        objective_name=problem.objective,
        objective=solution.objective,
        bound=solution.bound,
        gap=gap,
        certificate=solution.certificate,
        provenance=Provenance(solver=solver, parameters=dict(solution.parameters), seed=seed, version=__version__),
    )


def relative_gap(bound: float, objective: float) -> float:
    """Distance of a bound from an objective, relative to the objective."""
    return abs(bound - objective) / max(abs(objective), 1e-9)


def _pipeline(problem: PlacementProblem, estimator: Estimator, choice: PipelineChoice, count: int) -> Pipeline:
    memories = stage_memories(problem, estimator, choice.stages)
    stages = []
    used: dict[int, int] = {}
    for shape, memory in zip(choice.stages, memories, strict=True):
        first = used.get(shape.node, 0)
        used[shape.node] = first + shape.tensor_parallel
        stages.append(
            Stage(
                layers=shape.layers,
                node=shape.node,
                instance_type=shape.machine.name,
                gpu_indices=tuple(range(first, first + shape.tensor_parallel)),
                tensor_parallel=shape.tensor_parallel,
                compute_dtype=problem.compute_dtype(shape.machine.gpu),
                weight_bytes=memory.weight_bytes,
                activation_bytes=memory.activation_bytes,
                kv_cache_bytes=memory.kv_cache_bytes,
                other_bytes=memory.other_bytes,
                reserved_bytes=memory.reserved_bytes,
                start_kv_cache_bytes=memory.start_kv_cache_bytes,
            )
        )
    in_flight = choice.micro_batch * (len(stages) if estimator.micro_batches else 1)
    return Pipeline(
        nodes=choice.offers,
        stages=tuple(stages),
        count=count,
        max_num_seqs=in_flight,
        micro_batch=choice.micro_batch,
        max_model_len=problem.longest_request_tokens,
        predictions=predictions_at(problem, estimator, choice.stages, choice.micro_batch),
        cost_usd_per_hour=cost_of(problem, [choice]),
        egress_usd_per_hour=choice.egress_usd_per_hour,
    )
