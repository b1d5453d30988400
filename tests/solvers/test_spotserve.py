"""SpotServe against every (D, P, M), and its mapping against every assignment of machines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from builders import TINY_MIXTURE, make_cluster, make_gpu, make_machine, make_pool, problem_of, tiny_llama, verified

import hetplan as hp
from hetplan.catalog.offers import Cluster
from hetplan.estimator.base import make_estimator
from hetplan.estimator.pipeline import StageShape, even_layers, micro_batch, pipeline_rates, sequences_that_fit
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import get_solver

MIXTURE = hp.ModelSpec.from_config(TINY_MIXTURE, name="tiny-mixture")


def random_problem(seed: int, *, pools: int = 3, **options: Any) -> PlacementProblem:
    dice = np.random.default_rng(seed)
    made = []
    for index in range(pools):
        gpu = make_gpu(
            f"gpu-{index}",
            memory_gib=float(dice.choice([0.4, 0.6, 1, 4])),
            gb_per_s=float(dice.integers(100, 900)),
            tflops=float(dice.integers(20, 200)),
        )
        machine = make_machine(f"box-{index}", gpu=gpu, gpu_count=int(dice.choice([1, 2, 3, 4])))
        made.append((machine, make_pool(machine, int(dice.integers(1, 6)), usd=float(dice.integers(1, 9)))))
    model = MIXTURE if seed % 3 == 0 else tiny_llama(num_hidden_layers=7 + seed % 3)
    defaults: dict[str, Any] = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 256,
        # The paper has no latent attention.
        "estimator": "paper" if seed % 4 == 1 and seed % 3 else "calibrated",
    }
    problem: PlacementProblem = problem_of(model, make_cluster(*made), **(defaults | options))
    return problem


def configurations(problem: PlacementProblem, pool: int) -> Iterator[tuple[int, float]]:
    """(machines, req/s) of a pipeline of every (P, M)."""
    offer, estimator = problem.cluster.pools[pool], make_estimator(problem)
    machine = problem.cluster.instance_type(offer.offer.instance_type)
    for degree in machine.valid_tensor_parallel(problem.model):
        for stages in range(1, problem.model.layer_count + 1):
            machines = -(-stages * degree // machine.gpu_count)
            if machines > offer.count:
                continue
            edges = itertools.accumulate(even_layers(problem.model.layer_count, stages), initial=0)
            # Stages in order, as evenly as they go.
            nodes = [stage * machines // stages for stage in range(stages)]
            shapes = [
                StageShape(part, machine, degree, node)
                for part, node in zip(itertools.pairwise(edges), nodes, strict=True)
            ]
            most = micro_batch(estimator, sequences_that_fit(problem, estimator, shapes), stages)
            if most >= 1:
                batches = np.arange(1 if estimator.micro_batches else most, most + 1)
                yield machines, float(pipeline_rates(problem, estimator, shapes, batches).requests_per_s.max())


@pytest.mark.parametrize("seed", range(24))
def test_the_best_of_every_configuration(seed: int) -> None:
    problem = random_problem(seed)
    best = sum(
        max((pool.count // machines * rate for machines, rate in configurations(problem, index)), default=0.0)
        for index, pool in enumerate(problem.cluster.pools)
    )
    try:
        found = verified(hp.optimize(problem, solver="spotserve")).objective
    except hp.NoSolutionError:
        found = 0.0
    assert found == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("share", [0.2, 0.55, 0.9])
@pytest.mark.parametrize("seed", range(6))
def test_the_cheapest_that_meets_a_demand(seed: int, share: float) -> None:
    most = hp.optimize(random_problem(seed, pools=1), solver="spotserve").requests_per_s
    asked = hp.Workload(input_tokens=763, output_tokens=232, requests_per_s=most * share)
    problem = random_problem(seed, pools=1, objective="cost", workload=asked)
    pool = problem.cluster.pools[0]
    cheapest = min(
        copies * machines * pool.offer.billed_usd_per_hour
        for machines, rate in configurations(problem, 0)
        for copies in range(1, pool.count // machines + 1)
        if copies * rate >= most * share
    )
    assert verified(hp.optimize(problem, solver="spotserve")).objective == pytest.approx(cheapest)


@pytest.mark.parametrize("engine", [None, "vllm-0.32"])
@pytest.mark.parametrize("seed", range(8))
def test_no_worse_than_even(seed: int, engine: str | None) -> None:
    problem = random_problem(seed, engine=engine)
    even = hp.optimize(problem, solver="even")
    assert verified(hp.optimize(problem, solver="spotserve")).objective >= even.objective * (1 - 1e-12)


def test_an_engine_gets_the_same_number_of_gpus_of_every_node() -> None:
    """Freely five stages lie on two machines; an engine cannot have that."""
    free = hp.optimize(random_problem(14), solver="spotserve").deployments[0].pipelines
    assert [(len(p.stages), len(p.nodes)) for p in free if len(p.stages) % len(p.nodes)] == [(5, 2)]
    kept = verified(hp.optimize(random_problem(14, engine="vllm-0.32"), solver="spotserve"))
    assert all(len(p.stages) % len(p.nodes) == 0 for p in kept.deployments[0].pipelines)


# ---- the mapping


def cluster(count: int, *, memory_gib: float, gpu_count: int = 1) -> Cluster:
    # GPUs that hardly talk: stages of one each, not tensor parallelism.
    machine = make_machine(gpu=make_gpu(memory_gib=memory_gib), gpu_count=gpu_count, pcie=1e8)
    return make_cluster((machine, make_pool(machine, count)))


def chained(count: int, *, gpu_count: int = 1, model: hp.ModelSpec | None = None, **options: Any) -> PlacementProblem:
    """Little memory, so that pipelines run over several machines. The paper's weights are those of the layers."""
    model = model or tiny_llama(num_hidden_layers=12)
    return problem_of(model, cluster(count, memory_gib=0.13, gpu_count=gpu_count), estimator="paper", **options)


