"""Plans that keep a percentile of their requests' latency within a limit, at the rate that arrives.

The solvers plan for means of full pipelines. Here they are asked for plans under relaxed and tightened limits; each
is judged by the closed form of `hetplan.estimator.queueing`, and the best that it does not rule out are lived through
in a simulation, which has the last word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from hetplan.errors import InfeasibleError, NoSolutionError, Reason
from hetplan.estimator.base import make_estimator
from hetplan.estimator.queueing import percentile_of, plan_steady_states
from hetplan.plan import Plan
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import OnIncumbent, Progress, Solution, Solver, check_time_limit
from hetplan.solvers.build import build_plan
from hetplan.solvers.placement.bound import refuse_infeasible
from hetplan.solvers.placement.choice import better, cost_of
from hetplan.workload.requests import QueryType, Slo, TokenDistribution, Workload

# Percentile of each latency that a plan's requests live through, by plan, level and seed.
Simulate = Callable[[Plan, float, int], Mapping[str, float]]

# Mean limits to plan for, as shares of the percentile's limit; and demands, as multiples of the rate.
_TIGHTER = (1.0, 0.7, 0.5, 0.35, 0.25)
_DEMANDS = (1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
_BOTH = ((1.5, 0.7), (2.0, 0.5), (3.0, 0.5), (2.0, 0.25))
# Share of the time for the plan without limits, which the bound comes from.
_FIRST = 0.4
# How far beyond the limit the closed form may see a plan that is simulated all the same.
_DOUBT = 1.25
_MOST_SIMULATED = 12


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A plan, its objective before any penalty, and its worst percentile over its limit by the closed form."""

    solution: Solution
    plan: Plan
    excess: float


def promised_plan(
    problem: PlacementProblem,
    solver: Solver,
    simulate: Simulate,
    *,
    solver_name: str,
    time_limit_s: float = 60.0,
    seed: int = 0,
    warm_start: Plan | None = None,
    on_incumbent: OnIncumbent | None = None,
) -> Plan:
    """The best plan found that keeps the problem's percentile.

    Parameters
    ----------
    problem : PlacementProblem
        With an Slo on a percentile, and a rate.
    solver : Solver
        Asked for plans without percentiles.
    simulate : callable
        Percentiles that a plan's requests live through, given the plan, the level and a seed.
    solver_name : str
    time_limit_s, seed, warm_start, on_incumbent
        As of `hetplan.solvers.base.Solver.solve`.

    Returns
    -------
    Plan
        Its provenance holds the percentiles that were predicted and simulated. Its bound is that of the problem
        without the Slo, which no plan that keeps it can pass.

    Raises
    ------
    InfeasibleError
        If there is no plan even without the Slo, no plan serves the rate, or a request alone takes longer than a limit.
    NoSolutionError
        If no plan that was tried keeps the limit; the message says how near the best came.
    """
    deadline = time.monotonic() + check_time_limit(time_limit_s)
    began = time.monotonic()
    slo = problem.slo
    if slo is None or slo.percentile is None:
        raise ValueError("the problem promises no percentile")
    if slo.hard:
        _refuse_impossible(problem, slo)
    free = problem.replace(slo=None, latency_penalty=0.0)
    first = solver.solve(
        free, time_limit_s=_FIRST * time_limit_s, seed=seed, warm_start=warm_start, on_incumbent=on_incumbent
    )
    rate = problem.workload.requests_per_s or 0.0
    if problem.objective == "throughput" and first.bound is not None and first.bound < rate:
        raise InfeasibleError(
            f"{rate:g} req/s arrive and no plan of this cluster serves more than {first.bound:.4g}: every latency "
            "grows for ever. Add machines",
            [Reason("requests_per_s", problem.model.name, rate, first.bound, "req/s")],
        )
    candidates = [_candidate(problem, slo, first, first, solver_name, seed)]
    tried: dict[int, Mapping[str, float]] = {}

    def checked(number: int) -> Plan | None:
        """The plan if its requests live through what was promised."""
        candidate = candidates[number]
        if number not in tried:
            tried[number] = simulate(candidate.plan, slo.percentile or 0.0, seed)
        lived = tried[number]
        worst = max(lived[name] / limit for name, limit in slo.limits().items())
        if slo.hard and worst > 1:
            return None
        return _told(problem, slo, candidate, lived, worst, solver_name, seed)

    if candidates[0].excess <= 1:
        plan = checked(0)
        if plan is not None and plan.objective == candidates[0].solution.objective:
            return plan
    others = list(_relaxed(problem, slo))
    for number, relaxed in enumerate(others):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            found = solver.solve(relaxed, time_limit_s=left / (len(others) - number), seed=seed)
        except (InfeasibleError, NoSolutionError):
            continue
        if all(found.pipelines != known.solution.pipelines for known in candidates):
            candidates.append(_candidate(problem, slo, found, first, solver_name, seed))
            if on_incumbent is not None:
                on_incumbent(
                    Progress(time.monotonic() - began, None, first.bound, f"{len(candidates)} plans to be simulated")
                )
    best = _best(problem, slo, candidates, checked)
    if best is None:
        raise _missed(problem, slo, candidates, tried)
    return best


