"""Checks an allocation plan against the problem it carries, from the problem's definition alone.

Each constraint of the paper (5a to 5k) is computed again from the plan's deployments and routes, under the problem's
`Decisions`. A plan may have been edited or damaged in any way, so every check runs guarded.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import numpy as np

from hetplan.plan import Certificate, Deployment, Pipeline, Plan
from hetplan.problem.allocation import AllocationProblem, Tier
from hetplan.units import GB, SECONDS_PER_HOUR
from hetplan.verification.allocation_terms import Option, Terms, options_of, terms_of
from hetplan.verification.findings import COMMON, OF_ALLOCATION, Violation, check_status, close, found, guarded
from hetplan.verification.tables import FloatArray

# A limit may be passed by this share of it: solvers of linear programs keep to limits no more exactly.
LIMIT_TOLERANCE = 1e-6
# The stated bound may exceed what its certificate proves by this share of it.
BOUND_TOLERANCE = 1e-7

_OBJECTIVE = "total_usd"

# Every code that a plan of this kind can break.
MEANINGS = COMMON | OF_ALLOCATION


@dataclass(frozen=True, slots=True)
class _Bought:
    """A deployment of which the configuration is known."""

    where: str
    deployment: int
    option: Option
    pipeline: Pipeline


@dataclass(frozen=True, slots=True)
class _Scene:
    """The plan, and its problem by name."""

    plan: Plan
    problem: AllocationProblem
    models: dict[str, int]
    types: dict[str, int]
    options: tuple[Option, ...]
    bought: list[_Bought] = field(default_factory=list)
    confirmed: list[str] = field(default_factory=list)

    def terms(self) -> Terms:
        return terms_of(self.problem, [one.option for one in self.bought])

    def counts(self) -> FloatArray:
        return np.array([one.pipeline.count for one in self.bought], dtype=np.float64)

    def shares(self) -> FloatArray:
        """(types, bought configurations): what each type sends where."""
        columns = {one.deployment: column for column, one in enumerate(self.bought)}
        sent = np.zeros((len(self.types), len(self.bought)))
        for route in self.plan.routes:
            if route.query_type in self.types and route.deployment in columns:
                sent[self.types[route.query_type], columns[route.deployment]] += route.fraction
        return sent

    def complete(self) -> bool:
        """Whether sums over all of the plan mean anything; where not, another check says why."""
        return len(self.bought) == len(self.plan.deployments)


def examine_allocation(plan: Plan, problem: AllocationProblem, well_formed: bool) -> tuple[list[Violation], list[str]]:
    """What is wrong with a plan of an allocation problem, and which bound of it is proven.

    Parameters
    ----------
    plan : Plan
    problem : AllocationProblem
        The plan's own.
    well_formed : bool
        Every field is within its own limits. How long the proof takes is bounded only then; otherwise it is left out.

    Returns
    -------
    violations : list of Violation
    confirmed : list of str
        What is proven, as a phrase; empty where nothing is.
    """
    scenes: list[_Scene] = []

    def set_scene() -> Iterator[Violation]:
        scenes.append(
            _Scene(
                plan=plan,
                problem=problem,
                models={model.name: index for index, model in enumerate(problem.models)},
                types={query.name: index for index, query in enumerate(problem.query_types)},
                options=tuple(options_of(problem)),
            )
        )
        yield from ()

    violations = guarded("problem", "a readable problem", set_scene)
    for scene in scenes:
        violations += guarded("deployments", "readable deployments", _check_deployments, scene)
        for needed, check in _CHECKS.items():
            violations += guarded("plan", needed, check, scene)
        if well_formed:
            violations += guarded("certificate", "a certificate", _check_certificate, scene)
    return violations, [phrase for scene in scenes for phrase in scene.confirmed]


# ---- what is bought


def _check_deployments(scene: _Scene) -> Iterator[Violation]:
    for d, deployment in enumerate(scene.plan.deployments):
        where = f"deployments[{d}]"
        if len(deployment.pipelines) != 1:
            yield found("pipelines_differ", where, len(deployment.pipelines), 1)
        if deployment.model not in scene.models:
            yield found("model_unknown", where, deployment.model, ", ".join(scene.models))
            continue
        option = yield from _recognised(scene, where, deployment)
        if option is not None:
            scene.bought.append(_Bought(f"{where}.pipelines[0]", d, option, deployment.pipelines[0]))
    for one in scene.bought:
        for needed, check in _PIPELINE_CHECKS.items():
            yield from guarded(one.where, needed, check, scene, one)


def _node_name(tier: Tier, option: Option) -> str:
    """How a plan names each machine of a configuration."""
    if option.given is None:
        return f"{tier.name} x{option.gpus}"
    return tier.name if tier.offer is None else tier.offer.name


def _nodes(tier: Tier, option: Option) -> tuple[str, ...]:
    return (_node_name(tier, option),) * (1 if option.given is None else option.given.machines)


def _recognised(scene: _Scene, where: str, deployment: Deployment) -> Generator[Violation, None, Option | None]:
    """The configuration that a deployment is, as the generator's value: the one that most of what it states fits."""
    pipeline = deployment.pipelines[0]
    problem, first = scene.problem, pipeline.stages[0]
    if problem.configurations:
        tiers = {t for t, tier in enumerate(problem.tiers) if pipeline.nodes[0] in _names(tier)}
    else:
        tiers = {t for t, tier in enumerate(problem.tiers) if pipeline.nodes[0].rpartition(" x")[0] == tier.name}
    if not tiers:
        known = sorted({name for tier in problem.tiers for name in _names(tier)})
        yield found("tier_unknown", f"{where}.pipelines[0]", pipeline.nodes[0], ", ".join(known))
        return None
    degrees = (first.tensor_parallel, len(pipeline.stages))
    model = scene.models[deployment.model]
    fitting = [
        one
        for one in scene.options
        if one.model == model and one.tier in tiers and (one.tensor_parallel, one.pipeline_parallel) == degrees
    ]
    if not fitting:
        value = f"{deployment.model} on {pipeline.nodes[0]} with TP {degrees[0]}, PP {degrees[1]}"
        limit = "those it lists"
        if not problem.configurations:
            limit = f"TP {list(problem.tensor_parallel)}, PP {list(problem.pipeline_parallel)}"
        yield found("configuration_not_allowed", f"{where}.pipelines[0]", value, limit)
        return None

    def fits(option: Option) -> tuple[bool, ...]:
        """Two precisions of one machine have the same name; what is stated beside it tells them apart."""
        tier = problem.tiers[option.tier]
        return (
            pipeline.nodes == _nodes(tier, option),
            first.compute_dtype == tier.weight_dtype,
            close(pipeline.cost_usd_per_hour, option.usd_per_hour(problem)),
        )

    return max(fitting, key=lambda option: sum(fits(option)))