def held(plan: hp.Plan) -> list[set[int]]:
    """Layers on each machine: pipeline by pipeline, copy by copy, node by node."""
    machines = []
    for pipeline in plan.deployments[0].pipelines:
        stages = [[s.layers for s in pipeline.stages if s.node == node] for node in range(len(pipeline.nodes))]
        machines += [{layer for a, b in parts for layer in range(a, b)} for parts in stages] * pipeline.count
    return machines


def layer_bytes(model: hp.ModelSpec) -> int:
    return model.layer_weight_bytes(0, 1)


def weight_bytes(plan: hp.Plan) -> int:
    pipelines = plan.deployments[0].pipelines
    return sum(p.count * s.weight_bytes * s.tensor_parallel for p in pipelines for s in p.stages)


def figures(plan: hp.Plan) -> tuple[list[str], int, int]:
    """Old machine of each new one, bytes reused, bytes moved."""
    said = plan.provenance.parameters
    reused, moved = said["reused_weight_bytes"], said["moved_weight_bytes"]
    assert isinstance(reused, int)
    assert isinstance(moved, int)
    return str(said["machines"]).split(","), reused, moved


@pytest.mark.parametrize("lost", range(5))
@pytest.mark.parametrize("replaced", [False, True])
def test_a_lost_machine_moves_the_least_of_all_mappings(lost: int, replaced: bool) -> None:
    before = verified(hp.optimize(chained(5), solver="spotserve"))
    old = held(before)
    assert len(old) == 5
    problem = chained(5 if replaced else 4)
    after = verified(hp.optimize(problem, solver="spotserve", lost_machines=[lost], warm_start=before))
    new, each = held(after), layer_bytes(problem.model)
    left = [n for n in range(5) if n != lost] + [None] * replaced
    least = max(
        sum(len(layers & old[n]) for layers, n in zip(new, order, strict=True) if n is not None)
        for order in itertools.permutations(left, len(new))
    )
    machines, reused, moved = figures(after)
    assert reused == least * each
    assert moved == weight_bytes(after) - reused
    # What it says of each machine adds up to it.
    assert (
        sum(len(layers & old[int(n)]) for layers, n in zip(new, machines, strict=True) if n != "new") * each == reused
    )
    assert str(lost) not in machines
    assert len(set(machines) - {"new"}) == len(machines) - machines.count("new")


@pytest.mark.parametrize("estimator", ["paper", "calibrated"])
def test_a_replaced_machine_fetches_its_own_part_only(estimator: str) -> None:
    """With the embedding and the head, where the estimator places them."""
    memory = 0.13 if estimator == "paper" else 0.8
    problem = problem_of(
        tiny_llama(num_hidden_layers=12), cluster(5, memory_gib=memory), estimator=estimator, max_num_batched_tokens=256
    )
    before = verified(hp.optimize(problem, solver="spotserve"))
    pipeline = before.deployments[0].pipelines[0]
    for node in range(len(pipeline.nodes)):
        after = hp.optimize(problem, solver="spotserve", lost_machines=[node], warm_start=before)
        machines, _, moved = figures(after)
        assert moved == sum(s.weight_bytes * s.tensor_parallel for s in pipeline.stages if s.node == node)
        assert machines == ["new" if n == node else str(n) for n in range(len(machines))]


def test_the_same_inventory_moves_nothing() -> None:
    problem = random_problem(3)
    before = hp.optimize(problem, solver="spotserve")
    after = verified(hp.optimize(problem, solver="spotserve", warm_start=before))
    machines, reused, moved = figures(after)
    assert (reused, moved) == (weight_bytes(before), 0)
    assert machines == [str(n) for n in range(len(machines))]


