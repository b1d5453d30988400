"""A plan lived through: traffic, and where asked a spot market under a policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from hetplan.catalog.tables import get_offer, notice_s
from hetplan.errors import InvalidInputError
from hetplan.estimator.pipeline import StageShape
from hetplan.plan import Pipeline, Plan
from hetplan.policies import Policy, RentedMarket
from hetplan.policies import policy as policy_by_name
from hetplan.simulator.availability import Availability
from hetplan.simulator.billing import Billing
from hetplan.simulator.fleet import Fleet, ReplicaKind, Routing, kinds_of
from hetplan.simulator.market import Market
from hetplan.simulator.outlook import Outlook
from hetplan.simulator.results import SimulationResult
from hetplan.simulator.spot_run import Costs, Replan, SpotRun
from hetplan.simulator.start_times import StartTimes
from hetplan.simulator.traffic import Traffic
from hetplan.units import SECONDS_PER_HOUR

FloatArray = NDArray[np.float64]
OnProgress = Callable[[int, int], None]

# On-demand machines that may be had of a pool at a time: an account's quota, not the cloud's.
_ON_DEMAND_FREE = 64
_SLICES = 100


@dataclass(frozen=True, slots=True, eq=False)
class SpotScenario:
    """A spot market for the machines of a plan, and who deals with it.

    Attributes
    ----------
    availability : Availability
        Machines that each pool has over time; a pool is named as its instance type.
    policy : str or Policy
        See `hetplan.policies`.
    usd_per_hour : mapping of (pool, "spot" | "on_demand") to float
    notice_s : mapping of str to float
        Warning before a machine of the pool is taken.
    start_times : StartTimes
    on_demand_free : int
        On-demand machines that each pool has at any time.
    """

    availability: Availability
    policy: str | Policy
    usd_per_hour: Mapping[tuple[str, str], float]
    notice_s: Mapping[str, float]
    start_times: StartTimes = field(default_factory=StartTimes)
    on_demand_free: int = _ON_DEMAND_FREE

    @classmethod
    def for_plan(
        cls,
        plan: Plan,
        availability: Availability,
        policy: str | Policy = "hetplan",
        *,
        start_times: StartTimes | None = None,
        on_demand_free: int = _ON_DEMAND_FREE,
    ) -> Self:
        """The plan's machine types at their prices.

        Prices come from the plan's own offers; where it has none of a market, from the catalogue, for the same place.

        Raises
        ------
        UnknownNameError
            If the catalogue lacks such an offer.
        """
        prices: dict[tuple[str, str], float] = {}
        notices: dict[str, float] = {}
        for pool in plan.placement.cluster.pools:
            offer = pool.offer
            name = offer.instance_type
            prices[name, offer.market] = offer.billed_usd_per_hour
            notices[name] = notice_s(offer.provider) if offer.notice_s is None else offer.notice_s
        for pool in plan.placement.cluster.pools:
            offer = pool.offer
            for market in ("spot", "on_demand"):
                if (offer.instance_type, market) not in prices and offer.market != "owned":
                    found = get_offer(offer.instance_type, provider=offer.provider, region=offer.region, market=market)
                    prices[offer.instance_type, market] = found.billed_usd_per_hour
        return cls(
            availability, policy, prices, notices, StartTimes() if start_times is None else start_times, on_demand_free
        )


def simulate_plan(
    plan: Plan,
    traffic: Traffic,
    *,
    spot: SpotScenario | None = None,
    routing: Routing = "round_robin",
    seed: int = 0,
    log_steps: int = 0,
    until_s: float = math.inf,
    replan: Callable[[Plan, Mapping[str, int]], Plan | None] | None = None,
    on_progress: OnProgress | None = None,
) -> SimulationResult:
    """See `hetplan.simulate`."""
    if not until_s > 0:
        raise InvalidInputError(f"until_s is a number of seconds above 0, got {until_s!r}")
    kinds = kinds_of(plan)
    fleet = Fleet(kinds, traffic, routing=routing, log_steps=log_steps)
    pipelines = [pipeline for deployment in plan.deployments for pipeline in deployment.pipelines]
    names = [
        (f"pipeline {number}" + (f"/{copy}" if pipeline.count > 1 else ""), number - 1)
        for number, pipeline in enumerate(pipelines, start=1)
        for copy in range(1, pipeline.count + 1)
    ]
    if spot is None:
        for _, kind in names:
            fleet.add(kind)
        _serve_all(fleet, until_s, on_progress)
        finish = fleet.requests["finish_s"]
        end_s = float(np.nanmax(finish)) if not np.isnan(finish).all() else 0.0
        if not fleet.idle:
            end_s = until_s
        cost = (plan.cost_usd_per_hour - plan.egress_usd_per_hour) * end_s / SECONDS_PER_HOUR
        return SimulationResult(
            end_s=end_s,
            cost_usd=cost,
            query_types=traffic.query_types,
            table=fleet.requests,
            replica_names=tuple(name for name, _ in names),
            busy_s=fleet.replicas["busy_s"].copy(),
            steps=fleet.log,
        )
    return _with_spot(plan, fleet, kinds, pipelines, names, spot, seed, until_s, replan, on_progress)


def _serve_all(fleet: Fleet, until_s: float, on_progress: OnProgress | None) -> None:
    """To the end, telling now and then how far it is."""
    if on_progress is not None and not fleet.traffic.clients:
        for until in np.linspace(0, min(fleet.traffic.arrival_s[-1], until_s), _SLICES)[1:].tolist():
            fleet.advance(until)
            on_progress(int(np.searchsorted(fleet.traffic.arrival_s, until)), len(fleet.traffic))
    fleet.advance(until_s)
    if on_progress is not None:
        on_progress(len(fleet.traffic), len(fleet.traffic))


def _with_spot(
    plan: Plan,
    fleet: Fleet,
    kinds: list[ReplicaKind],
    pipelines: list[Pipeline],
    names: list[tuple[str, int]],
    spot: SpotScenario,
    seed: int,
    until_s: float,
    replan: Callable[[Plan, Mapping[str, int]], Plan | None] | None,
    on_progress: OnProgress | None,
) -> SimulationResult:
    policy = policy_by_name(spot.policy) if isinstance(spot.policy, str) else spot.policy
    types = {pool.offer.name: pool.offer.instance_type for pool in plan.placement.cluster.pools}
    needs = [tuple(types[node] for node in pipeline.nodes) for pipeline in pipelines]
    used = {pool for pools in needs for pool in pools}
    lacking = sorted(used - set(spot.availability.pools))
    if lacking:
        raise InvalidInputError(
            f"the plan uses {lacking[0]}, of which the availability says nothing; its pools: "
            f"{', '.join(spot.availability.pools)}. A pool is named as its instance type"
        )
    market_of: RentedMarket = "on_demand" if policy.name == "on-demand" else "spot"
    held = {
        pool: sum(needs[kind].count(pool) for _, kind in names) if market_of == "spot" else 0
        for pool in spot.availability.pools
    }
    market = Market(spot.availability, notice_s=spot.notice_s, seed=seed, held=held)
    outlook = Outlook(
        market,
        instance_types={pool: pool for pool in spot.availability.pools},
        usd_per_hour=spot.usd_per_hour,
        on_demand_free=spot.on_demand_free,
        prior_return_s=None,
    )
    billing = Billing(spot.usd_per_hour)
    run = SpotRun(
        fleet,
        [(name, kind, needs[kind]) for name, kind in names],
        policy=policy,
        market=market,
        outlook=outlook,
        billing=billing,
        starts=spot.start_times,
        start_together=policy.parallel_start,
        costs=[costs_of(kind) for kind in kinds],
        answer_tokens=_known_answers(plan),
        market_of=market_of,
        seed=seed,
        replan=_over_pools(plan, replan),
    )
    run.run(until_s=until_s, on_progress=on_progress)
    end_s = run.end_s
    return SimulationResult(
        end_s=end_s,
        cost_usd=billing.cost_usd(end_s),
        query_types=fleet.traffic.query_types,
        table=fleet.requests,
        cost_by_market_usd=billing.by_market(end_s),
        spans=tuple(run.spans),
        happenings=tuple(run.happenings),
        availability={pool: spot.availability.steps(pool) for pool in spot.availability.pools},
        replica_names=tuple(run.replica_names),
        busy_s=fleet.replicas["busy_s"].copy(),
        steps=fleet.log,
    )


def _known_answers(plan: Plan) -> FloatArray:
    """Lengths of answers as the plan's workload has them, a thousand at even levels."""
    found = [
        query.output_tokens.quantile(level)
        for query in plan.placement.workload.query_types
        for level in (np.arange(1000) + 0.5) / 1000
    ]
    return np.array(found)


