"""Other plans for what is served: for what is asked for lately, and for the machines that are left.

What is returned goes to `hetplan.runtime.controller.controller.Controller`. The verbs that plan and check are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hetplan.errors import InfeasibleError, InvalidInputError, NoSolutionError
from hetplan.plan import Plan
from hetplan.problem.allocation import AllocationProblem
from hetplan.problem.placement import PlacementProblem
from hetplan.runtime.controller.demand import Demand, Resolved
from hetplan.runtime.controller.serving import Load, Serving
from hetplan.runtime.router.settings import RouteSettings
from hetplan.solvers.allocation.rolling import at_rates, factors, operated_usd_per_hour
from hetplan.units import SECONDS_PER_HOUR
from hetplan.workload.requests import QueryType, TokenDistribution, Workload

Problem = PlacementProblem | AllocationProblem
# Given a problem; raises where there is no plan.
Optimize = Callable[[Problem], Plan]
# Given a plan; what is wrong with it.
Verify = Callable[[Plan], Sequence[object]]
Resolver = Callable[[Serving, Demand], Resolved | None]
Replanner = Callable[[Serving, Mapping[str, int]], Serving | None]

# Lengths that have moved less than this are planned for as before, so that engines' settings stay what they are.
_SAME_LENGTHS = 0.2


def placement_resolver(optimize: Optimize, verify: Verify) -> Resolver:
    """A plan of one model for the measured rate and lengths.

    Only where the rate matters: for objective "cost", or a workload that states one. Where no plan serves that much,
    the one that serves most. An engine's longest request stays what it is.
    """

    def resolve(serving: Serving, demand: Demand) -> Resolved | None:
        if len(serving.plans) != 1:
            return None
        (plan,) = serving.plans
        loads = [load for load in demand.values() if load.model == plan.placement.model.name]
        if len(loads) != 1 or not loads[0].requests_per_s or not _rate_matters(plan.placement):
            return None
        found = _sound(optimize, verify, asked_for(plan, loads[0]))
        return None if found is None else Resolved(Serving(plans=(found,), planned=(loads[0],)))

    return resolve


def allocation_resolver(
    optimize: Optimize, verify: Verify, placement_plans: Callable[[Plan], Sequence[Plan]]
) -> Resolver:
    """A plan of several models for the measured requests of each query type, and what it saves.

    That is by the allocation problem: what is served now, with the best shares on what is bought, beside the new plan.

    Parameters
    ----------
    optimize, verify : callable
    placement_plans : callable
        One placement plan for each deployment of an allocation plan, in their order.
    """

    def resolve(serving: Serving, demand: Demand) -> Resolved | None:
        now = serving.allocation
        if now is None or not isinstance(now.problem, AllocationProblem):
            return None
        per_hour = {}
        for query in now.problem.query_types:
            rate = sum(load.requests_per_s for load in demand.values() if load.query_type == query.name)
            # What nobody asks for now may be asked for again.
            per_hour[query.name] = SECONDS_PER_HOUR * rate or query.requests_per_hour
        found = _sound(optimize, verify, at_rates(now.problem, factors(now.problem, per_hour)))
        if found is None:
            return None
        saved = operated_usd_per_hour(now, per_hour) - operated_usd_per_hour(found, per_hour)
        return Resolved(allocation_serving(found, placement_plans(found)), saved)

    return resolve


def allocation_serving(plan: Plan, plans: Sequence[Plan]) -> Serving:
    """What an allocation plan wants served, from one placement plan for each of its deployments, in their order.

    Raises
    ------
    InvalidInputError
        If it answers another kind of problem, or there are more or fewer plans than deployments.
    """
    problem = plan.problem
    if not isinstance(problem, AllocationProblem) or len(plans) != len(plan.deployments):
        raise InvalidInputError(
            f"{len(plans)} placement plans for {len(plan.deployments)} deployments of a plan of an allocation problem; "
            "give one for each"
        )
    shares: dict[tuple[str, str], float] = {}
    for route in plan.routes:
        key = route.query_type, plans[route.deployment].placement.model.name
        shares[key] = shares.get(key, 0.0) + route.fraction
    types = {query.name: query for query in problem.query_types}
    return Serving(
        plans=tuple(plans),
        allocation=plan,
        routes=tuple(RouteSettings(query_type=t, model=m, fraction=min(1.0, f)) for (t, m), f in shares.items()),
        planned=tuple(
            Load(
                model=model,
                query_type=name,
                requests_per_s=types[name].requests_per_hour / SECONDS_PER_HOUR * share,
                mean_input_tokens=types[name].input_tokens,
                mean_output_tokens=types[name].output_tokens,
            )
            for (name, model), share in shares.items()
        ),
    )


def replanner(optimize: Optimize, verify: Verify) -> Replanner:
    """A plan of one model over the machines that can be had: as asked for, or else the one that serves most."""

    def replan(serving: Serving, machines: Mapping[str, int]) -> Serving | None:
        if len(serving.plans) != 1:
            return None
        problem = serving.plans[0].placement
        counts = {pool.offer.name: min(pool.count, machines.get(pool.offer.name, 0)) for pool in problem.cluster.pools}
        pools = tuple(pool.replace(count=counts[p]) for pool in problem.cluster.pools if counts[p := pool.offer.name])
        if not pools:
            return None
        left = problem.replace(cluster=problem.cluster.replace(pools=pools, zone_links=()))
        found = _sound(optimize, verify, left)
        return None if found is None else Serving(plans=(found,), planned=serving.planned)

    return replan


def asked_for(plan: Plan, load: Load) -> PlacementProblem:
    """A plan's problem with what is asked for lately."""
    problem = plan.placement
    workload, longest = problem.workload, max(p.max_model_len for d in plan.deployments for p in d.pipelines)
    inputs = _factor(workload.mean_input_tokens, load.mean_input_tokens)
    outputs = _factor(workload.mean_output_tokens, load.mean_output_tokens)
    needed = max(q.input_tokens.maximum * inputs + q.output_tokens.maximum * outputs for q in workload.query_types)
    # Longer requests than the engines take are not answered.
    same = inputs == outputs == 1.0
    within = 1.0 if same else min(1.0, longest / needed * (1 - 1e-9))
    rate = workload.requests_per_s or 1.0
    types = tuple(
        QueryType(
            name=query.name,
            requests_per_s=load.requests_per_s * ((query.requests_per_s or rate) / rate),
            input_tokens=_times(query.input_tokens, inputs * within),
            output_tokens=_times(query.output_tokens, outputs * within),
            prefix_cache_hit_rate=query.prefix_cache_hit_rate,
            slo=query.slo,
        )
        for query in workload.query_types
    )
    return problem.replace(
        workload=Workload(query_types=types), max_model_len=problem.max_model_len if same else longest
    )


def _rate_matters(problem: PlacementProblem) -> bool:
    return problem.objective in ("cost", "expected_cost") or problem.workload.requests_per_s is not None


def _factor(planned_tokens: float, measured_tokens: float | None) -> float:
    if not measured_tokens or abs(measured_tokens - planned_tokens) <= _SAME_LENGTHS * planned_tokens:
        return 1.0
    return measured_tokens / planned_tokens


def _times(tokens: TokenDistribution, factor: float) -> TokenDistribution:
    return tokens if factor == 1.0 else tokens.replace(tokens=tuple(t * factor for t in tokens.tokens))


def _sound(optimize: Optimize, verify: Verify, problem: Problem) -> Plan | None:
    """A plan, if there is a sound one."""
    tried: list[Problem] = [problem]
    if isinstance(problem, PlacementProblem) and problem.objective != "throughput":
        tried.append(problem.replace(objective="throughput", slo=None))
    for one in tried:
        try:
            found = optimize(one)
        except (InfeasibleError, NoSolutionError):
            continue
        if not verify(found):
            return found
    return None