@pytest.mark.parametrize("lost", range(5))
def test_among_equal_machines_those_that_are_left_keep_their_places(lost: int) -> None:
    problem = problem_of(tiny_llama(), cluster(5, memory_gib=8), max_num_seqs=8)
    before = hp.optimize(problem, solver="spotserve")
    assert before.deployments[0].pipelines[0].count == 5
    after = hp.optimize(problem, solver="spotserve", lost_machines=[lost], warm_start=before)
    assert figures(after)[0] == ["new" if n == lost else str(n) for n in range(5)]


def test_a_copy_that_lost_no_machine_stays_as_it_is() -> None:
    """Four machines in two pipelines: without one of them a pipeline is left, and nothing moves."""
    before = hp.optimize(chained(4, model=tiny_llama(num_hidden_layers=6), max_num_seqs=1), solver="spotserve")
    pipeline = before.deployments[0].pipelines[0]
    copies, length = pipeline.count, len(pipeline.nodes)
    assert copies > 1
    fewer = chained(4 - length, model=tiny_llama(num_hidden_layers=6), max_num_seqs=1)
    gone = list(range(length))
    after = hp.optimize(fewer, solver="spotserve", lost_machines=gone, warm_start=before)
    machines, _, moved = figures(after)
    assert moved == 0
    assert machines == [str(n) for n in range(length, 4)]


def test_several_stages_of_a_machine_are_counted_together() -> None:
    """A machine that held two stages gives what either shares with the new ones."""
    before = verified(hp.optimize(chained(3, gpu_count=2), solver="spotserve"))
    after = verified(hp.optimize(chained(2, gpu_count=2), solver="spotserve", lost_machines=[0], warm_start=before))
    assert all(len(p.stages) == 2 * len(p.nodes) for plan in (before, after) for p in plan.deployments[0].pipelines)
    old, new = held(before), held(after)
    least = max(
        sum(len(layers & old[n]) for layers, n in zip(new, order, strict=True))
        for order in itertools.permutations([1, 2], len(new))
    )
    assert figures(after)[1] == least * layer_bytes(before.problem.model)


def test_a_plan_of_another_solver_or_of_another_model() -> None:
    """Machines of any plan are taken on; weights of another model are of no use."""
    problem = chained(5)
    after = hp.optimize(problem, solver="spotserve", warm_start=hp.optimize(problem, solver="dp-beam"))
    assert figures(after)[1] > 0
    other = hp.optimize(chained(5, model=tiny_llama(num_hidden_layers=11)), solver="even")
    assert figures(hp.optimize(problem, solver="spotserve", warm_start=other))[1:] == (0, weight_bytes(after))


def test_machines_beyond_the_inventory_are_gone_too() -> None:
    before = hp.optimize(chained(5), solver="spotserve")
    after = hp.optimize(chained(4), solver="spotserve", warm_start=before)
    assert "4" not in figures(after)[0]


@pytest.mark.parametrize("lost", [-1, 1.5, True, "0", [0, -1], None])
def test_lost_machines_are_numbers(lost: Any) -> None:
    with pytest.raises(hp.InvalidInputError, match="lost_machines"):
        get_solver("spotserve", lost_machines=lost)


def test_lost_machines_are_of_the_plan_before() -> None:
    problem = chained(5)
    with pytest.raises(hp.InvalidInputError, match="is not given"):
        hp.optimize(problem, solver="spotserve", lost_machines=[0])
    before = hp.optimize(problem, solver="spotserve")
    with pytest.raises(hp.InvalidInputError, match="names machine 5; the plan before has 5"):
        hp.optimize(problem, solver="spotserve", lost_machines=[5], warm_start=before)


def test_a_demand_or_a_model_beyond_single_pools_is_told() -> None:
    one, other = (make_machine(f"box-{n}", gpu=make_gpu(f"X{n}", memory_gib=0.13)) for n in "ab")
    problem = problem_of(
        tiny_llama(), make_cluster((one, make_pool(one)), (other, make_pool(other))), estimator="paper"
    )
    verified(hp.optimize(problem))
    with pytest.raises(hp.NoSolutionError, match="no even pipeline of one machine type serves tiny"):
        hp.optimize(problem, solver="spotserve")
    served = hp.optimize(chained(5), solver="spotserve").requests_per_s
    asked = hp.Workload(input_tokens=763, output_tokens=232, requests_per_s=served * 1.001)
    with pytest.raises(hp.NoSolutionError, match="does not serve that"):
        hp.optimize(chained(5, workload=asked, objective="cost"), solver="spotserve")
