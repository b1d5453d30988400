"""Cheapest output with interruptions: beside every placement by hand, where spot begins to lose, and checked again."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import pytest

import hetplan as hp
from hetplan.estimator.base import make_estimator
from hetplan.estimator.expected_cost import expected_pipeline, expected_usd_per_million
from hetplan.estimator.interruption import interruption_cost, usd_per_million_output_tokens
from hetplan.estimator.pipeline import pipeline_times
from hetplan.estimator.prediction import shapes_of
from hetplan.solvers.base import get_solver
from tests.builders import make_cluster, make_gpu, make_machine, make_pool, problem_of, tiny_llama, verified
from tests.solvers.whole_placements import BestPipeline, WholePlacements

BIG = make_machine("big", gpu=make_gpu("B1", gb_per_s=600, tflops=120))
SMALL = make_machine("small", gpu=make_gpu("S1", memory_gib=4, gb_per_s=100, tflops=20))


def problem(
    taken_per_hour: float | None = 0.5,
    *,
    notice_s: float | None = 30.0,
    spot_usd: float = 0.4,
    rate: float | None = None,
    **changes: Any,
) -> hp.PlacementProblem:
    spot = {"market": "spot", "notice_s": notice_s, "interruptions_per_hour": taken_per_hour}
    cluster = make_cluster(
        (BIG, make_pool(BIG, 2, usd=1.0)),
        (BIG, make_pool(BIG, 2, usd=spot_usd, **spot)),  # type: ignore[arg-type]
        (SMALL, make_pool(SMALL, 2, usd=0.15, **spot)),  # type: ignore[arg-type]
    )
    load = hp.Workload(input_tokens=500, output_tokens=60, requests_per_s=rate)
    options = {"objective": "expected_cost", "max_num_seqs": 8} | changes
    return problem_of(tiny_llama(), cluster, load, **options)


def markets(plan: hp.Plan) -> set[str]:
    return {name.rsplit("/", 1)[1] for pipeline in plan.deployments[0].pipelines for name in pipeline.nodes}


@cache
def placements() -> dict[tuple[int, ...], BestPipeline]:
    """The fastest pipeline on every set of machines: prices and interruptions do not enter."""
    return WholePlacements(problem(objective="throughput")).pipelines()


def by_hand(asked: hp.PlacementProblem) -> float:
    """The least expected cost over all sets of pipelines that the machines allow."""
    estimator, pools = make_estimator(asked), asked.cluster.pools
    offered = []
    for used, best in placements().items():
        offers = [pool.offer.name for pool, count in zip(pools, used, strict=True) for _ in range(count)]
        run = expected_pipeline(
            asked, estimator, best.stages, offers, micro_batch=best.micro_batch, requests_per_s=best.value
        )
        offered.append((used, run))
    least = math.inf
    for number in range(1, 5):
        for chosen in itertools.combinations_with_replacement(offered, number):
            taken = [sum(used[pool] for used, _ in chosen) for pool in range(len(pools))]
            if all(count <= pool.count for count, pool in zip(taken, pools, strict=True)):
                least = min(least, expected_usd_per_million(asked, [run for _, run in chosen]))
    return least


@pytest.mark.parametrize("taken_per_hour", [0.0, 0.3, 6.0])
@pytest.mark.parametrize("share", [None, 0.2, 0.55])
def test_no_placement_by_hand_is_much_cheaper(taken_per_hour: float, share: float | None) -> None:
    most = sum(sorted((best.value for best in placements().values()), reverse=True)[:2])
    asked = problem(taken_per_hour, rate=None if share is None else share * most)
    plan = verified(hp.optimize(asked, solver="exact", time_limit_s=4))
    least = by_hand(asked)
    print(f"{taken_per_hour} an hour, demand {share}: {plan.objective:.4f}, by hand {least:.4f} $/M")
    assert least * (1 - 1e-6) <= plan.objective <= 1.05 * least
    assert (plan.bound, plan.status, plan.objective_name) == (None, "feasible", "expected_cost")


@pytest.mark.parametrize("handling", ["none", "both"])
def test_spot_loses_where_the_formula_says(handling: str) -> None:
    """One spot machine of a kind beside an on-demand one: below the rate at which both cost the same, spot is taken."""

    def usd(per_hour: float) -> float:
        asked = problem(per_hour, handling=handling)
        (pipeline,) = on_demand.deployments[0].pipelines
        stages = shapes_of(on_demand.placement, pipeline)
        spot = asked.cluster.pools[1].offer
        prefill_s = float(pipeline_times(asked, make_estimator(asked), stages, pipeline.micro_batch).prefill.max())
        tokens = pipeline.predictions.output_tokens_per_s.value
        cost = interruption_cost(
            nodes=1, interruptions_per_hour=per_hour, notice_s=30.0, start_s=asked.start_s,
            start_deviation_s=asked.start_deviation_s, handling=asked.handling,
            prompt_tokens_in_flight=pipeline.max_num_seqs * 500, output_tokens_in_flight=pipeline.max_num_seqs * 30,
            prefill_tokens_per_s=pipeline.micro_batch * 500 / prefill_s, output_tokens_per_s=tokens,
        )  # fmt: skip
        return usd_per_million_output_tokens(
            cost, price_usd_per_hour=spot.price_usd_per_hour or 0.0, output_tokens_per_s=tokens
        )

    def planned(per_hour: float) -> hp.Plan:
        found = problem(per_hour, handling=handling)
        pair = make_cluster(*[(BIG, pool.replace(count=1)) for pool in found.cluster.pools[:2]])
        return hp.optimize(found.replace(cluster=pair), solver="dp-beam")

    on_demand = planned(1e4)
    assert markets(on_demand) == {"on_demand"}
    low, high = 0.0, 1e4
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if usd(middle) < on_demand.objective else (low, middle)
    cheap, dear = planned(0.98 * low), planned(1.02 * low)
    assert (markets(cheap), markets(dear)) == ({"spot"}, {"on_demand"})
    assert cheap.objective == pytest.approx(usd(0.98 * low), rel=1e-9)


def test_a_plan_tells_its_availability_and_cost() -> None:
    plan = verified(hp.optimize(problem(0.5), solver="dp-beam"))
    told = plan.provenance.parameters
    assert 0.9 < told["availability"] < 1  # type: ignore[operator]
    usd, tokens = told["expected_usd_per_hour"], told["expected_output_tokens_per_s"]
    assert plan.objective == pytest.approx(usd / 3600 / tokens * 1e6)  # type: ignore[operator]
    assert usd > plan.cost_usd_per_hour  # type: ignore[operator]
    assert plan.objective > plan.usd_per_million_output_tokens
    calm = hp.optimize(problem(0.0), solver="dp-beam")
    assert calm.provenance.parameters["availability"] == 1.0
    assert calm.objective == pytest.approx(calm.usd_per_million_output_tokens)


def test_a_demand_is_met_after_interruptions() -> None:
    base = hp.optimize(problem(0.0, rate=1.0), solver="dp-beam")
    # All that the cheapest plan serves while nothing is taken: with interruptions it takes more.
    rate = base.requests_per_s
    plan = verified(hp.optimize(problem(4.0, rate=rate), solver="dp-beam"))
    tokens = plan.provenance.parameters["expected_output_tokens_per_s"]
    assert tokens >= rate * 60 * (1 - 1e-9)  # type: ignore[operator]


def test_the_checker_recomputes_it() -> None:
    plan = hp.optimize(problem(0.5), solver="dp-beam")
    for path in ("start_s", "handling"):
        asked = plan.placement.model_copy(update={path: {"start_s": 500.0, "handling": "none"}[path]})
        codes = {violation.code for violation in hp.verify(plan.model_copy(update={"problem": asked}))}
        assert codes == {"objective_differs"}
    rated = hp.optimize(problem(0.5, rate=1.0), solver="dp-beam")
    more = rated.placement.replace(workload=hp.Workload(input_tokens=500, output_tokens=60, requests_per_s=500.0))
    assert "demand_not_met" in {v.code for v in hp.verify(rated.model_copy(update={"problem": more}))}


def test_what_is_not_known_of_spot_machines_is_asked_for() -> None:
    with pytest.raises(hp.InvalidInputError, match=r"how often .*spot is taken; give its offer interruptions_per_hour"):
        problem(None)
    with pytest.raises(hp.InvalidInputError, match="give its offer notice_s"):
        problem(notice_s=None)
    with pytest.raises(hp.InvalidInputError, match="hard limits only"):
        problem(slo=hp.Slo(ttft_s=1.0, hard=False), latency_penalty=1.0)
    with pytest.raises(hp.InvalidInputError, match="leave percentile out"):
        problem(rate=1.0, slo=hp.Slo(ttft_s=1.0, percentile=0.9))
    with pytest.raises(hp.UnsupportedFeatureError, match=r"hetplan\.optimize answers 'expected_cost'"):
        get_solver("even").solve(problem())
    with pytest.raises(hp.InvalidInputError, match="handling"):
        problem(handling="some")


def test_a_rate_that_interruptions_leave_no_room_for() -> None:
    served = hp.optimize(problem(objective="throughput"), solver="dp-beam").requests_per_s
    with pytest.raises(hp.NoSolutionError, match="after interruptions"):
        hp.optimize(problem(200.0, rate=0.75 * served, notice_s=0.0), solver="dp-beam")
    with pytest.raises(hp.HetplanError, match="req/s"):
        hp.optimize(problem(0.0, rate=9.0 * served), solver="dp-beam")