def _best(
    problem: PlacementProblem, slo: Slo, candidates: list[_Candidate], checked: Callable[[int], Plan | None]
) -> Plan | None:
    """The best candidate that keeps its promise when simulated, from the most promising on."""

    def promise(number: int) -> float:
        """Objective as the closed form sees it, the larger the better."""
        candidate = candidates[number]
        if problem.objective == "cost":
            return -candidate.solution.objective
        return candidate.solution.objective * (1.0 if slo.hard else _penalty(problem, candidate.excess))

    order = [n for n, candidate in enumerate(candidates) if not slo.hard or candidate.excess <= _DOUBT]
    order.sort(key=lambda number: (-promise(number), candidates[number].excess))
    # Last of all the one that is furthest within the limits.
    if order:
        safest = min(order, key=lambda number: candidates[number].excess)
        order = [*order[: _MOST_SIMULATED - 1], *([safest] if safest in order[_MOST_SIMULATED - 1 :] else [])]
    best: Plan | None = None
    for number in order:
        plan = checked(number)
        if plan is None:
            continue
        if slo.hard:
            return plan
        if better(problem, plan.objective, None if best is None else best.objective):
            best = plan
    return best


def _penalty(problem: PlacementProblem, worst: float) -> float:
    """What eq. 7 leaves of a plan's worth, by its worst percentile over its limit."""
    return 1.0 - problem.latency_penalty * max(worst - 1.0, 0.0)


def _candidate(
    problem: PlacementProblem, slo: Slo, found: Solution, first: Solution, solver_name: str, seed: int
) -> _Candidate:
    """A solution judged by the problem's own objective and the closed form."""
    plan = build_plan(problem, replace(found, bound=None, certificate=None), solver=solver_name, seed=seed)
    value = plan.requests_per_s
    cost = cost_of(problem, found.pipelines)
    solution = replace(
        found,
        objective={"throughput": value, "cost": cost}.get(problem.objective, value / cost if cost else 0.0),
        bound=first.bound,
        certificate=first.certificate,
        parameters=first.parameters,
    )
    states = plan_steady_states(plan)
    excess = max(percentile_of(states, name, slo.percentile or 0.0) / limit for name, limit in slo.limits().items())
    return _Candidate(solution, plan, excess)


def _told(
    problem: PlacementProblem,
    slo: Slo,
    candidate: _Candidate,
    lived: Mapping[str, float],
    worst: float,
    solver_name: str,
    seed: int,
) -> Plan:
    """The candidate's plan with its objective, and with what was simulated."""
    objective = candidate.solution.objective * (1.0 if slo.hard else _penalty(problem, worst))
    states = plan_steady_states(candidate.plan)
    said: dict[str, str | int | float | bool | None] = {"simulated_requests": int(lived["requests"])}
    for name in slo.limits():
        said[f"predicted_{name}"] = percentile_of(states, name, slo.percentile or 0.0)
        said[f"simulated_{name}"] = lived[name]
    solution = replace(candidate.solution, objective=objective, parameters=dict(candidate.solution.parameters) | said)
    return build_plan(problem, solution, solver=solver_name, seed=seed)


def _relaxed(problem: PlacementProblem, slo: Slo) -> Iterator[PlacementProblem]:
    """Problems without percentiles whose plans may keep them: for tighter means, for more demand, for both."""
    free = problem.replace(slo=None, latency_penalty=0.0)

    def under(share: float, names: tuple[str, ...], within: PlacementProblem) -> PlacementProblem:
        limits = {name: share * limit for name, limit in slo.limits().items() if name in names}
        return within.replace(slo=Slo(**limits))

    every = tuple(slo.limits())
    for share in _TIGHTER:
        yield under(share, every, free)
    if len(every) > 1:
        for name in every:
            yield under(1.0, (name,), free)
    if problem.objective == "throughput":
        return
    for times in _DEMANDS:
        yield _demanding(free, times)
    for times, share in _BOTH:
        yield under(share, every, _demanding(free, times))
    yield free.replace(objective="throughput")


def _demanding(problem: PlacementProblem, times: float) -> PlacementProblem:
    """The cheapest machines for a multiple of the rate."""
    queries = [
        query.replace(requests_per_s=times * (query.requests_per_s or 0.0)) for query in problem.workload.query_types
    ]
    return problem.replace(objective="cost", workload=Workload(query_types=queries))


def _refuse_impossible(problem: PlacementProblem, slo: Slo) -> None:
    """Raise where even the shortest request, alone on the machines, takes longer than the limit."""
    queries = problem.workload.query_types
    shortest = QueryType(
        requests_per_s=problem.workload.requests_per_s,
        input_tokens=TokenDistribution(tokens=(min(min(q.input_tokens.tokens) for q in queries),), shares=(1.0,)),
        output_tokens=TokenDistribution(tokens=(min(min(q.output_tokens.tokens) for q in queries),), shares=(1.0,)),
        prefix_cache_hit_rate=max(q.prefix_cache_hit_rate for q in queries),
    )
    alone = problem.replace(
        workload=Workload(query_types=[shortest]), max_model_len=problem.longest_request_tokens,
        slo=Slo(**slo.limits()),
    )  # fmt: skip
    refuse_infeasible(alone, make_estimator(alone))


def _missed(
    problem: PlacementProblem, slo: Slo, candidates: list[_Candidate], tried: Mapping[int, Mapping[str, float]]
) -> NoSolutionError:
    """How near the nearest plan came."""
    level = slo.percentile or 0.0
    nearest = min(range(len(candidates)), key=lambda number: candidates[number].excess)
    lived = tried.get(nearest)
    states = plan_steady_states(candidates[nearest].plan)
    said = "; ".join(
        f"P{100 * level:g} of {name} <= {limit:g} s, the nearest reaches "
        + (f"{percentile_of(states, name, level):.4g} s" if lived is None else f"{lived[name]:.4g} s when simulated")
        for name, limit in slo.limits().items()
    )
    return NoSolutionError(
        f"none of {len(candidates)} plans for {problem.model.name} keeps the limit at "
        f"{problem.workload.requests_per_s:g} req/s: {said}. None is ruled out. Relax the limit, add machines, or give "
        "more time_limit_s"
    )