def _names(tier: Tier) -> set[str]:
    return {tier.name if tier.offer is None else tier.offer.name}


def _check_machines(scene: _Scene, one: _Bought) -> Iterator[Violation]:
    pipeline, option = one.pipeline, one.option
    tier = scene.problem.tiers[option.tier]
    nodes = _nodes(tier, option)
    if pipeline.nodes != nodes:
        yield found("nodes_differ", one.where, ", ".join(pipeline.nodes), ", ".join(nodes))
    if pipeline.role != "both":
        yield found("role_not_supported", one.where, pipeline.role, "both")
    machine = nodes[0]
    if option.given is not None:
        machine = tier.name if tier.instance_type is None else tier.instance_type.name
    next_gpu = 0
    for s, stage in enumerate(pipeline.stages):
        where = f"{one.where}.stages[{s}]"
        if stage.instance_type != machine:
            yield found("instance_type_differs", where, stage.instance_type, machine)
        if stage.tensor_parallel != option.tensor_parallel:
            yield found("tensor_parallel_differs", where, stage.tensor_parallel, option.tensor_parallel)
        if stage.node >= len(nodes):
            yield found("node_unknown", where, stage.node, len(nodes) - 1)
        if stage.compute_dtype != tier.weight_dtype:
            yield found("precision_differs", where, stage.compute_dtype, tier.weight_dtype)
        if option.given is not None:
            continue
        indices = tuple(range(next_gpu, next_gpu + option.tensor_parallel))
        next_gpu += option.tensor_parallel
        if len(stage.gpu_indices) != option.tensor_parallel:
            yield found("gpu_count_differs", where, len(stage.gpu_indices), option.tensor_parallel)
        elif stage.gpu_indices != indices:
            yield found("gpu_indices_differ", where, _listed(stage.gpu_indices), _listed(indices))


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(str(number) for number in numbers)


