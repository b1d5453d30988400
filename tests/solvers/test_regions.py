"""Pipelines across regions: where a zone link leads, at its speed and its price."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import make_gpu, make_machine, make_pool, problem_of, tiny_llama, verified
from small_cases import SEEDS, case_of
from whole_placements import WholePlacements

import hetplan as hp
from hetplan.catalog.hardware import Link
from hetplan.catalog.offers import Cluster, ZoneLink
from hetplan.errors import InfeasibleError, NoSolutionError
from hetplan.problem.placement import PlacementProblem

HERE, THERE = "own/here", "own/there"
WAY = ZoneLink(ends=(HERE, THERE), link=Link(latency_s=0.01, bytes_per_s=1e8), egress_usd_per_gb=0.02)
# 3.1 GiB of weights, of which a region holds 2.5.
MODEL = tiny_llama(hidden_size=2048, intermediate_size=8192, num_hidden_layers=24)
MIXING = ["auto", "dp-beam", "exact", "helix", "hexgen"]
WITHIN = ["alpaserve", "even", "spotserve"]
SAME = 1e-9


def across(*links: ZoneLink, **options: Any) -> PlacementProblem:
    """A machine in each of two regions, neither of which holds the model."""
    here, there = (make_machine(f"box-{n}", gpu=make_gpu(f"X{n}", memory_gib=3)) for n in range(2))
    cluster = Cluster(
        instance_types=(here, there),
        pools=(make_pool(here), make_pool(there, region="there", usd=2.0)),
        zone_links=links,
    )
    workload = hp.Workload(input_tokens=200, output_tokens=50, requests_per_s=0.5)
    return problem_of(MODEL, cluster, workload, max_num_seqs=64, **options)


@pytest.mark.parametrize("solver", [*MIXING, *WITHIN])
def test_without_a_zone_link_no_plan_crosses_and_the_way_out_is_said(solver: str) -> None:
    with pytest.raises(InfeasibleError, match=r"the largest region has .* join regions by zone_links"):
        hp.optimize(across(), solver=solver)


@pytest.mark.parametrize("objective", ["throughput", "throughput_per_cost", "cost"])
@pytest.mark.parametrize("solver", MIXING)
def test_with_one_a_pipeline_crosses_and_pays(solver: str, objective: str) -> None:
    plan = verified(hp.optimize(across(WAY, objective=objective), solver=solver))
    (pipeline,) = plan.deployments[0].pipelines
    assert {name.split("/")[1] for name in pipeline.nodes} == {"here", "there"}
    # The prompt, then each answer's tokens after the first.
    sent_gb = (200 + 50 - 1) * 2048 * 2 / 1e9
    egress = sent_gb * plan.requests_per_s * 3600 * 0.02
    assert plan.egress_usd_per_hour == pipeline.egress_usd_per_hour == pytest.approx(egress)
    assert plan.cost_usd_per_hour == pipeline.cost_usd_per_hour == pytest.approx(3.0 + egress)
    per_million = plan.cost_usd_per_hour / (plan.requests_per_s * 50 * 3600) * 1e6
    assert plan.usd_per_million_output_tokens == pytest.approx(per_million)
    expected = {
        "throughput": plan.requests_per_s,
        "throughput_per_cost": plan.requests_per_s / plan.cost_usd_per_hour,
        "cost": plan.cost_usd_per_hour,
    }
    assert plan.objective == pytest.approx(expected[objective])
    assert "egress" in str(plan)


@pytest.mark.parametrize("solver", WITHIN)
def test_solvers_of_one_kind_of_machine_stay_where_they_are(solver: str) -> None:
    with pytest.raises(NoSolutionError):
        hp.optimize(across(WAY), solver=solver)


def test_a_slower_link_makes_a_slower_plan_and_a_fast_one_leaves_the_machines_network() -> None:
    def rate(latency_s: float, bytes_per_s: float) -> float:
        way = WAY.replace(link=Link(latency_s=latency_s, bytes_per_s=bytes_per_s))
        return hp.optimize(across(way), solver="exact").requests_per_s

    assert rate(0.01, 1e7) < rate(0.01, 1e8) < rate(0.0, 1e8) < rate(0.0, 1e12)
    # Faster than both network cards it is nowhere the slowest part.
    assert rate(0.0, 1e12) == rate(50e-6, 3e9)


def test_a_plan_across_regions_can_be_saved_read_and_estimated(tmp_path: Path) -> None:
    plan = hp.optimize(across(WAY), solver="auto")
    plan.save(tmp_path / "plan.json")
    read = hp.Plan.load(tmp_path / "plan.json")
    assert read == plan
    assert verified(read).problem.cluster.zone_links == (WAY,)
    same = hp.estimate(read)
    assert same.cost_usd_per_hour == pytest.approx(plan.cost_usd_per_hour)
    # Longer prompts are more bytes a request, but fewer requests.
    longer = hp.estimate(read, workload=hp.Workload(input_tokens=190, output_tokens=5))
    egress = longer.requests_per_s * (190 + 5 - 1) * 2048 * 2 / 1e9 * 3600 * 0.02
    assert longer.cost_usd_per_hour == pytest.approx(3.0 + egress)


def test_a_pipeline_is_told_apart_from_one_that_need_not_cross() -> None:
    """One region holds the model as well: what crossing costs decides."""
    large = make_machine("large", gpu=make_gpu("X9", memory_gib=3), gpu_count=2)
    problem = across(WAY, objective="throughput_per_cost")
    cluster = problem.cluster
    more = cluster.replace(
        instance_types=(*cluster.instance_types, large), pools=(*cluster.pools, make_pool(large, usd=3.5))
    )

    def regions(usd_per_gb: float) -> set[str]:
        asked = more.replace(zone_links=(WAY.replace(egress_usd_per_gb=usd_per_gb),))
        problem = problem_of(MODEL, asked, hp.Workload(input_tokens=200, output_tokens=50), max_num_seqs=64,
                             objective="throughput_per_cost")  # fmt: skip
        plan = verified(hp.optimize(problem, solver="exact"))
        assert plan.bound is not None
        assert plan.bound >= plan.objective
        return {name.split("/")[1] for name in plan.deployments[0].pipelines[0].nodes}

    assert regions(10.0) == {"here"}


@pytest.mark.parametrize("category", ["linked regions, cost", "linked regions, per cost"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_prices_of_egress_never_make_a_false_proof(category: str, seed: int) -> None:
    problem = case_of(category, seed).problem
    links = tuple(link.replace(egress_usd_per_gb=0.02) for link in problem.cluster.zone_links)
    problem = problem.replace(cluster=problem.cluster.replace(zone_links=links))
    best = WholePlacements(problem).best_plan()
    assert best is not None
    for solver in ("exact", "auto"):
        plan = verified(hp.optimize(problem, solver=solver))
        assert plan.bound is not None
        sign = 1 if problem.objective == "cost" else -1
        assert sign * plan.bound <= sign * best.objective * (1 + sign * SAME)
        if plan.status == "optimal":
            assert sign * plan.objective <= sign * best.objective * (1 + sign * 1e-6)
        if plan.egress_usd_per_hour == 0 and not any(one.egress_usd_per_hour for one in best.pipelines):
            assert plan.objective == pytest.approx(best.objective, rel=SAME)
