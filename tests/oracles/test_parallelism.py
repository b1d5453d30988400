"""Degrees that divide heads, layers split into stages, and memory where it lives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from builders import make_cluster, make_machine, make_pool, problem_of, tiny_llama, verified
from hypothesis import given, settings
from hypothesis import strategies as st

import hetplan as hp
from hetplan.catalog.engines import ENGINES, get_engine
from hetplan.catalog.tables import get_gpu
from hetplan.estimator.base import make_estimator
from hetplan.estimator.pipeline import StageShape, even_layers, sequences_that_fit, stage_memories
from hetplan.solvers.base import solver_names
from hetplan.units import GIB

WORKLOAD = hp.Workload(input_tokens=763, output_tokens=232)


def allowed(heads: int, kv_heads: int, degree: int) -> bool:
    return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)


@given(kv_heads=st.integers(1, 12), groups=st.integers(1, 8), most=st.integers(1, 64))
@settings(max_examples=60, deadline=None)
def test_valid_degrees_are_those_that_divide(kv_heads: int, groups: int, most: int) -> None:
    heads = kv_heads * groups
    spec = tiny_llama(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16)
    assert spec.valid_tensor_parallel(most) == [d for d in range(1, most + 1) if allowed(heads, kv_heads, d)]


def test_qwen2_7b() -> None:
    assert hp.ModelSpec.get("qwen2-7b").valid_tensor_parallel(28) == [1, 2, 4, 28]


@pytest.mark.parametrize(("heads", "kv_heads", "degree"), [(52, 4, 8), (64, 8, 3), (28, 4, 8), (40, 8, 16), (64, 8, 6)])
def test_a_degree_that_does_not_divide_is_refused_and_the_valid_ones_listed(
    heads: int, kv_heads: int, degree: int
) -> None:
    spec = tiny_llama(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16)
    valid = spec.valid_tensor_parallel(16)
    machine = make_machine(gpu=get_gpu("L4"), gpu_count=16)
    with pytest.raises(hp.InvalidInputError) as refusal:
        hp.predict(spec, "L4", tensor_parallel=degree, instance_type=machine)
    assert f"tensor_parallel={degree}" in str(refusal.value)
    assert str(valid) in str(refusal.value)


@pytest.mark.parametrize("solver", solver_names())
@pytest.mark.parametrize(("heads", "gpus"), [(64, 3), (52, 8), (28, 8), (64, 6), (7, 4)])
def test_no_plan_has_a_degree_that_does_not_divide(solver: str, heads: int, gpus: int) -> None:
    kv_heads = 1 if heads == 7 else 4
    spec = tiny_llama(num_hidden_layers=16, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=32)
    machine = make_machine(gpu_count=gpus)
    plan = verified(
        hp.optimize(
            model=spec, cluster=make_cluster((machine, make_pool(machine, 2))), workload=WORKLOAD, solver=solver
        )
    )
    degrees = {s.tensor_parallel for p in plan.deployments[0].pipelines for s in p.stages}
    assert all(heads % degree == 0 for degree in degrees)
    assert not degrees & {3, 6}


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_few_kv_heads_replicate(kv_heads: int, degree: int) -> None:
    spec = tiny_llama(num_attention_heads=8, num_key_value_heads=kv_heads, head_dim=128)
    heads_per_gpu = max(1, -(-kv_heads // degree))
    assert spec.kv_bytes_per_token(degree) == 4 * heads_per_gpu * 128 * 2 * 2


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [(61, 4, [15, 15, 16, 15]), (94, 4, [23, 24, 24, 23]), (80, 3, [27, 27, 26]), (80, 8, [10] * 8), (5, 5, [1] * 5)],
)
def test_even_layers_are_those_of_vllm(layers: int, stages: int, sizes: list[int]) -> None:
    assert even_layers(layers, stages) == sizes


@given(layers=st.integers(1, 200), data=st.data())
@settings(max_examples=200, deadline=None)
def test_even_layers_are_complete_and_differ_by_at_most_one(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    sizes = even_layers(layers, stages)
    assert len(sizes) == stages
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


@pytest.mark.parametrize("solver", solver_names())
@given(
    layers=st.integers(1, 12),
    counts=st.tuples(st.integers(1, 3), st.integers(0, 2)),
    gpus=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2])),
)
@settings(max_examples=12, deadline=None)
def test_any_partition_is_complete_disjoint_and_in_order(
    solver: str, layers: int, counts: tuple[int, int], gpus: tuple[int, int]
) -> None:
    machines = [make_machine(f"box{i}", gpu_count=gpus[i]) for i in range(2)]
    pools = [(m, make_pool(m, c)) for m, c in zip(machines, counts, strict=True) if c > 0]
    spec = tiny_llama(num_hidden_layers=layers)
    try:
        plan = hp.optimize(model=spec, cluster=make_cluster(*pools), workload=WORKLOAD, solver=solver)
    except hp.NoSolutionError:
        # An even pipeline over all machines may have more stages than the model has layers.
        assert solver == "even"
        return
    for pipeline in plan.deployments[0].pipelines:
        covered = [layer for stage in pipeline.stages for layer in range(*stage.layers)]
        assert covered == list(range(layers))
        assert all(stage.layer_count > 0 for stage in pipeline.stages)
        used = [(stage.node, gpu) for stage in pipeline.stages for gpu in stage.gpu_indices]
        assert len(set(used)) == len(used)


def test_embedding_and_head_count_where_they_live() -> None:
    """70B in FP8 on eight L4, even: 9.93 GiB on the end stages against 7.97, less without the embedding's copies."""
    spec = hp.ModelSpec.get("llama-3.1-70b").with_dtypes(weight_dtype="fp8")
    problem = problem_of(spec, {"g6.xlarge": 8})
    machine = problem.cluster.instance_type("g6.xlarge")
    stages = [StageShape((10 * s, 10 * s + 10), machine, 1, s) for s in range(8)]
    estimator = make_estimator(problem)
    weights = [memory.weight_bytes / GIB for memory in stage_memories(problem, estimator, stages)]
    assert weights[0] == pytest.approx(9.93, abs=0.01)
    assert weights[-1] == pytest.approx(9.93, abs=0.01)
    assert weights[1:-1] == pytest.approx([7.97] * 6, abs=0.01)
    # The stage with least room bounds the sequences of the whole pipeline.
    rooms = [memory.kv_cache_bytes for memory in stage_memories(problem, estimator, stages)]
    per_sequence = 10 * (763 + 232) * 2 * 8 * 128 * 2
    fits = sequences_that_fit(problem, estimator, stages)
    assert 0 < fits <= min(rooms) // per_sequence < max(rooms) // per_sequence