def _check_layers(scene: _Scene, one: _Bought) -> Iterator[Violation]:
    total, stages = scene.problem.models[one.option.model].layers, len(one.pipeline.stages)
    reached = 0
    for s, stage in enumerate(one.pipeline.stages):
        where, (start, stop) = f"{one.where}.stages[{s}]", stage.layers
        if start > reached:
            yield found("layers_missing", where, start, reached)
        elif start < reached:
            yield found("layers_overlap", where, start, reached)
        if stop <= start:
            yield found("stage_empty", where, stage.layer_count, 1)
        elif not total // stages <= stage.layer_count <= -(-total // stages):
            even = f"{total // stages}" if total % stages == 0 else f"{total // stages} or {total // stages + 1}"
            yield found("layers_uneven", where, stage.layer_count, even)
        if stop > total:
            yield found("layers_outside_model", where, stop, total)
        reached = max(reached, stop)
    if reached < total:
        yield found("layers_missing", f"{one.where}.stages", total, reached)


def _check_shares_of_memory(scene: _Scene, one: _Bought) -> Iterator[Violation]:
    problem, option = scene.problem, one.option
    tier = problem.tiers[option.tier]
    scale = tier.weight_scale if problem.decisions.weights == "scaled" else 1.0
    weight_bytes = round(problem.models[option.model].weight_gb * GB * scale / option.gpus)
    left = int(tier.memory_gb * GB) - weight_bytes
    for s, stage in enumerate(one.pipeline.stages):
        where = f"{one.where}.stages[{s}]"
        # One byte: the same product in another order may round to the other side.
        if abs(stage.weight_bytes - weight_bytes) > 1:
            yield found("weight_share_differs", where, stage.weight_bytes, weight_bytes)
        beside = (stage.activation_bytes, stage.other_bytes or 0, stage.reserved_bytes, stage.start_kv_cache_bytes)
        if any(beside):
            yield found("activations_stated", where, sum(beside), 0)
        if option.given is None and abs(stage.kv_cache_bytes - left) > 1:
            yield found("kv_cache_share_differs", where, stage.kv_cache_bytes, left)


def _check_price(scene: _Scene, one: _Bought) -> Iterator[Violation]:
    stated, cost = one.pipeline.cost_usd_per_hour, one.option.usd_per_hour(scene.problem)
    if not close(stated, cost):
        yield found("pipeline_cost_differs", one.where, stated, cost)
    if one.pipeline.egress_usd_per_hour != 0:
        yield found("pipeline_egress_differs", one.where, one.pipeline.egress_usd_per_hour, 0)


def _check_predictions(scene: _Scene, one: _Bought) -> Iterator[Violation]:
    stated = one.pipeline.predictions
    for name in type(stated).model_fields:
        prediction = getattr(stated, name)
        if not prediction.low <= prediction.value <= prediction.high:
            band = f"{prediction.low:.6g} to {prediction.high:.6g}"
            yield found("band_excludes_value", f"{one.where}.predictions.{name}", prediction.value, band)


_PIPELINE_CHECKS: dict[str, Callable[[_Scene, _Bought], Iterator[Violation]]] = {
    "machines of a configuration": _check_machines,
    "layers in order": _check_layers,
    "a share of the weights on each GPU": _check_shares_of_memory,
    "a price": _check_price,
    "predictions": _check_predictions,
}


def _check_choice(scene: _Scene) -> Iterator[Violation]:
    """Eqs. 5d, 5e: a configuration is bought in one place, and where the problem says so, one of a pair, once."""
    seen: dict[int, str] = {}
    pairs: dict[tuple[int, int], str] = {}
    for one in scene.bought:
        option = one.option
        names = f"{scene.problem.models[option.model].name} on {scene.problem.tiers[option.tier].name}"
        if option.number in seen:
            yield found("configuration_repeated", one.where, names, seen[option.number])
        elif scene.problem.decisions.replicas == "one" and (option.model, option.tier) in pairs:
            yield found("second_of_model_and_tier", one.where, names, pairs[option.model, option.tier])
        if scene.problem.decisions.replicas == "one" and one.pipeline.count != 1:
            yield found("replicas_not_one", one.where, one.pipeline.count, 1)
        seen.setdefault(option.number, one.where)
        pairs.setdefault((option.model, option.tier), one.where)


