"""Each deployment of an allocation plan as a placement plan: the same machines and prices, sound by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

import hetplan as hp
from hetplan.api import make_problem
from hetplan.problem.allocation import Configuration, ServedModel

CHAT = {
    "name": "chat", "input_tokens": 763, "output_tokens": 232, "requests_per_hour": 14_000, "delay_limit_s": 40,
    "error_limit": 0.06, "delay_usd_per_ms": 1e-4, "unserved_usd": 5000,
    "errors": {"llama-3.1-8b": 0.05, "llama-3.2-3b": 0.09, "qwen2.5-32b": 0.02},
}  # fmt: skip
CODE = CHAT | {"name": "code", "input_tokens": 256, "output_tokens": 512, "requests_per_hour": 9000}
LONG = CHAT | {"name": "long", "input_tokens": 3000.5, "output_tokens": 100, "requests_per_hour": 1500}
QUERIES = [CHAT, CODE, LONG]

PROBLEMS: dict[str, dict[str, Any]] = {
    "L4 alone": {"models": ["llama-3.1-8b"], "cluster": {"g6.xlarge": 4}},
    "stages over machines": {"models": ["qwen2.5-32b"], "cluster": {"g6.12xlarge": 2}, "tensor_parallel": (4,),
                             "pipeline_parallel": (2,)},
    "two stages in one machine": {"models": ["qwen2.5-32b"], "cluster": {"g6.12xlarge": 2}, "tensor_parallel": (2,),
                                  "pipeline_parallel": (2,)},
    "three models, five tiers": {
        "models": ["llama-3.1-8b", "llama-3.2-3b", "qwen2.5-32b"],
        "cluster": {"g6.xlarge": 8, "g6e.xlarge": 4, "g5.xlarge": 8, "g6.12xlarge": 2, "g6e.12xlarge": 1},
    },
    "A10G": {"models": ["llama-3.2-3b", "llama-3.1-8b"], "cluster": {"g5.xlarge": 8, "g5.12xlarge": 2}},
}  # fmt: skip


@cache
def solved(name: str) -> hp.Plan:
    models = PROBLEMS[name]["models"]
    errors = {model: rate for model, rate in CHAT["errors"].items() if model in models}  # type: ignore[attr-defined]
    queries = [query | {"errors": errors} for query in QUERIES]
    problem = hp.AllocationProblem.from_catalog(query_types=queries, budget_usd=5000, **PROBLEMS[name])
    return hp.optimize(problem, solver="auto", time_limit_s=10)


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_deployment_is_a_sound_plan_on_the_machines_that_are_rented(name: str) -> None:
    plan = solved(name)
    placed = hp.placement_plans(plan)
    assert len(placed) == len(plan.deployments)
    for one, deployment in zip(placed, plan.deployments, strict=True):
        assert hp.verify(one) == []
        (bought,), (pipeline,) = deployment.pipelines, one.deployments[0].pipelines
        assert (one.placement.model.name, pipeline.count) == (deployment.model, bought.count)
        assert pipeline.nodes == bought.nodes
        (pool,) = one.placement.cluster.pools
        assert pool.count == bought.count * len(bought.nodes)
        assert [(s.node, s.tensor_parallel, s.instance_type) for s in pipeline.stages] == [
            (s.node, s.tensor_parallel, s.instance_type) for s in bought.stages
        ]
        sizes = [stage.layer_count for stage in pipeline.stages]
        assert max(sizes) - min(sizes) <= 1
        assert pipeline.cost_usd_per_hour == pytest.approx(bought.cost_usd_per_hour)
    assert math.fsum(one.cost_usd_per_hour for one in placed) == pytest.approx(plan.cost_usd_per_hour)


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_sent_there_is_what_the_allocation_serves(name: str) -> None:
    plan = solved(name)
    placed = hp.placement_plans(plan)
    assert isinstance(plan.problem, hp.AllocationProblem)
    assert math.fsum(one.placement.workload.requests_per_s or 0 for one in placed) == pytest.approx(plan.requests_per_s)
    for query in plan.problem.query_types:
        sent = [q for one in placed for q in one.placement.workload.query_types if q.name == query.name]
        served = math.fsum(route.fraction for route in plan.routes if route.query_type == query.name)
        assert math.fsum(q.requests_per_s or 0 for q in sent) * 3600 == pytest.approx(served * query.requests_per_hour)
        assert {(q.input_tokens.mean, q.output_tokens.mean) for q in sent} <= {
            (query.input_tokens, query.output_tokens)
        }
    for index, one in enumerate(placed):
        kinds = {route.query_type for route in plan.routes if route.deployment == index}
        longest = max(math.ceil(q.tokens) for q in plan.problem.query_types if q.name in kinds)
        assert one.deployments[0].pipelines[0].max_model_len == longest


def test_own_calibrations_and_an_engine_s_limits_are_kept() -> None:
    plan = solved("L4 alone")
    (usual,) = hp.placement_plans(plan)
    shipped = usual.placement.calibration("L4")
    assert shipped.memory_bytes_per_s is not None
    slow = shipped.memory_bytes_per_s.replace(value=shipped.memory_bytes_per_s.value / 2)
    own = shipped.replace(memory_bytes_per_s=slow)
    (one,) = hp.placement_plans(plan, engine="vllm-0.32", calibrations={"L4": own})
    assert one.placement.calibration("L4") == own
    assert one.requests_per_s < usual.requests_per_s
    assert one.placement.engine is not None
    assert one.placement.engine.name == "vllm-0.32"
    assert hp.verify(one) == []


def test_a_plan_that_places_one_model_is_the_only_one() -> None:
    problem = make_problem(
        model="llama-3.1-8b", cluster={"g6.xlarge": 1}, workload=hp.Workload(input_tokens=100, output_tokens=20)
    )
    plan = hp.optimize(problem, solver="even")
    assert hp.placement_plans(plan) == (plan,)


def changed(plan: hp.Plan, change: Callable[[hp.AllocationProblem], hp.AllocationProblem]) -> hp.Plan:
    assert isinstance(plan.problem, hp.AllocationProblem)
    return plan.replace(problem=change(plan.problem))


def test_what_is_missing_is_named_with_the_argument_that_gives_it() -> None:
    paper = hp.AllocationProblem.canonical(query_types=6, models=6, tiers=10, seed=0)
    with pytest.raises(hp.InvalidInputError, match=r"no configurations.*AllocationProblem\.from_catalog"):
        hp.placement_plans(hp.optimize(paper, solver="agh"))

    plan = solved("L4 alone")
    bare = changed(plan, lambda p: p.replace(models=tuple(m.replace(spec=None) for m in p.models)))
    with pytest.raises(hp.InvalidInputError, match=r"'llama-3.1-8b' has no spec.*ServedModel\(spec=\.\.\.\)"):
        hp.placement_plans(bare)
    for name in ("instance_type", "offer"):
        bare = changed(plan, lambda p, name=name: p.replace(tiers=tuple(t.replace(**{name: None}) for t in p.tiers)))
        if name == "offer":
            (deployment,) = bare.deployments
            pipeline = deployment.pipelines[0].replace(nodes=("g6.xlarge",) * len(deployment.pipelines[0].nodes))
            bare = bare.replace(deployments=(deployment.replace(pipelines=(pipeline,)),))
        with pytest.raises(hp.InvalidInputError, match=rf"has no {name}.*Tier\({name}=\.\.\.\)"):
            hp.placement_plans(bare)


def test_a_price_that_is_not_the_machines_is_refused() -> None:
    def dearer(problem: hp.AllocationProblem) -> hp.AllocationProblem:
        more = tuple(one.replace(usd_per_hour=one.usd_per_hour + 1) for one in problem.configurations)
        return problem.replace(configurations=more)

    with pytest.raises(hp.InvalidInputError, match=r"costs 2\.6096 \$/h.* 2 machines 1\.6096 \$/h by the offer"):
        hp.placement_plans(changed(solved("L4 alone"), dearer))


def test_a_deployment_that_nothing_is_sent_to_is_refused() -> None:
    plan = solved("L4 alone")
    with pytest.raises(hp.InvalidInputError, match="no query type is sent there"):
        hp.placement_plans(plan.replace(routes=()))


def test_an_edited_deployment_is_no_configuration() -> None:
    plan = solved("L4 alone")
    (deployment,) = plan.deployments
    edited = plan.replace(deployments=(deployment.replace(model="another"),))
    with pytest.raises(hp.InvalidInputError, match=r"deployments\[0\] is no configuration.*another"):
        hp.placement_plans(edited)


def test_what_was_thought_to_fit_and_does_not_is_told_with_both_figures() -> None:
    """Own delays say that 32B in 16 bits runs on one L4 of 24 GB."""
    base = solved("L4 alone").problem
    assert isinstance(base, hp.AllocationProblem)
    large = ServedModel(
        name="qwen2.5-32b", weight_gb=8, kv_bytes_per_token=1000, gflop_per_token=60,
        spec=hp.ModelSpec.get("qwen2.5-32b"),
    )  # fmt: skip
    one = base.configurations[0]
    thought = Configuration(
        model=0, tier=0, tensor_parallel=1, pipeline_parallel=1, machines=1, usd_per_hour=one.usd_per_hour,
        delay_s=(1.0,) * 3, ttft_s=(0.1,) * 3, capacity_per_hour=(1e5,) * 3,
    )  # fmt: skip
    problem = base.replace(
        models=(large,),
        configurations=(thought,),
        query_types=tuple(query.replace(errors=(0.01,)) for query in base.query_types),
    )
    plan = hp.optimize(problem, solver="milp")
    assert hp.verify(plan) == []
    with pytest.raises(hp.InfeasibleError, match=r"thought it to fit.*stage 1 needs 6\d\.\d+ GiB") as refusal:
        hp.placement_plans(plan)
    (reason,) = refusal.value.reasons
    assert reason.constraint == "memory"
    assert reason.needed > 60
    assert reason.available < 24


def test_stages_follow_vllm_s_even_split() -> None:
    (one,) = hp.placement_plans(solved("stages over machines"))
    stages = one.deployments[0].pipelines[0].stages
    assert [stage.node for stage in stages] == [0, 1]
    assert stages[0].layers[0] == 0
    assert all(a.layers[1] == b.layers[0] for a, b in pairwise(stages))
