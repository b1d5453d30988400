"""One suite for every registered solver: whatever it returns is sound, reproducible and within what was offered."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
from builders import TINY_MIXTURE, make_cluster, make_gpu, make_machine, make_pool, problem_of, tiny_llama, verified

import hetplan as hp
from hetplan.catalog.hardware import Link
from hetplan.catalog.offers import Cluster, ZoneLink
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import Progress, Solution, get_solver, solver_names

OBJECTIVES = ["throughput", "throughput_per_cost", "cost"]
WORKLOADS = {
    "chat": hp.Workload(input_tokens=763, output_tokens=232, requests_per_s=0.5),
    "two classes": hp.Workload(
        query_types=[
            {"name": "chat", "requests_per_s": 0.3, "input_tokens": 500, "output_tokens": 200},
            {"name": "code", "requests_per_s": 0.1, "input_tokens": 2000, "output_tokens": 30},
        ]
    ),
}
MODELS = {
    "dense": lambda: tiny_llama(num_hidden_layers=7),
    "tied": lambda: tiny_llama(num_hidden_layers=3, tie_word_embeddings=True),
    "fp8": lambda: tiny_llama(num_hidden_layers=5).with_dtypes(weight_dtype="fp8"),
    "latent mixture": lambda: hp.ModelSpec.from_config(TINY_MIXTURE, name="tiny-mixture"),
}

SMALL, MIDDLE, LARGE = (make_gpu(f"G{gib}", memory_gib=gib, gb_per_s=20 * gib, tflops=4 * gib) for gib in (3, 12, 40))
ONE_SMALL, TWO_SMALL = make_machine("1xG3", gpu=SMALL), make_machine("2xG3", gpu=SMALL, gpu_count=2)
FOUR_MIDDLE, ONE_LARGE = make_machine("4xG12", gpu=MIDDLE, gpu_count=4), make_machine("1xG40", gpu=LARGE)
THREE_LARGE = make_machine("3xG40", gpu=LARGE, gpu_count=3)


JOINED = ZoneLink(ends=("own/east", "own/west"), link=Link(latency_s=0.005, bytes_per_s=1e8), egress_usd_per_gb=0.01)


def clusters() -> dict[str, Cluster]:
    spot: dict[str, Any] = {"market": "spot", "usd": 0.4, "notice_s": 120.0}
    return {
        "several pools": make_cluster(
            (TWO_SMALL, make_pool(TWO_SMALL, 2, usd=0.5)),
            (FOUR_MIDDLE, make_pool(FOUR_MIDDLE, 1, usd=3)),
            (ONE_LARGE, make_pool(ONE_LARGE, 1, usd=2)),
        ),
        "spot and on demand": make_cluster(
            (ONE_LARGE, make_pool(ONE_LARGE, 1, usd=1)), (ONE_LARGE, make_pool(ONE_LARGE, 2, **spot))
        ),
        "two regions": make_cluster(
            (ONE_LARGE, make_pool(ONE_LARGE, 1, usd=1, region="east")),
            (ONE_LARGE, make_pool(ONE_LARGE, 1, usd=1.1, region="west")),
            (FOUR_MIDDLE, make_pool(FOUR_MIDDLE, 1, usd=3, region="west")),
        ),
        "joined regions": make_cluster(
            (TWO_SMALL, make_pool(TWO_SMALL, 1, usd=0.5, region="east")),
            (TWO_SMALL, make_pool(TWO_SMALL, 1, usd=0.6, region="west")),
            (ONE_LARGE, make_pool(ONE_LARGE, 1, usd=2, region="apart")),
        ).replace(zone_links=(JOINED,)),
        "owned": make_cluster(
            (ONE_LARGE, make_pool(ONE_LARGE, 2, usd=None, market="owned")), (ONE_LARGE, make_pool(ONE_LARGE, 1, usd=1))
        ),
        "single-GPU nodes": make_cluster(
            (ONE_SMALL, make_pool(ONE_SMALL, 3, usd=0.2)), (ONE_LARGE, make_pool(ONE_LARGE, 2, usd=1))
        ),
        "three GPUs a node": make_cluster((THREE_LARGE, make_pool(THREE_LARGE, 2, usd=4))),
    }


CLUSTERS = clusters()
CASES = [
    (solver, objective, cluster)
    for solver in solver_names()
    for objective in OBJECTIVES
    for cluster in CLUSTERS
    # Nothing divides by what costs nothing; refused by the problem itself.
    if (objective, cluster) != ("throughput_per_cost", "owned")
]

# Grouped by case, so that workers side by side make each plan once.
pytestmark = [pytest.mark.parametrize(("solver", "objective", "cluster"), CASES, scope="module")]
EVERY_MODEL = pytest.mark.parametrize("model", MODELS)


@cache
def problem(
    objective: str, cluster: str, model: str, workload: str = "chat", estimator: str = "calibrated"
) -> PlacementProblem:
    return problem_of(
        MODELS[model](),
        CLUSTERS[cluster],
        WORKLOADS[workload],
        objective=objective,
        estimator=estimator,
        # One model with the engine's own limit, the others with small tables.
        max_num_seqs=None if model == "tied" else 64,
    )


@cache
def planned(
    solver: str, objective: str, cluster: str, model: str, workload: str = "chat", estimator: str = "calibrated"
) -> hp.Plan | None:
    """The plan, checked; None where the solver finds none, which only the plainest baseline may."""
    try:
        plan = hp.optimize(problem(objective, cluster, model, workload, estimator), solver=solver, seed=5)
    except hp.NoSolutionError:
        assert solver == "even"
        return None
    return verified(plan)


@EVERY_MODEL
def test_a_plan_is_sound_and_says_how_it_was_made(solver: str, objective: str, cluster: str, model: str) -> None:
    plan = planned(solver, objective, cluster, model)
    if plan is None:
        return
    assert plan.problem == problem(objective, cluster, model)
    assert plan.objective_name == objective
    assert (plan.provenance.solver, plan.provenance.seed) == (solver, 5)
    assert plan.provenance.version == hp.__version__
    assert [(r.query_type, r.deployment, r.fraction) for r in plan.routes] == [("default", 0, 1.0)]


@pytest.mark.parametrize(
    ("model", "estimator", "workload"), [("dense", "paper", "chat"), ("dense", "calibrated", "two classes")]
)
def test_the_paper_s_estimator_and_several_classes_too(
    solver: str, objective: str, cluster: str, model: str, estimator: str, workload: str
) -> None:
    plan = planned(solver, objective, cluster, model, workload, estimator)
    if plan is not None:
        assert plan.requests_per_s > 0
        assert {route.query_type for route in plan.routes} == {q.name for q in plan.problem.workload.query_types}


@EVERY_MODEL
def test_no_machine_is_used_that_is_not_offered(solver: str, objective: str, cluster: str, model: str) -> None:
    plan = planned(solver, objective, cluster, model)
    if plan is None:
        return
    offered = {pool.offer.name: pool.count for pool in plan.problem.cluster.pools}
    used: Counter[str] = Counter()
    for pipeline in plan.deployments[0].pipelines:
        used.update({node: pipeline.count * n for node, n in Counter(pipeline.nodes).items()})
        # A pipeline stays in one region, where its machines share a network, or in regions that are joined.
        regions = {node.split("/")[1] for node in pipeline.nodes}
        assert len(regions) == 1 or (cluster, regions) == ("joined regions", {"east", "west"})
    assert all(used[name] <= offered[name] for name in used)


@EVERY_MODEL
def test_the_bound_is_on_its_side_and_the_status_follows(solver: str, objective: str, cluster: str, model: str) -> None:
    plan = planned(solver, objective, cluster, model)
    if plan is None:
        return
    if solver == "auto":
        assert plan.bound is not None
        assert plan.gap is not None
    if plan.bound is None:
        assert (plan.gap, plan.certificate, plan.status) == (None, None, "feasible")
        return
    slack = 1e-9 * abs(plan.objective)
    assert plan.bound <= plan.objective + slack if objective == "cost" else plan.bound >= plan.objective - slack
    assert plan.gap is not None
    assert (plan.status == "optimal") == (plan.gap <= 1e-6)


@EVERY_MODEL
def test_a_demand_is_met(solver: str, objective: str, cluster: str, model: str) -> None:
    plan = planned(solver, objective, cluster, model)
    if plan is not None and objective == "cost":
        assert plan.requests_per_s >= 0.5 * (1 - 1e-9)
        assert plan.objective == plan.cost_usd_per_hour


def test_the_same_problem_gives_the_same_bytes(solver: str, objective: str, cluster: str) -> None:
    plan = planned(solver, objective, cluster, "dense")
    if plan is not None:
        again = hp.optimize(problem(objective, cluster, "dense"), solver=solver, seed=5)
        assert again.to_json() == plan.to_json()


def test_progress_is_reported_and_never_gets_worse(solver: str, objective: str, cluster: str) -> None:
    if planned(solver, objective, cluster, "dense") is None:
        return
    seen: list[Progress] = []
    solution: Solution = get_solver(solver).solve(problem(objective, cluster, "dense"), on_incumbent=seen.append)
    assert seen
    objectives = [progress.objective for progress in seen if progress.objective is not None]
    assert objectives == sorted(objectives, reverse=objective == "cost")
    assert objectives[-1] == solution.objective
    assert [progress.elapsed_s for progress in seen] == sorted(progress.elapsed_s for progress in seen)
    assert all(progress.message for progress in seen)


def test_no_time_still_gives_a_sound_plan(solver: str, objective: str, cluster: str) -> None:
    if planned(solver, objective, cluster, "dense") is not None:
        plan = verified(hp.optimize(problem(objective, cluster, "dense"), solver=solver, time_limit_s=0))
        assert plan.deployments[0].pipelines


def test_an_interrupting_callback_stops_the_search(solver: str, objective: str, cluster: str) -> None:
    """A caller's exception passes through: nothing swallows it."""

    class StopError(Exception):
        pass

    def stop(progress: Progress) -> None:
        raise StopError

    if planned(solver, objective, cluster, "dense") is not None:
        with pytest.raises(StopError):
            get_solver(solver).solve(problem(objective, cluster, "dense"), on_incumbent=stop)