# ---- what is sent where


def _check_routes(scene: _Scene) -> Iterator[Violation]:
    """Eqs. 5b, 5k. A configuration that is used is bought, as routes lead to deployments."""
    seen: dict[tuple[str, int], str] = {}
    sums = dict.fromkeys(scene.types, 0.0)
    for r, route in enumerate(scene.plan.routes):
        where = f"routes[{r}]"
        if not 0 <= route.deployment < len(scene.plan.deployments):
            yield found("route_deployment_unknown", where, route.deployment, len(scene.plan.deployments) - 1)
        if route.query_type not in sums:
            yield found("route_query_type_unknown", where, route.query_type, ", ".join(scene.types))
            continue
        if not route.fraction > 0:
            yield found("route_empty", where, route.fraction, 0)
        if (route.query_type, route.deployment) in seen:
            yield found("route_repeated", where, route.query_type, seen[route.query_type, route.deployment])
        seen.setdefault((route.query_type, route.deployment), where)
        sums[route.query_type] += route.fraction
    for query in scene.problem.query_types:
        where, unserved = f"routes of {query.name}", 1 - sums[query.name]
        if not unserved >= -LIMIT_TOLERANCE:
            yield found("served_too_much", where, sums[query.name], 1)
        if not unserved <= query.max_unserved + LIMIT_TOLERANCE:
            yield found("unserved_too_much", where, unserved, query.max_unserved)


def _within(value: float, limit: float) -> bool:
    """False for NaN."""
    return value <= limit * (1 + LIMIT_TOLERANCE)


def _check_capacity(scene: _Scene) -> Iterator[Violation]:
    """Eqs. 5f, 5g."""
    terms, shares, counts = scene.terms(), scene.shares(), scene.counts()
    used = (terms.load * shares).sum(axis=0)
    held = terms.weight_gb + (terms.cache_gb * shares).sum(axis=0) / counts
    for column, one in enumerate(scene.bought):
        if not _within(used[column], counts[column]):
            yield found("compute_exceeded", one.where, used[column].item(), counts[column].item())
        if not _within(held[column], terms.memory_gb[column]):
            yield found("memory_exceeded", one.where, held[column].item(), terms.memory_gb[column].item())


def _check_promises(scene: _Scene) -> Iterator[Violation]:
    """Eqs. 5i, 5j."""
    terms, shares, decisions = scene.terms(), scene.shares(), scene.problem.decisions
    for i, query in enumerate(scene.problem.query_types):
        whole = shares[i].sum() if decisions.slo_on == "served" else 1.0
        for code, limit, values in (
            ("delay", query.delay_limit_s, terms.delay_s[i]),
            ("ttft", query.ttft_limit_s, terms.ttft_s[i]),
            ("error", query.error_limit, terms.error[i]),
        ):
            if limit is None:
                continue
            if code == "error" or decisions.delay == "average":
                mean = (values @ shares[i]).item()
                if not _within(mean, limit * whole):
                    yield found(f"{code}_exceeded", f"routes of {query.name}", mean, limit * whole)
                continue
            for column, one in enumerate(scene.bought):
                if shares[i, column] > 0 and not _within(values[column], limit):
                    where = f"routes of {query.name} to deployments[{one.deployment}]"
                    yield found(f"route_{code}_exceeded", where, values[column].item(), limit)


# ---- money and storage


def _stored_copies(scene: _Scene, terms: Terms, shares: FloatArray) -> list[int]:
    """A bought configuration of each pair whose weights are stored, as often as they are."""
    seen: dict[tuple[int, ...], int] = {}
    for column, pair in enumerate(terms.pair.tolist()):
        if scene.problem.decisions.model_storage == "once":
            seen.setdefault((pair,), column)
            continue
        for i in np.flatnonzero(shares[:, column] > 0).tolist():
            seen.setdefault((i, pair), column)
    return list(seen.values())


