"""From an allocation plan to placement plans: each deployment as one model on the very machines that it rents.

What the allocation problem states of a configuration is its own table; here memory and times are computed anew, by the
rules of placement plans, so that what is launched is sound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from hetplan.catalog.calibration import Calibration
from hetplan.catalog.engines import EngineProfile
from hetplan.catalog.hardware import InstanceType
from hetplan.catalog.model import ModelSpec
from hetplan.catalog.offers import Cluster, Offer, Pool
from hetplan.catalog.tables import get_calibration
from hetplan.errors import InfeasibleError, InvalidInputError, Reason
from hetplan.estimator.base import make_estimator
from hetplan.estimator.pipeline import StageShape, even_layers, sequence_bytes, sequences_that_fit, stage_memories
from hetplan.plan import Pipeline, Plan
from hetplan.problem.allocation import AllocationProblem, Configuration, ServedModel, Tier
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import PipelineChoice, Solution
from hetplan.solvers.build import build_plan
from hetplan.solvers.placement.choice import choose_batch
from hetplan.units import GIB, SECONDS_PER_HOUR
from hetplan.workload.requests import QueryType, Workload

_SAME_PRICE = 1e-9


def build_placement_plans(
    plan: Plan,
    problem: AllocationProblem,
    *,
    engine: EngineProfile | None = None,
    calibrations: Mapping[str, Calibration] | None = None,
) -> tuple[Plan, ...]:
    """One placement plan for each deployment, in order; see `hetplan.placement_plans`.

    Raises
    ------
    InvalidInputError
        If the allocation problem does not say which checkpoints and machines there are, or says of them what cannot be.
    InfeasibleError
        If a deployment does not fit its machines by the rules of placement plans.
    """
    if not problem.configurations:
        raise InvalidInputError(
            "the problem lists no configurations: its GPUs are rented one by one, and a launch takes whole machines. "
            "Give configurations, or make it with AllocationProblem.from_catalog"
        )
    return tuple(_placed(plan, problem, index, engine, calibrations or {}) for index in range(len(plan.deployments)))


def _placed(
    plan: Plan,
    problem: AllocationProblem,
    index: int,
    engine: EngineProfile | None,
    calibrations: Mapping[str, Calibration],
) -> Plan:
    pipeline = plan.deployments[index].pipelines[0]
    model, tier, configuration = _found(plan, problem, index)
    where = f"{model.name} on {tier.name}"
    machine, offer = _machine(tier, pipeline, configuration, where)
    asked = PlacementProblem(
        model=_spec(model, tier),
        cluster=Cluster(
            instance_types=(machine,),
            pools=(Pool(offer=offer, count=pipeline.count * configuration.machines),),
        ),
        workload=_workload(plan, problem, index, where),
        engine=engine,
        calibrations=(calibrations.get(machine.gpu.name) or get_calibration(machine.gpu),),
    )
    choice, requests_per_s = _choice(asked, pipeline, machine, offer, where)
    solution = Solution(
        pipelines=(choice,) * pipeline.count,
        objective=requests_per_s * pipeline.count,
        parameters={"deployment": index, "allocation_usd": plan.objective},
    )
    return build_plan(asked, solution, solver=plan.provenance.solver, seed=plan.provenance.seed)


# ---- what the allocation says


def _found(plan: Plan, problem: AllocationProblem, index: int) -> tuple[ServedModel, Tier, Configuration]:
    """Model, tier and configuration of a deployment.

    Two precisions of one machine have the same name: the number format of the stages tells them apart.
    """
    deployment = plan.deployments[index]
    pipeline = deployment.pipelines[0]
    first, wanted = pipeline.stages[0], (pipeline.stages[0].tensor_parallel, len(pipeline.stages))
    found = [
        (problem.models[one.model], problem.tiers[one.tier], one)
        for one in problem.configurations
        if problem.models[one.model].name == deployment.model
        and _node_name(problem.tiers[one.tier]) == pipeline.nodes[0]
        and (one.tensor_parallel, one.pipeline_parallel, one.machines) == (*wanted, len(pipeline.nodes))
    ]
    if not found:
        raise InvalidInputError(
            f"deployments[{index}] is no configuration of the plan's problem: {deployment.model} on "
            f"{', '.join(pipeline.nodes)} (TP {wanted[0]}, PP {wanted[1]}). Plan again"
        )
    return next((one for one in found if one[1].weight_dtype == first.compute_dtype), found[0])


def _node_name(tier: Tier) -> str:
    return tier.name if tier.offer is None else tier.offer.name


def _spec(model: ServedModel, tier: Tier) -> ModelSpec:
    """The checkpoint, quantised while loading where the tier has it so."""
    if model.spec is None:
        raise InvalidInputError(
            f"model {model.name!r} has no spec, so that nothing is known of its layers and checkpoint; give "
            "ServedModel(spec=...), or make the problem with AllocationProblem.from_catalog"
        )
    spec = model.spec if model.spec.name == model.name else model.spec.replace(name=model.name)
    return spec if tier.weight_scale == 1.0 else spec.with_dtypes(weight_dtype=tier.weight_dtype)


def _machine(tier: Tier, pipeline: Pipeline, configuration: Configuration, where: str) -> tuple[InstanceType, Offer]:
    for name, value in (("instance_type", tier.instance_type), ("offer", tier.offer)):
        if value is None:
            raise InvalidInputError(
                f"tier {tier.name!r} has no {name}, so that no machine can be started for it; give Tier({name}=...), "
                "or make the problem with AllocationProblem.from_catalog"
            )
    assert tier.instance_type is not None and tier.offer is not None  # noqa: S101, PT018
    machine, offer = tier.instance_type, tier.offer
    if offer.instance_type != machine.name:
        raise InvalidInputError(
            f"tier {tier.name!r}: its offer is of {offer.instance_type}, its instance_type is {machine.name}; they "
            "have to be one"
        )
    price = configuration.machines * offer.billed_usd_per_hour
    if not math.isclose(price, configuration.usd_per_hour, rel_tol=_SAME_PRICE, abs_tol=_SAME_PRICE):
        raise InvalidInputError(
            f"{where}: the configuration costs {configuration.usd_per_hour:.6g} $/h, and its {configuration.machines} "
            f"machines {price:.6g} $/h by the offer {offer.name}; change usd_per_hour or the offer's price"
        )
    stands = 1 + max(stage.node for stage in pipeline.stages)
    if stands != configuration.machines:
        raise InvalidInputError(
            f"{where}: the configuration rents {configuration.machines} machines, and its stages stand on {stands}; "
            "correct machines"
        )
    return machine, offer


def _workload(plan: Plan, problem: AllocationProblem, index: int, where: str) -> Workload:
    """The mix of query types that is sent to a deployment, at the plan's rates."""
    shares = {route.query_type: route.fraction for route in plan.routes if route.deployment == index}
    types = tuple(
        QueryType(
            name=query.name,
            requests_per_s=shares[query.name] * query.requests_per_hour / SECONDS_PER_HOUR,
            input_tokens=query.input_tokens,
            output_tokens=query.output_tokens,
        )
        for query in problem.query_types
        if shares.get(query.name, 0.0) > 0
    )
    if not types:
        raise InvalidInputError(
            f"{where}: no query type is sent there, so that nothing says how long its requests are. Plan again with "
            "solver='milp', which buys nothing idle, or take the deployment out"
        )
    return Workload(query_types=types)


