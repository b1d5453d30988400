"""Real vLLM on this CPU, started once and shared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from calibrated import calibrate_this_cpu
from environment import tiny_model, vllm_environment
from servers import Cluster

import hetplan as hp
from hetplan.api import make_problem
from hetplan.estimator.base import make_estimator
from hetplan.estimator.pipeline import StageShape, pipeline_rates
from hetplan.solvers.base import PipelineChoice, Solution
from hetplan.solvers.build import build_plan

WORKLOAD = hp.Workload(input_tokens=20, output_tokens=60)
# Sixteen sequences of 1,024 tokens need little: three engines share this machine's memory.
MEMORY_SHARE = 0.06


@pytest.fixture(scope="session")
def environment() -> Path:
    return vllm_environment()


@pytest.fixture(scope="session")
def model(environment: Path) -> Path:
    return tiny_model(environment)


@pytest.fixture(scope="session")
def calibration(environment: Path) -> hp.Calibration:
    """This CPU's, measured once for all tests."""
    return calibrate_this_cpu(environment).calibration


def local_plan(
    model: Path,
    splits: list[list[int]],
    *,
    workload: hp.Workload = WORKLOAD,
    calibrations: Mapping[str, hp.Calibration] | None = None,
    memory_share: float = MEMORY_SHARE,
    in_flight: int = 8,
) -> hp.Plan:
    """One pipeline per list of layers per stage, a machine for each stage, within vLLM's limits.

    Each decodes ``in_flight`` requests at once.
    """
    problem = make_problem(
        model=model,
        cluster={"local-cpu": sum(map(len, splits))},
        market="owned",
        provider="local",
        region="here",
        workload=workload,
        calibrations=calibrations,
        engine="vllm-0.32",
        max_model_len=1024,
        gpu_memory_utilization=memory_share,
        max_num_seqs=max(16, in_flight),
        max_num_batched_tokens=2048,
    )
    machine, offer = problem.cluster.instance_types[0], problem.cluster.pools[0].offer.name
    estimator = make_estimator(problem)
    choices, total = [], 0.0
    for sizes in splits:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        stages = tuple(
            StageShape((a, a + n), machine, 1, i) for i, (a, n) in enumerate(zip(starts, sizes, strict=True))
        )
        choices.append(PipelineChoice(stages, (offer,) * len(sizes), in_flight // len(sizes)))
        total += float(pipeline_rates(problem, estimator, stages, in_flight // len(sizes)).requests_per_s[0])
    plan = build_plan(problem, Solution(pipelines=tuple(choices), objective=total), solver="even", seed=0)
    assert hp.verify(plan) == []
    return plan


def launched(plan: hp.Plan, folder: Path, environment: Path, model: Path) -> Iterator[Cluster]:
    hp.launch(plan, out=folder, model=str(model))
    cluster = Cluster(folder, environment)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def pair(environment: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two pipelines of one process each, on ports 8000 and 8001."""
    plan = local_plan(model, [[8], [8]])
    yield from launched(plan, tmp_path_factory.mktemp("pair") / "out", environment, model)


@pytest.fixture(scope="module")
def uneven(environment: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> hp.Plan:
    """A pipeline of 3 and 5 layers on two nodes."""
    return local_plan(model, [[3, 5]])
