"""The fast search in its paper setting finds what Algorithm 1 finds when written literally."""

from __future__ import annotations

import random
from typing import Any

import pytest
from literal_algorithm1 import PlacedStage, literal_cluster

import hetplan as hp
from hetplan.catalog.offers import Cluster
from hetplan.catalog.tables import get_calibration
from hetplan.problem.placement import PlacementProblem

CLUSTER_24 = {"g6.12xlarge": 3, "g5.12xlarge": 2, "g6e.xlarge": 4}
SIZES_76 = {
    "g4dn": ("xlarge", "12xlarge", "metal"),
    "g5": ("xlarge", "12xlarge", "48xlarge"),
    "g6": ("xlarge", "12xlarge", "48xlarge"),
    "g6e": ("xlarge", "12xlarge", "48xlarge"),
    "p4d": ("24xlarge",),
    "p5": ("48xlarge",),
    "p6-b200": ("48xlarge",),
}
CLUSTER_76 = {f"{family}.{size}": 1 for family, sizes in SIZES_76.items() for size in sizes}

# The mean request of the paper's trace.
WORKLOAD = hp.Workload(input_tokens=763, output_tokens=232)


def make_problem(
    model: str, counts: dict[str, int], workload: hp.Workload = WORKLOAD, estimator: Any = "paper"
) -> PlacementProblem:
    cluster = Cluster.from_counts(counts, region="us-west-2")
    calibrations = tuple(get_calibration(gpu) for gpu in sorted({t.gpu.name for t in cluster.instance_types}))
    return PlacementProblem(
        model=hp.ModelSpec.get(model),
        cluster=cluster,
        workload=workload,
        objective="throughput_per_cost",
        estimator=estimator,
        calibrations=calibrations,
        calibration_sha256={c.gpu: c.sha256 for c in calibrations},
    )


def fast_cluster(problem: PlacementProblem, k: int) -> list[tuple[list[PlacedStage], float]]:
    plan = hp.optimize(problem, solver="dp-beam", search="paper", beam_width=k, time_limit_s=600)
    return [
        ([(stage.instance_type, *stage.layers) for stage in p.stages], p.predictions.requests_per_s.value)
        for p in plan.deployments[0].pipelines
        for _ in range(p.count)
    ]


def assert_same_pipelines(problem: PlacementProblem, k: int, *, formulas: bool = False) -> None:
    """The same stages at the same rate; a batch below the largest may beat it, where times jump with the batch."""
    literal, _ = literal_cluster(problem, k, formulas=formulas)
    if not literal:
        with pytest.raises((hp.InfeasibleError, hp.NoSolutionError)):
            fast_cluster(problem, k)
        return
    fast = fast_cluster(problem, k)
    assert sorted(stages for stages, _ in fast) == sorted(stages for stages, _ in literal)
    rates, largest = ([rate for _, rate in sorted(found)] for found in (fast, literal))
    if problem.estimator == "paper":
        assert rates == pytest.approx(largest, rel=1e-9)
    else:
        assert all(rate >= full * (1 - 1e-9) for rate, full in zip(rates, largest, strict=True))


@pytest.mark.parametrize("k", [1, 3, 11])
@pytest.mark.parametrize("model", ["llama-3.1-70b", "qwen3-32b"])
def test_the_24_gpus_of_the_paper(model: str, k: int) -> None:
    assert_same_pipelines(make_problem(model, CLUSTER_24), k)


@pytest.mark.parametrize("model", ["llama-3.1-70b", "qwen3-32b"])
def test_with_table_2_evaluated_for_each_candidate(model: str) -> None:
    assert_same_pipelines(make_problem(model, CLUSTER_24), 1, formulas=True)


@pytest.mark.slow
def test_the_76_gpus_of_the_paper() -> None:
    assert_same_pipelines(make_problem("llama-3.1-70b", CLUSTER_76), 1)


@pytest.mark.parametrize("estimator", ["paper", "calibrated"])
@pytest.mark.parametrize("seed", range(6))
def test_small_random_clusters(seed: int, estimator: str) -> None:
    rng = random.Random(seed)
    names = ["g4dn.xlarge", "g4dn.12xlarge", "g5.xlarge", "g5.12xlarge", "g6.xlarge", "g6.12xlarge", "g6e.xlarge"]
    counts = {name: rng.randint(1, 3) for name in rng.sample(names, 3)}
    workload = hp.Workload(input_tokens=rng.randint(16, 2048), output_tokens=rng.randint(2, 512))
    model = rng.choice(["llama-3.1-8b", "qwen3-8b", "qwen3-32b", "qwen2-7b"])
    assert_same_pipelines(make_problem(model, counts, workload, estimator), rng.choice([1, 2, 3, 7]))


@pytest.mark.parametrize(
    ("model", "counts"),
    [("llama-3.1-70b", {"g6.xlarge": 2}), ("qwen2-7b", {"g5.48xlarge": 3})],
    ids=["too little memory", "28 heads on 8 GPUs"],
)
def test_where_the_paper_finds_nothing_neither_does_the_search(model: str, counts: dict[str, int]) -> None:
    assert literal_cluster(make_problem(model, counts), 3)[0] == []
    assert_same_pipelines(make_problem(model, counts), 3)