def _over_pools(plan: Plan, replan: Callable[[Plan, Mapping[str, int]], Plan | None] | None) -> Replan | None:
    """A plan over machines of pools, as pipelines."""
    if replan is None:
        return None

    def found(counts: Mapping[str, int]) -> list[tuple[tuple[str, ...], ReplicaKind]]:
        other = replan(plan, counts)
        if other is None:
            return []
        types = {pool.offer.name: pool.offer.instance_type for pool in other.placement.cluster.pools}
        pipelines = [pipeline for deployment in other.deployments for pipeline in deployment.pipelines]
        return [
            (tuple(types[node] for node in pipeline.nodes), kind)
            for pipeline, kind in zip(pipelines, kinds_of(other), strict=True)
            for _ in range(pipeline.count)
        ]

    return found


def costs_of(kind: ReplicaKind) -> Costs:
    """What moving a request of a pipeline takes, by the estimator.

    Recomputing goes at the rate of the slowest stage, after one pass through all; sending goes over each machine's
    network at once, each sending what its own layers hold.
    """
    model, estimator, stages = kind.problem.model, kind.estimator, kind.stages
    tokens = float(min(kind.max_step_tokens, 2048))
    each = [_stage_s(kind, stage, number, tokens) for number, stage in enumerate(stages)]
    per_node: dict[int, float] = {}
    for stage in stages:
        share = stage.layers[1] - stage.layers[0]
        whole = model.kv_bytes_per_token(tensor_parallel=stage.tensor_parallel) * stage.tensor_parallel
        per_node[stage.node] = per_node.get(stage.node, 0.0) + whole * share / model.layer_count
    rates = {stage.node: stage.machine.inter_node_link.bytes_per_s for stage in stages}
    decode = [
        float(
            estimator.stage_seconds(
                model,
                stage.machine,
                layers=stage.layers,
                tensor_parallel=stage.tensor_parallel,
                batch=max(kind.max_num_seqs / len(stages), 1.0),
                input_tokens=kind.problem.workload.mean_input_tokens,
                output_tokens=2.0,
                first=number == 0,
                last=number + 1 == len(stages),
                phase="decode",
            )[0, 0]
        )
        for number, stage in enumerate(stages)
    ]
    return Costs(
        recompute_token_s=max(each) / tokens,
        recompute_least_s=sum(each) - max(each),
        transfer_token_s=max(per_node[node] / rates[node] for node in per_node),
        step_s=sum(decode),
    )


def _stage_s(kind: ReplicaKind, stage: StageShape, number: int, tokens: float) -> float:
    return float(
        kind.estimator.stage_seconds(
            kind.problem.model,
            stage.machine,
            layers=stage.layers,
            tensor_parallel=stage.tensor_parallel,
            batch=1,
            input_tokens=tokens,
            output_tokens=1.0,
            first=number == 0,
            last=number + 1 == len(kind.stages),
            phase="prefill",
        )[0, 0]
    )
