"""What vLLM does by itself: one pipeline per machine type, TP inside a node, PP over nodes, even layers.

A node whose GPU count is no valid degree is cut into groups of the largest one that divides it.
"""

from __future__ import annotations

import time
from typing import ClassVar

from hetplan.errors import NoSolutionError
from hetplan.estimator.base import make_estimator
from hetplan.estimator.pipeline import StageShape, even_layers
from hetplan.plan import Plan
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import OnIncumbent, PipelineChoice, Progress, Solution, check_time_limit
from hetplan.solvers.placement.bound import refuse_infeasible
from hetplan.solvers.placement.choice import choose_batch, cost_of, objective_of


class Even:
    """One even pipeline per pool."""

    name: ClassVar[str] = "even"

    def solve(
        self,
        problem: PlacementProblem,
        *,
        time_limit_s: float = 60.0,
        seed: int = 0,
        warm_start: Plan | None = None,
        on_incumbent: OnIncumbent | None = None,
    ) -> Solution:
        """Build the pipelines; see `hetplan.solvers.base.Solver`."""
        began = time.monotonic()
        check_time_limit(time_limit_s)
        problem.refuse_unsupported()
        estimator = make_estimator(problem)
        chosen: list[tuple[PipelineChoice, float]] = []
        for index, pool in enumerate(problem.cluster.pools):
            shape = _even_pipeline(problem, index)
            if shape is None:
                continue
            choice = choose_batch(problem, estimator, shape, (pool.offer.name,) * pool.count)
            if choice is not None and choice[1] > 0:
                chosen.append(choice)
        chosen = _as_asked(problem, chosen)
        if not chosen:
            refuse_infeasible(problem, estimator)
            raise NoSolutionError(
                f"no even pipeline of one machine type serves {problem.model.name} as asked. "
                "Use solver='auto', which mixes types"
            )
        pipelines, values = [choice for choice, _ in chosen], [value for _, value in chosen]
        objective = objective_of(problem, pipelines, values)
        if on_incumbent is not None:
            on_incumbent(Progress(time.monotonic() - began, objective, None, f"{len(pipelines)} even pipelines"))
        return Solution(pipelines=tuple(pipelines), objective=objective)


def _even_pipeline(problem: PlacementProblem, index: int) -> tuple[StageShape, ...] | None:
    pool = problem.cluster.pools[index]
    machine = problem.cluster.instance_type(pool.offer.instance_type)
    degrees = machine.valid_tensor_parallel(problem.model)
    degree = max(degrees)
    groups = machine.gpu_count // degree
    stages = groups * pool.count
    if stages > problem.model.layer_count:
        return None
    shapes, start = [], 0
    for number, size in enumerate(even_layers(problem.model.layer_count, stages)):
        shapes.append(StageShape((start, start + size), machine, degree, number // groups))
        start += size
    return tuple(shapes)


def _as_asked(
    problem: PlacementProblem, chosen: list[tuple[PipelineChoice, float]]
) -> list[tuple[PipelineChoice, float]]:
    """All pipelines for throughput, the best one per cost, the cheapest that meet a demand."""
    if problem.objective == "throughput" or not chosen:
        return chosen

    def usd_per_request(one: tuple[PipelineChoice, float]) -> float:
        return cost_of(problem, [one[0]]) / one[1]

    ordered = sorted(chosen, key=usd_per_request)
    if problem.objective == "throughput_per_cost":
        return ordered[:1]
    wanted, kept = problem.workload.requests_per_s or 0.0, []
    for one in ordered:
        if wanted > 0:
            kept.append(one)
            wanted -= one[1]
    return kept if wanted <= 0 else []
