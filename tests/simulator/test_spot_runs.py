"""Whole runs on spot markets: nothing is lost or doubled, time and money add up, whatever the policy."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import hetplan as hp
from hetplan.policies import POLICIES
from hetplan.report_simulation import cost_figure, latency_figure, percentile_figure, timeline_figure
from hetplan.simulator.engine import DONE
from hetplan.simulator.results import SimulationResult
from hetplan.simulator.spot import spot_market

POOLS = {"g6.xlarge": 3, "g5.xlarge": 3}
LOAD = hp.Workload(input_tokens=400, output_tokens=150, requests_per_s=1.5)
SEEDS = range(4)


@pytest.fixture(scope="module")
def plan() -> hp.Plan:
    """Pipelines of two machines and of one, so that a loss takes part of one or all of it."""
    return hp.optimize(
        model="llama-3.1-8b", cluster=POOLS, workload=LOAD, solver="alpaserve", time_limit_s=5.0
    )


@pytest.fixture(scope="module")
def traffic() -> hp.Traffic:
    return hp.Traffic.poisson(LOAD, duration_s=1500, seed=7)


def market(seed: int) -> hp.Availability:
    """Rough weather: machines go and come every few minutes."""
    from hetplan.simulator.spot import MID_TIER

    rough = MID_TIER.replace(plenty_s=900, scarce_s=500, scarce_leave_per_hour=12, scarce_return_per_hour=4)
    return spot_market(POOLS, 1500, seed=seed, rates=rough)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_request_ends_once_and_everything_adds_up(
    plan: hp.Plan, traffic: hp.Traffic, policy: str, seed: int
) -> None:
    run = hp.simulate(plan, traffic, spot=market(seed), policy=policy, seed=seed)
    table = run.table
    done = table["status"] == DONE
    assert (table["emitted"][done] == table["answer"][done]).all()
    assert (table["finish_s"][done] >= table["first_s"][done]).all()
    assert (table["first_s"][done] >= table["arrival_s"][done]).all()
    if policy != "parcae":
        # Parcae rents no on-demand machine: what the market never gives back is never served.
        assert done.all()
    times = [event.time_s for event in run.happenings]
    assert times == sorted(times)
    for name in {span.pipeline for span in run.spans if not span.pipeline.startswith("stand-in")}:
        own = [span for span in run.spans if span.pipeline == name]
        assert own[0].start_s == 0.0
        assert all(one.end_s == other.start_s for one, other in zip(own[:-1], own[1:], strict=True))
        assert own[-1].end_s == pytest.approx(max(run.end_s, own[-1].start_s))
    assert run.cost_usd == pytest.approx(sum(run.cost_by_market_usd.values()))
    lost = [event.subject for event in run.happenings if event.kind == "loss"]
    assert len(lost) == len(set(lost))
    served = sum(int(count) for count in run.requests["replica"].value_counts().values)
    assert served == len(traffic)


def test_the_same_seed_gives_the_same_run(plan: hp.Plan, traffic: hp.Traffic) -> None:
    runs = [hp.simulate(plan, traffic, spot=market(1), policy="hetplan", seed=3) for _ in range(2)]
    assert runs[0].table.tobytes() == runs[1].table.tobytes()
    assert runs[0].happenings == runs[1].happenings
    assert runs[0].cost_usd == runs[1].cost_usd


def test_on_demand_machines_are_never_taken(plan: hp.Plan, traffic: hp.Traffic) -> None:
    stays = hp.simulate(plan, traffic)
    rented = hp.simulate(plan, traffic, spot=market(0), policy="on-demand")
    assert rented.table["finish_s"] == pytest.approx(stays.table["finish_s"])
    # By the second and rounded up, so a little more.
    assert stays.cost_usd <= rented.cost_usd <= stays.cost_usd * 1.01


def test_a_quiet_market_costs_the_spot_price(plan: hp.Plan, traffic: hp.Traffic) -> None:
    quiet = hp.Availability({pool: ([0], [count]) for pool, count in POOLS.items()}, duration_s=1500)
    runs = {name: hp.simulate(plan, traffic, spot=quiet, policy=name) for name in ("none", "both", "hetplan")}
    assert {run.cost_usd for run in runs.values()} == {runs["none"].cost_usd}
    assert set(runs["none"].cost_by_market_usd) == {"spot"}
    assert runs["none"].cost_usd < hp.simulate(plan, traffic).cost_usd
    assert not any(run.table["moves"].any() for run in runs.values())


def test_migration_keeps_what_was_generated(plan: hp.Plan, traffic: hp.Traffic) -> None:
    """A request that begins again emits its first token anew; one that moves keeps it."""
    runs = {name: hp.simulate(plan, traffic, spot=market(2), policy=name, seed=2) for name in ("none", "migration")}
    moved = {name: run.table["moves"] > 0 for name, run in runs.items()}
    assert all(some.any() for some in moved.values())
    mean = {name: float(np.nanmean(run.latency("e2e_s"))) for name, run in runs.items()}
    assert mean["migration"] < mean["none"]


def test_a_pool_that_is_not_in_the_market_is_named(plan: hp.Plan, traffic: hp.Traffic) -> None:
    other = hp.Availability({"p5.48xlarge": ([0], [1])}, duration_s=100)
    with pytest.raises(hp.InvalidInputError, match="g[56].xlarge, of which the availability says nothing"):
        hp.simulate(plan, traffic, spot=other)


def test_figures_and_timelines_are_written(plan: hp.Plan, traffic: hp.Traffic, tmp_path: Path) -> None:
    run = hp.simulate(plan, traffic, spot=market(0), policy="both", log_steps=5000)
    run.write_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} >= {"M", "X", "i"}
    assert all(event.get("dur", 0) >= 0 for event in events)
    for figure in (
        timeline_figure(run), cost_figure({"both": run}), latency_figure({"both": run}), percentile_figure({"b": run}),
    ):  # fmt: skip
        assert figure.axes
    with pytest.raises(hp.InvalidInputError, match="cannot be written"):
        run.write_chrome_trace(tmp_path / "no" / "trace.json")


def test_goodput_counts_what_keeps_every_limit(plan: hp.Plan, traffic: hp.Traffic) -> None:
    run = hp.simulate(plan, traffic)
    half = run.percentile("e2e_s", 0.5)
    assert isinstance(half, float)
    assert run.goodput_per_s(hp.Slo(e2e_s=half)) == pytest.approx(run.requests_per_s / 2, rel=0.01)
    assert run.goodput_per_s(hp.Slo(e2e_s=1e9)) == pytest.approx(run.requests_per_s)


def test_what_can_be_said_wrongly() -> None:
    load = hp.Workload(input_tokens=10, output_tokens=10)
    with pytest.raises(hp.InvalidInputError, match="no requests_per_s"):
        hp.Traffic.poisson(load, duration_s=10)
    with pytest.raises(hp.InvalidInputError, match="duration_s"):
        hp.Traffic.poisson(LOAD, duration_s=-1)
    with pytest.raises(hp.InvalidInputError, match="clients"):
        hp.Traffic.closed_loop(load, clients=0, requests=5)
    with pytest.raises(hp.InvalidInputError, match="swing"):
        hp.Traffic.diurnal(LOAD, swing=2.0)


def test_results_without_answers_say_so() -> None:
    from hetplan.simulator.engine import REQUEST

    run = SimulationResult(end_s=0.0, cost_usd=1.0, query_types=("all",), table=np.zeros(2, dtype=REQUEST))
    assert math.isnan(run.percentile("ttft_s", 0.5))  # type: ignore[arg-type]
    assert math.isinf(run.usd_per_million_output_tokens)


@pytest.mark.parametrize("policy", ["parcae", "hetplan"])
def test_a_smaller_plan_serves_while_machines_are_missing(policy: str) -> None:
    """A pipeline over several machines that lost one for good: what is left serves as it can."""
    load = hp.Workload(input_tokens=300, output_tokens=60, requests_per_s=0.2)
    plan = hp.optimize(model="llama-3.1-8b", cluster={"g4dn.xlarge": 4}, workload=load, solver="dp-beam")
    assert all(len(pipeline.nodes) > 1 for pipeline in plan.deployments[0].pipelines)
    traffic = hp.Traffic.poisson(load, duration_s=1200, seed=0)
    scarce = hp.Availability({"g4dn.xlarge": ([0, 300, 900], [4, 3, 4])}, duration_s=1200)
    scenario = hp.SpotScenario.for_plan(plan, scarce, policy, on_demand_free=0)
    runs = {again: hp.simulate(plan, traffic, spot=scenario, replan=again) for again in (True, False)}
    assert any(event.kind == "plan" for event in runs[True].happenings)
    assert runs[True].answered == len(traffic)
    assert runs[True].percentile("e2e_s", 0.9) < runs[False].percentile("e2e_s", 0.9)  # type: ignore[operator]


@pytest.mark.parametrize("spot", [False, True])
def test_a_run_that_is_halted_is_the_beginning_of_the_whole_one(plan: hp.Plan, traffic: hp.Traffic, spot: bool) -> None:
    asked = {"spot": market(0), "policy": "both"} if spot else {}
    whole = hp.simulate(plan, traffic, **asked)  # type: ignore[arg-type]
    part = hp.simulate(plan, traffic, until_s=700.0, **asked)  # type: ignore[arg-type]
    assert part.end_s == 700.0
    ended = whole.table["finish_s"] <= 700.0
    assert part.answered == ended.sum()
    assert np.array_equal(part.table["finish_s"][ended], whole.table["finish_s"][ended])
    assert 0 < part.cost_usd < whole.cost_usd
    with pytest.raises(hp.InvalidInputError, match="until_s"):
        hp.simulate(plan, traffic, until_s=0.0)