# ---- what stock engines run


MIXED = {"g6.12xlarge": 1, "g6e.xlarge": 2, "g5.xlarge": 1, "g4dn.12xlarge": 1}


@pytest.mark.parametrize("objective", ["throughput", "throughput_per_cost", "cost"])
@pytest.mark.parametrize("solver", solver_names())
@pytest.mark.parametrize("engine", list(ENGINES))
def test_a_plan_for_an_engine_keeps_its_limits(engine: str, solver: str, objective: Any) -> None:
    """Stock vLLM runs one degree, one number format and as many GPUs on every node; the plugin lifts some of it."""
    workload = hp.Workload(input_tokens=763, output_tokens=232, requests_per_s=1)
    plan = verified(
        hp.optimize(
            model="qwen2.5-14b", cluster=MIXED, workload=workload, engine=engine, solver=solver, objective=objective
        )
    )
    for pipeline in plan.deployments[0].pipelines:
        stages = pipeline.stages
        per_node = Counter(stage.node for stage in stages for _ in stage.gpu_indices)
        if engine != "hetplan":
            assert len({stage.tensor_parallel for stage in stages}) == 1
            assert len(set(per_node.values())) == 1
        assert len({stage.compute_dtype for stage in stages}) == 1
        nodes = [stage.node for stage in stages]
        assert nodes == sorted(nodes), "the stages on a node follow one another"


def test_without_an_engine_degrees_may_differ() -> None:
    """The limits are what keeps them equal: this cluster's best plan mixes degrees."""
    plan = verified(hp.optimize(model="llama-3.1-70b", cluster={"g6e.xlarge": 4, "g5.12xlarge": 1}, workload=WORKLOAD))
    degrees = [{stage.tensor_parallel for stage in p.stages} for p in plan.deployments[0].pipelines]
    assert any(len(some) > 1 for some in degrees)


def test_the_plugin_gives_back_what_stock_limits_cost() -> None:
    """Mixed degrees are allowed, mixed number formats are not: a T4 has no bf16."""
    free, plugin, stock = (
        verified(hp.optimize(model="qwen2.5-14b", cluster=MIXED, workload=WORKLOAD, engine=engine))
        for engine in (None, "hetplan", "vllm-0.32")
    )
    assert stock.objective < plugin.objective <= free.objective
    for plan in (free, plugin, stock):
        assert plan.bound is not None
        assert plan.objective <= plan.bound * (1 + 1e-9)
    shapes = [
        (stages, {s.tensor_parallel for s in stages}) for p in plugin.deployments[0].pipelines for stages in [p.stages]
    ]
    assert any(len(degrees) > 1 for _, degrees in shapes), "this cluster's best plan mixes degrees"
    assert all(len({s.compute_dtype for s in stages}) == 1 for stages, _ in shapes)


def test_limits_that_no_solver_keeps_are_refused() -> None:
    with pytest.raises(hp.InvalidInputError, match="equal-gpus-per-node without one-tensor-parallel-degree"):
        get_engine("vllm-0.32").replace(limits=("equal-gpus-per-node",))


def test_an_unknown_engine_lists_the_known() -> None:
    with pytest.raises(hp.UnknownNameError, match=r"vllm-0\.32"):
        hp.optimize(model=tiny_llama(), cluster={"g6.xlarge": 1}, workload=WORKLOAD, engine="vllm")
