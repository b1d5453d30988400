"""Plans whose output is cheapest in the long run, interruptions of spot machines included.

Existing solvers are asked for plans at derated prices: a machine costs its overlap more, and is worth its availability,
raised to the machines of a pipeline, less. Plans of all pools, of those that are never interrupted, of spot pools, and
of each pool alone are then compared by the closed form of `hetplan.estimator.expected_cost`. No bound is proven.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from hetplan.catalog.offers import Cluster, Pool
from hetplan.errors import InfeasibleError, NoSolutionError
from hetplan.estimator.base import Estimator, make_estimator
from hetplan.estimator.expected_cost import ExpectedPipeline, expected_pipeline, expected_usd_per_million
from hetplan.estimator.interruption import expected_excess_s
from hetplan.estimator.pipeline import pipeline_rates
from hetplan.plan import Plan
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import OnIncumbent, PipelineChoice, Progress, Solution, Solver, check_time_limit
from hetplan.solvers.build import build_plan
from hetplan.units import SECONDS_PER_HOUR
from hetplan.workload.requests import Workload

# Machines of a pipeline by which prices are derated.
_DEPTHS = (1, 4)
# How often the demand is raised until what is left after interruptions meets it.
_RAISES = 4


def expected_cost_plan(
    problem: PlacementProblem,
    solver: Solver,
    *,
    solver_name: str,
    time_limit_s: float = 60.0,
    seed: int = 0,
    warm_start: Plan | None = None,
    on_incumbent: OnIncumbent | None = None,
) -> Plan:
    """The plan with the least dollars for a million output tokens that was found, interruptions included.

    Parameters
    ----------
    problem : PlacementProblem
        With objective "expected_cost".
    solver : Solver
        Asked for plans for "cost", or without a rate for "throughput_per_cost".
    solver_name : str
    time_limit_s, seed, warm_start, on_incumbent
        As of `hetplan.solvers.base.Solver.solve`.

    Returns
    -------
    Plan
        Its provenance holds ``availability`` (of its output), ``expected_usd_per_hour`` and
        ``expected_output_tokens_per_s``.

    Raises
    ------
    InfeasibleError
        If there is no plan even without interruptions.
    NoSolutionError
        If no plan that was found serves the rate after interruptions.
    """
    began = time.monotonic()
    deadline = began + check_time_limit(time_limit_s)
    estimator = make_estimator(problem)
    best: tuple[float, tuple[PipelineChoice, ...], Solution] | None = None
    clusters = list(_clusters(problem))
    for number, cluster in enumerate(clusters):
        if best is not None and time.monotonic() > deadline:
            break
        # An older plan is of all pools.
        start = warm_start if len(cluster.pools) == len(problem.cluster.pools) else None
        share_s = max(deadline - time.monotonic(), 0.0) / (len(clusters) - number)
        try:
            for found in _solutions(problem, estimator, solver, cluster, share_s, seed, start):
                for pipelines in _parts(problem, found):
                    usd = expected_usd_per_million(problem, _expected(problem, estimator, pipelines))
                    if math.isfinite(usd) and (best is None or usd < best[0]):
                        best = (usd, pipelines, found)
                        if on_incumbent is not None:
                            on_incumbent(Progress(time.monotonic() - began, usd, None, "another plan"))
        except (InfeasibleError, NoSolutionError):
            # What all pools cannot do, no part of them does.
            if number == 0 and best is None:
                raise
    if best is None:
        raise NoSolutionError(
            f"no plan that was found still serves {problem.workload.requests_per_s:g} req/s after interruptions. Add "
            "machines, or on-demand ones"
        )
    usd, pipelines, found = best
    expected = _expected(problem, estimator, pipelines)
    tokens = math.fsum(one.output_tokens_per_s for one in expected)
    told: dict[str, str | int | float | bool | None] = {
        "availability": math.fsum(one.availability * one.output_tokens_per_s for one in expected) / tokens,
        "expected_usd_per_hour": math.fsum(one.usd_per_hour for one in expected),
        "expected_output_tokens_per_s": tokens,
    }
    solution = Solution(pipelines=pipelines, objective=usd, parameters=dict(found.parameters) | told)
    return build_plan(problem, solution, solver=solver_name, seed=seed)


def _expected(
    problem: PlacementProblem, estimator: Estimator, pipelines: Sequence[PipelineChoice]
) -> list[ExpectedPipeline]:
    return [
        expected_pipeline(
            problem,
            estimator,
            one.stages,
            one.offers,
            micro_batch=one.micro_batch,
            requests_per_s=float(pipeline_rates(problem, estimator, one.stages, one.micro_batch).requests_per_s[0]),
            egress_usd_per_hour=one.egress_usd_per_hour,
        )
        for one in pipelines
    ]


def _clusters(problem: PlacementProblem) -> Iterator[Cluster]:
    """All pools at derated prices, then parts of them."""
    pools = problem.cluster.pools
    steady = tuple(pool for pool in pools if not pool.offer.expected_interruptions_per_hour)
    taken = tuple(pool for pool in pools if pool.offer.expected_interruptions_per_hour)
    parts = [pools] if not taken or not steady else [pools, steady, taken]
    if len(pools) > 1:
        parts += [(pool,) for pool in pools if (pool,) not in parts]
    for part in parts:
        for depth in _DEPTHS if any(pool in taken for pool in part) else (1,):
            yield _within(problem.cluster, [_derated(problem, pool, depth) for pool in part])


def _within(cluster: Cluster, pools: Sequence[Pool]) -> Cluster:
    """A part of a cluster, with the links between what is left."""
    used = {pool.offer.instance_type for pool in pools}
    places = [pool.offer.place for pool in pools]
    links = tuple(
        link
        for link in cluster.zone_links
        if all(any(place == end or place.startswith(f"{end}/") for place in places) for end in link.ends)
    )
    types = tuple(machine for machine in cluster.instance_types if machine.name in used)
    return Cluster(instance_types=types, pools=tuple(pools), zone_links=links)


def _derated(problem: PlacementProblem, pool: Pool, depth: int) -> Pool:
    """The pool at what its machines cost for what they are worth, in pipelines of so many."""
    offer = pool.offer
    rate = offer.expected_interruptions_per_hour
    if rate == 0 or offer.price_usd_per_hour is None:
        return pool
    excess_s = expected_excess_s(problem.start_s, problem.start_deviation_s, offer.notice_s or 0.0)
    concurrent = problem.handling in ("concurrent", "both")
    overlap = rate * max(problem.start_s - excess_s, 0.0) / SECONDS_PER_HOUR if concurrent else 0.0
    lacking = rate * (excess_s if concurrent else problem.start_s) / SECONDS_PER_HOUR
    price = offer.price_usd_per_hour * (1 + overlap) * math.exp(min(depth * lacking, 50.0))
    return pool.replace(offer=offer.replace(price_usd_per_hour=price))


def _solutions(
    problem: PlacementProblem,
    estimator: Estimator,
    solver: Solver,
    cluster: Cluster,
    limit_s: float,
    seed: int,
    warm_start: Plan | None,
) -> Iterator[Solution]:
    """Plans of a cluster: the best per dollar, or the cheapest for a demand that is raised by what is lost."""
    rate = problem.workload.requests_per_s
    if rate is None:
        asked = problem.replace(cluster=cluster, objective="throughput_per_cost")
        yield solver.solve(asked, time_limit_s=limit_s, seed=seed, warm_start=warm_start)
        return
    raised = 1.0
    for number in range(_RAISES):
        queries = [q.replace(requests_per_s=raised * (q.requests_per_s or 0.0)) for q in problem.workload.query_types]
        asked = problem.replace(cluster=cluster, objective="cost", workload=Workload(query_types=queries))
        try:
            found = solver.solve(asked, time_limit_s=limit_s / _RAISES, seed=seed, warm_start=warm_start)
        except (InfeasibleError, NoSolutionError):
            if number == 0:
                raise
            # More than the rate is out of reach: the most there is may still do.
            yield solver.solve(asked.replace(objective="throughput"), time_limit_s=limit_s / _RAISES, seed=seed)
            return
        yield found
        served = math.fsum(one.output_tokens_per_s for one in _expected(problem, estimator, found.pipelines))
        wanted = rate * problem.workload.mean_output_tokens
        if served >= wanted or served <= 0:
            return
        # A little more, so that the next plan is another one.
        raised *= 1.001 * wanted / served


def _parts(problem: PlacementProblem, found: Solution) -> Iterator[tuple[PipelineChoice, ...]]:
    """The plan, and what it may be cut down to: without a rate the best pipeline alone is the best per dollar."""
    yield found.pipelines
    if len(found.pipelines) == 1:
        return
    if problem.workload.requests_per_s is None:
        yield from ((one,) for one in found.pipelines)
        return
    for left_out in range(len(found.pipelines)):
        yield found.pipelines[:left_out] + found.pipelines[left_out + 1 :]