# ---- what is placed


def _choice(
    problem: PlacementProblem, pipeline: Pipeline, machine: InstanceType, offer: Offer, where: str
) -> tuple[PipelineChoice, float]:
    """One copy: even layers at the allocation's degrees, in its machines, at the best batch."""
    depth = len(pipeline.stages)
    if depth > problem.model.layer_count:
        raise InvalidInputError(f"{where}: {depth} stages for {problem.model.layer_count} layers; lower PP")
    stops = [0]
    for size in even_layers(problem.model.layer_count, depth):
        stops.append(stops[-1] + size)
    shapes = tuple(
        StageShape((stops[s], stops[s + 1]), machine, stage.tensor_parallel, stage.node)
        for s, stage in enumerate(pipeline.stages)
    )
    _refuse_too_large(problem, shapes, where)
    estimator = make_estimator(problem)
    chosen = choose_batch(problem, estimator, shapes, (offer.name,) * len(pipeline.nodes))
    if chosen is None:
        most = sequences_that_fit(problem, estimator, shapes)
        raise InfeasibleError(
            f"{where}: each of {depth} stages has a sequence in flight, and the KV cache holds {most} of "
            f"{problem.workload.mean_input_tokens + problem.workload.mean_output_tokens:.0f} tokens. Leave the "
            "configuration out, or raise its tensor-parallel degree",
            [Reason("memory", where, depth, most, "sequences")],
        )
    return chosen


def _refuse_too_large(problem: PlacementProblem, shapes: Iterable[StageShape], where: str) -> None:
    """What the configuration was thought to fit, by the memory rule of placement plans."""
    estimator, stages = make_estimator(problem), tuple(shapes)
    longest = sequence_bytes(problem, estimator, stages, float(problem.longest_request_tokens))
    for number, (memory, one) in enumerate(zip(stage_memories(problem, estimator, stages), longest, strict=True)):
        needed = memory.taken_bytes + one
        if needed > memory.usable_bytes:
            gpu, others = stages[number].machine.gpu.name, memory.taken_bytes - memory.weight_bytes
            raise InfeasibleError(
                f"{where}: the allocation thought it to fit, but each {gpu} of stage {number + 1} needs "
                f"{needed / GIB:.2f} GiB: {memory.weight_bytes / GIB:.2f} GiB for weights, {others / GIB:.2f} GiB for "
                f"activations and the engine, {one / GIB:.2f} GiB for the cache of one request of "
                f"{problem.longest_request_tokens} tokens; {memory.usable_bytes / GIB:.2f} GiB may be used. Leave the "
                "configuration out, or raise its degrees",
                [Reason("memory", f"{where}, stage {number + 1}", needed / GIB, memory.usable_bytes / GIB, "GiB")],
            )
