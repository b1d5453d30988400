"""When another plan is asked for, and when it is worth switching to: made-up readings."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

import hetplan as hp
from hetplan.errors import RouterError
from hetplan.resolving import allocation_resolver, allocation_serving, asked_for, placement_resolver, replanner
from hetplan.runtime.controller.demand import Band, Reading, Resolved, Watched, keys_of, planned, read, watch, worth
from hetplan.runtime.controller.serving import Load, Serving
from hetplan.solvers.allocation.rolling import operated_usd_per_hour

KEY = ("m", None)
BAND = Band()


def reading(rate: float, tokens: float | None = 100.0) -> Reading:
    load = Load(model="m", requests_per_s=rate, mean_input_tokens=tokens, mean_output_tokens=tokens)
    return Reading(300.0, {KEY: load})


def asked(rates: Iterable[float], planned_for: float = 10.0) -> list[float]:
    """The rates that another plan is asked for."""
    watched, found = Watched(reading(planned_for).demand), []
    for rate in rates:
        watched, moved = watch(watched, reading(rate), BAND)
        found += [] if moved is None else [moved[KEY].requests_per_s]
    return found


def test_noise_within_the_band_asks_for_nothing() -> None:
    noise = random.Random(0)
    assert asked(10.0 * noise.uniform(0.85, 1.15) for _ in range(500)) == []


def test_a_single_reading_outside_asks_for_nothing() -> None:
    assert asked([10.0, 14.0, 10.0, 10.0, 6.0, 10.0, 10.0]) == []


@pytest.mark.parametrize("step", [13.0, 20.0, 40.0, 400.0, 7.0, 1.0, 0.0])
def test_a_step_asks_once_for_what_it_leads_to(step: float) -> None:
    assert asked([10.0] * 5 + [step] * 50) == [pytest.approx(step)]


def test_a_step_in_the_middle_of_a_window_asks_once() -> None:
    assert asked([10.0, 25.0] + [40.0] * 50) == [pytest.approx(40.0)]


def test_an_oscillation_asks_a_bounded_number_of_times() -> None:
    assert len(asked([10.0, 20.0] * 250)) <= 2


def test_few_requests_are_no_proof() -> None:
    assert asked([0.013, 0.007, 0.013, 0.013, 0.013], planned_for=0.01) == []


def test_longer_answers_ask_too() -> None:
    watched, found = Watched(reading(10.0).demand), []
    for _ in range(10):
        watched, moved = watch(watched, reading(10.0, tokens=200.0), BAND)
        found += [] if moved is None else [moved[KEY].mean_output_tokens]
    assert found == [200.0]


def test_lines_that_no_plan_tells_apart_are_counted_to_their_model() -> None:
    about = {"mean_input_tokens": 10.0, "mean_output_tokens": None, "requests_per_s": 1.0, "ended": 30}
    lines = [
        about | {"model": "m", "query_type": "chat"},
        about | {"model": "m", "query_type": "anything", "mean_input_tokens": 40.0, "ended": 60},
        about | {"model": "other", "query_type": None},
    ]
    found = read({"covered_s": 60.0, "demand": lines}, {KEY}).demand
    assert (found[KEY].requests_per_s, found[KEY].mean_input_tokens) == (2.0, 30.0)
    assert set(found) == {KEY}
    with pytest.raises(RouterError, match="makes no sense"):
        read({"covered_s": 60.0, "demand": [{}]}, {KEY})


def cheapest(rate: float) -> hp.Plan:
    return hp.optimize(
        model="llama-3.1-8b",
        cluster={"g6.xlarge": 8},
        workload=hp.Workload(input_tokens=200, output_tokens=20, requests_per_s=rate),
        objective="cost",
        solver="dp-beam",
    )


def optimize(problem: hp.PlacementProblem | hp.AllocationProblem) -> hp.Plan:
    return hp.optimize(problem, solver="dp-beam", time_limit_s=20)


def per_machine() -> float:
    return cheapest(0.01).requests_per_s


def test_a_plan_is_adopted_for_dollars_only_if_it_saves_more_than_it_costs() -> None:
    rate = per_machine()
    large, small = Serving.of(cheapest(3.5 * rate)), Serving.of(cheapest(0.5 * rate))
    offer = large.plans[0].placement.cluster.pools[0].offer
    demand = planned(small)
    long = worth(large, Resolved(small), demand, [offer], horizon_s=3600.0, start_s=120.0)
    assert long.unit == "usd"
    assert long.gain == pytest.approx(3 * offer.billed_usd_per_hour)
    assert long.cost == pytest.approx(offer.billed_usd_per_hour * 120 / 3600)
    assert long.switches
    short = worth(large, Resolved(small), demand, [offer], horizon_s=30.0, start_s=120.0)
    assert not short.switches
    assert 0 < short.gain < short.cost


def test_a_plan_that_serves_what_is_not_served_is_worth_requests() -> None:
    rate = per_machine()
    small, large = Serving.of(cheapest(0.5 * rate)), Serving.of(cheapest(2.5 * rate))
    offer = large.plans[0].placement.cluster.pools[0].offer
    found = worth(small, Resolved(large), planned(large), [offer, offer], horizon_s=3600.0, start_s=120.0)
    assert (found.unit, found.switches) == ("requests", True)
    assert found.gain == pytest.approx(1.5 * rate * 3600, rel=1e-6)
    assert found.cost > 0
    assert not worth(large, Resolved(small), planned(large), [], horizon_s=3600.0, start_s=120.0).switches


def test_the_plan_for_what_is_asked_for_keeps_the_engines_settings() -> None:
    rate = per_machine()
    serving = Serving.of(cheapest(0.5 * rate))
    load = planned(serving)["llama-3.1-8b", None].replace(requests_per_s=2.5 * rate, mean_input_tokens=210.0)
    found = placement_resolver(optimize, hp.verify)(serving, {("llama-3.1-8b", None): load})
    assert found is not None
    assert sum(p.count for p in found.serving.plans[0].deployments[0].pipelines) == 3
    assert found.serving.planned == (load,)
    problem = asked_for(serving.plans[0], load)
    # So little longer prompts do not change what engines are started with.
    assert problem.workload.mean_input_tokens == 200
    assert problem.longest_request_tokens == serving.plans[0].placement.longest_request_tokens
    longer = asked_for(serving.plans[0], load.replace(mean_input_tokens=400.0))
    assert longer.max_model_len == problem.longest_request_tokens
    # More than all machines can do: the most that they can.
    most = placement_resolver(optimize, hp.verify)(serving, {KEY: load.replace(requests_per_s=99 * rate)})
    assert most is not None
    assert sum(p.count for p in most.serving.plans[0].deployments[0].pipelines) == 8


def test_fewer_machines_are_planned_for_as_far_as_they_go() -> None:
    rate = per_machine()
    serving = Serving.of(cheapest(3.5 * rate))
    offer = serving.plans[0].placement.cluster.pools[0].offer.name
    found = replanner(optimize, hp.verify)(serving, {offer: 2})
    assert found is not None
    assert sum(p.count for p in found.plans[0].deployments[0].pipelines) == 2
    assert replanner(optimize, hp.verify)(serving, {offer: 0}) is None


def test_an_allocation_is_planned_for_the_measured_requests_of_each_query_type() -> None:
    problem = hp.AllocationProblem.canonical(query_types=6, models=6, tiers=10, seed=0)
    plan = hp.optimize(problem, solver="milp")
    asked: list[hp.AllocationProblem] = []

    def note(found: hp.PlacementProblem | hp.AllocationProblem) -> hp.Plan:
        asked.append(found)
        return hp.optimize(found, solver="milp")

    def placements(found: hp.Plan) -> list[hp.Plan]:
        return [cheapest(0.01)] * len(found.deployments)

    serving = allocation_serving(plan, placements(plan))
    name = problem.query_types[0].name
    assert {key[1] for key in keys_of(serving)} <= {q.name for q in problem.query_types}
    demand = {key: load.replace(requests_per_s=2 * load.requests_per_s) for key, load in planned(serving).items()}
    found = allocation_resolver(note, lambda _: [], placements)(serving, demand)
    assert found is not None
    served = sum(r.fraction for r in plan.routes if r.query_type == name)
    assert asked[0].query_types[0].requests_per_hour == pytest.approx(
        2 * served * problem.query_types[0].requests_per_hour
    )
    # By the allocation problem: what was bought for half of it, with the best shares, beside what is bought for all.
    assert found.serving.allocation is not None
    assert found.saved_usd_per_hour is not None
    assert found.saved_usd_per_hour >= -1e-6
    value = worth(serving, found, demand, [], horizon_s=3600.0, start_s=120.0)
    assert (value.unit, value.gain) == ("usd", found.saved_usd_per_hour)


def test_an_allocation_for_the_same_demand_saves_nothing() -> None:
    plan = hp.optimize(hp.AllocationProblem.canonical(query_types=6, models=6, tiers=10, seed=0), solver="milp")
    assert isinstance(plan.problem, hp.AllocationProblem)
    rates = {query.name: query.requests_per_hour for query in plan.problem.query_types}
    usd = operated_usd_per_hour(plan, rates) * plan.problem.horizon_hours
    assert usd == pytest.approx(plan.objective, rel=1e-6)
