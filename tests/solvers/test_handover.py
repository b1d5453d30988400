"""Room for a second engine: what plans lose by it, and that none of them gives it away."""

from __future__ import annotations

from typing import Any

import pytest
from builders import WORKLOAD, verified
from small_cases import CATEGORIES, case_of

import hetplan as hp
from hetplan.solvers.base import solver_names

CLUSTER = {"g6.12xlarge": 1, "g6e.xlarge": 1, "g5.xlarge": 2}


def planned(sequences: int, layers: int = 0, **options: Any) -> hp.Plan:
    return verified(
        hp.optimize(
            model="qwen2.5-14b",
            cluster=CLUSTER,
            workload=WORKLOAD,
            max_model_len=4096,
            handover_sequences=sequences,
            handover_layers=layers,
            **options,
        )
    )


@pytest.mark.parametrize("engine", [None, "hetplan", "vllm-0.32"])
def test_a_plan_never_serves_more_for_keeping_room(engine: str | None) -> None:
    plans = [planned(*kept, engine=engine) for kept in ((0, 0), (1, 0), (8, 0), (8, 4))]
    rates = [plan.objective for plan in plans]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < rates[0]
    for plan in plans:
        assert plan.bound is not None
        assert plan.objective <= plan.bound * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("category", [name for name, kind in CATEGORIES.items() if kind.handover])
def test_the_best_plan_without_a_reserve_is_no_worse(category: str, seed: int) -> None:
    case = case_of(category, seed)
    assert case.best is not None
    free = hp.optimize(case.problem.replace(handover_sequences=0, handover_layers=0), solver="exact")
    if case.problem.objective == "cost":
        assert free.objective <= case.best.objective * (1 + 1e-9)
    else:
        assert free.objective >= case.best.objective * (1 - 1e-9)


@pytest.mark.parametrize("estimator", ["calibrated", "paper"])
@pytest.mark.parametrize("solver", solver_names())
def test_every_solver_keeps_the_room(solver: str, estimator: Any) -> None:
    """A second engine and the first are together within what is usable."""
    plan = planned(2, 1, solver=solver, estimator=estimator)
    for pipeline in plan.deployments[0].pipelines:
        for stage in pipeline.stages:
            assert stage.other_bytes is not None
            again = stage.activation_bytes + stage.other_bytes + stage.start_kv_cache_bytes
            assert stage.reserved_bytes > again
            assert (
                stage.start_kv_cache_bytes
                > 2
                * 4096
                * plan.placement.model.kv_bytes_per_token(stage.tensor_parallel)
                * stage.layer_count
                / plan.placement.model.layer_count
            )
    assert "kept for a second engine" in str(plan)


def test_a_plan_of_a_former_version_is_read_checked_and_planned_again(tmp_path: Any) -> None:
    plan = planned(0)
    content = plan.model_dump(mode="json")
    del content["problem"]["handover_sequences"], content["problem"]["handover_layers"]
    for pipeline in content["deployments"][0]["pipelines"]:
        for stage in pipeline["stages"]:
            del stage["other_bytes"], stage["reserved_bytes"], stage["start_kv_cache_bytes"]
    former = hp.Plan.from_dict(content)
    assert hp.verify(former) == []
    assert verified(hp.optimize(former.placement)) == plan


def test_too_little_memory_says_what_to_lower() -> None:
    with pytest.raises(hp.InfeasibleError, match="lower handover_sequences"):
        hp.optimize(
            model="llama-3.1-8b",
            cluster={"g6.xlarge": 1},
            workload=WORKLOAD,
            weight_dtype="fp8",
            handover_sequences=1000,
        )