def _check_spending(scene: _Scene) -> Iterator[Violation]:
    """Eqs. 5c, 5h, and the objective 5a."""
    plan, problem = scene.plan, scene.problem
    if plan.objective_name != _OBJECTIVE:
        yield found("objective_name_differs", "objective_name", plan.objective_name, _OBJECTIVE)
    if not scene.complete():
        return
    terms, shares, counts = scene.terms(), scene.shares(), scene.counts()
    stored, served = _stored_copies(scene, terms, shares), shares.sum(axis=1)
    storage_gb = (terms.copy_gb[stored].sum() + terms.traffic_gb @ served).item()
    storage_usd = (terms.copy_usd[stored].sum() + terms.traffic_usd @ served).item()
    spent = (terms.rent_usd @ counts).item() + storage_usd
    if not _within(storage_gb, problem.storage_capacity_gb):
        yield found("storage_exceeded", "routes", storage_gb, problem.storage_capacity_gb)
    if not _within(spent, problem.budget_usd):
        yield found("budget_exceeded", "deployments", spent, problem.budget_usd)
    unserved = np.maximum(0.0, 1.0 - served)
    total = spent + ((terms.delay_usd * shares).sum() + terms.unserved_usd @ unserved).item()
    if not close(plan.objective, total):
        yield found("objective_differs", "objective", plan.objective, total)


def _check_totals(scene: _Scene) -> Iterator[Violation]:
    plan = scene.plan
    if plan.egress_usd_per_hour != 0:
        yield found("plan_egress_differs", "egress_usd_per_hour", plan.egress_usd_per_hour, 0)
    if not scene.complete():
        return
    usd_per_hour = sum(one.pipeline.count * one.option.usd_per_hour(scene.problem) for one in scene.bought)
    if not close(plan.cost_usd_per_hour, usd_per_hour):
        yield found("plan_cost_differs", "cost_usd_per_hour", plan.cost_usd_per_hour, usd_per_hour)
    queries, served = scene.problem.query_types, scene.shares().sum(axis=1).tolist()
    per_hour = sum(query.requests_per_hour * share for query, share in zip(queries, served, strict=True))
    if not close(plan.requests_per_s, per_hour / SECONDS_PER_HOUR):
        yield found("served_rate_differs", "requests_per_s", plan.requests_per_s, per_hour / SECONDS_PER_HOUR)
    tokens = sum(
        query.requests_per_hour * share * query.output_tokens for query, share in zip(queries, served, strict=True)
    )
    stated, price = plan.usd_per_million_output_tokens, usd_per_hour / tokens * 1e6 if tokens > 0 else 0.0
    if not close(stated, price):
        yield found("token_price_differs", "usd_per_million_output_tokens", stated, price)


def _check_plan_status(scene: _Scene) -> Iterator[Violation]:
    yield from check_status(scene.plan, minimised=True)


def _check_certificate(scene: _Scene) -> Iterator[Violation]:
    plan, certificate = scene.plan, scene.plan.certificate
    if certificate is None or plan.bound is None:
        return
    try:
        proven = _proven(scene.problem, certificate)
    except ValueError as error:
        yield found("certificate_invalid", "certificate", str(error), "a tree of parts with usable prices")
        return
    if not plan.bound - proven <= BOUND_TOLERANCE * abs(plan.bound):
        yield found("bound_not_proven", "bound", plan.bound, proven)
        return
    parts = sum(not node.parts for node in certificate.nodes)
    by = "by prices of its limits" + (f" in {parts} parts" if parts > 1 else "")
    scene.confirmed.append(f"lower bound {plan.bound:.6g} $ confirmed, {by}")


def _proven(problem: AllocationProblem, certificate: Certificate) -> float:
    # Only this proof needs a compiler.
    from hetplan.verification.allocation_bound import proven_bound

    return proven_bound(problem, certificate)


_CHECKS: dict[str, Callable[[_Scene], Iterator[Violation]]] = {
    "a choice of configurations": _check_choice,
    "routes": _check_routes,
    "compute and memory of replicas": _check_capacity,
    "delays and errors": _check_promises,
    "a budget and storage": _check_spending,
    "totals": _check_totals,
    "a status, bound and gap": _check_plan_status,
}
