"""AlpaServe's groups against every group, factorisation, split and batch, on clusters small enough to try them all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from builders import TINY_MIXTURE, make_cluster, make_gpu, make_machine, make_pool, problem_of, tiny_llama, verified

import hetplan as hp
from hetplan.catalog.offers import Cluster
from hetplan.estimator.base import make_estimator
from hetplan.estimator.pipeline import StageShape, micro_batch, pipeline_rates, sequences_that_fit
from hetplan.problem.placement import PlacementProblem

MIXTURE = hp.ModelSpec.from_config(TINY_MIXTURE | {"num_hidden_layers": 8, "first_k_dense_replace": 3}, name="mixture")


def random_cluster(seed: int, memories_gib: tuple[float, ...]) -> Cluster:
    """One or two pools, of little memory, of GPUs and machines that talk fast or hardly at all."""
    dice = np.random.default_rng(seed)
    pools = []
    for index in range(dice.integers(1, 3)):
        gpu = make_gpu(
            f"gpu-{index}",
            memory_gib=float(dice.choice(memories_gib)),
            gb_per_s=float(dice.integers(50, 900)),
            tflops=float(dice.integers(2, 200)),
        )
        pcie, network = dice.choice([1e8, 1e9, 1e10]), dice.choice([2e7, 2e8, 3e9])
        machine = make_machine(
            f"box-{index}", gpu=gpu, gpu_count=int(dice.integers(1, 4)), pcie=float(pcie), network=float(network)
        )
        pools.append((machine, make_pool(machine, int(dice.integers(2, 8)), usd=float(dice.integers(1, 9)))))
    return make_cluster(*pools)


def random_problem(seed: int, **options: Any) -> PlacementProblem:
    """Even seeds as calibrated, every other one of two kinds of layers; odd ones as in the paper."""
    model = MIXTURE if seed % 4 == 0 else tiny_llama(num_hidden_layers=5 + seed % 3)
    if seed % 2:
        memories, estimator = (0.1, 0.13, 0.2), "paper"
    else:
        memories, estimator = ((0.22, 0.25, 0.28, 0.31) if model is MIXTURE else (0.56, 0.6, 0.65, 0.8)), "calibrated"
    defaults: dict[str, Any] = {"max_num_seqs": 60, "max_num_batched_tokens": 256, "estimator": estimator}
    if seed % 3 == 0:
        # One request may need more than the few that run.
        defaults["max_model_len"] = 6000
    problem: PlacementProblem = problem_of(model, random_cluster(seed, memories), **(defaults | options))
    return problem


def groups(count: int, gpus: int) -> Iterator[tuple[int, int]]:
    """(machines, GPUs of each): parts of one machine, powers of two of whole ones, and all of them."""
    yield from ((1, used) for used in (1, 2, 4) if used < gpus)
    yield from ((machines, gpus) for machines in range(1, count + 1) if machines in (1, 2, 4, count))


def replicas(problem: PlacementProblem, pool: int) -> Iterator[tuple[int, list[StageShape]]]:
    """Machines and stages of every replica that a pool can hold."""
    count = problem.cluster.pools[pool].count
    machine = problem.cluster.instance_type(problem.cluster.pools[pool].offer.instance_type)
    layers = problem.model.layer_count
    for machines, gpus in groups(count, machine.gpu_count):
        for degree in machine.valid_tensor_parallel(problem.model):
            stages = machines * gpus // degree
            if gpus % degree or stages > layers:
                continue
            for cuts in itertools.combinations(range(1, layers), stages - 1):
                parts = itertools.pairwise([0, *cuts, layers])
                yield machines, [StageShape(p, machine, degree, s * degree // gpus) for s, p in enumerate(parts)]


def rate(problem: PlacementProblem, stages: list[StageShape]) -> float:
    """The most of all batches within the limits; in the paper's mode the largest batch alone."""
    estimator = make_estimator(problem)
    most = micro_batch(estimator, sequences_that_fit(problem, estimator, stages), len(stages))
    if most < 1:
        return 0.0
    batches = np.arange(1 if estimator.micro_batches else most, most + 1)
    rates = pipeline_rates(problem, estimator, stages, batches)
    limit = np.inf if problem.slo is None else problem.slo.limits()["e2e_s"]
    return float(np.max(np.where(rates.latency_s <= limit, rates.requests_per_s, 0.0)))


def best_by_size(problem: PlacementProblem, pool: int) -> dict[int, float]:
    best: dict[int, float] = {}
    for machines, stages in replicas(problem, pool):
        best[machines] = max(best.get(machines, 0.0), rate(problem, stages))
    return best


def filled(best: dict[int, float], machines: int) -> float:
    """Equal groups of one size, and the rest in the same way."""
    options = [value * (machines // n) + filled(best, machines % n) for n, value in best.items() if n <= machines]
    return max(options, default=0.0)


def solve(problem: PlacementProblem) -> hp.Plan | None:
    try:
        return verified(hp.optimize(problem, solver="alpaserve"))
    except hp.NoSolutionError:
        return None


@pytest.mark.parametrize("seed", range(40))
def test_the_best_of_every_group_split_and_batch(seed: int) -> None:
    problem = random_problem(seed)
    pools = problem.cluster.pools
    best = sum(filled(best_by_size(problem, index), pool.count) for index, pool in enumerate(pools))
    plan = solve(problem)
    assert (0.0 if plan is None else plan.objective) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", [2, 4, 6, 10, 14, 18])
def test_the_best_within_a_hard_limit(seed: int) -> None:
    free = solve(random_problem(seed))
    assert free is not None
    slowest = max(p.predictions.latency_s.value for p in free.deployments[0].pipelines)
    problem = random_problem(seed, slo=hp.Slo(e2e_s=slowest * 0.6, hard=True))
    pools = problem.cluster.pools
    best = sum(filled(best_by_size(problem, index), pool.count) for index, pool in enumerate(pools))
    plan = solve(problem)
    assert best < free.objective
    assert (0.0 if plan is None else plan.objective) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_the_best_replica_per_dollar(seed: int) -> None:
    problem = random_problem(seed, objective="throughput_per_cost")
    ratios = [
        value / (machines * pool.offer.billed_usd_per_hour)
        for index, pool in enumerate(problem.cluster.pools)
        for machines, value in best_by_size(problem, index).items()
    ]
    plan = solve(problem)
    assert (0.0 if plan is None else plan.objective) == pytest.approx(max(ratios, default=0.0), rel=1e-9)


def alike(count: int, *, gpu_count: int = 1, memory_gib: float = 8) -> Cluster:
    machine = make_machine(gpu=make_gpu(memory_gib=memory_gib), gpu_count=gpu_count)
    return make_cluster((machine, make_pool(machine, count)))


def machines_used(plan: hp.Plan) -> int:
    return sum(pipeline.count * len(pipeline.nodes) for pipeline in plan.deployments[0].pipelines)


def test_replicas_fill_the_cluster() -> None:
    """Where one machine holds the model, each of seven serves; where it takes two, one is left over."""
    # Many sequences on one GPU gain nothing from a second stage.
    roomy = verified(hp.optimize(problem_of(tiny_llama(), alike(7), max_num_seqs=8), solver="alpaserve"))
    assert machines_used(roomy) == 7
    tight = problem_of(tiny_llama(num_hidden_layers=4), alike(7, memory_gib=0.13), estimator="paper")
    plan = verified(hp.optimize(tight, solver="alpaserve"))
    assert all(len(pipeline.nodes) > 1 for pipeline in plan.deployments[0].pipelines)
    assert machines_used(plan) >= 6


def test_a_demand_takes_as_many_replicas_as_it_needs() -> None:
    one = hp.optimize(problem_of(tiny_llama(), alike(1), max_num_seqs=8), solver="alpaserve").requests_per_s
    for needed in (1, 2, 3):
        asked = hp.Workload(input_tokens=763, output_tokens=232, requests_per_s=one * (needed - 0.5))
        problem = problem_of(tiny_llama(), alike(6), asked, objective="cost", max_num_seqs=8)
        assert machines_used(verified(hp.optimize(problem, solver="alpaserve"))) == needed


def test_the_last_replica_is_the_cheapest_that_suffices() -> None:
    """A little more than the good offer serves is bought at the small one, not twice."""
    large, small = make_machine("large"), make_machine("small", gpu=make_gpu("X0", gb_per_s=150, tflops=30))
    cluster = make_cluster((large, make_pool(large, 2, usd=1)), (small, make_pool(small, 2, usd=0.7)))
    one = hp.optimize(problem_of(tiny_llama(), alike(1), max_num_seqs=8), solver="alpaserve").requests_per_s
    asked = hp.Workload(input_tokens=763, output_tokens=232, requests_per_s=one * 1.2)
    problem = problem_of(tiny_llama(), cluster, asked, objective="cost", max_num_seqs=8)
    plan = verified(hp.optimize(problem, solver="alpaserve"))
    assert plan.cost_usd_per_hour == pytest.approx(1.7)


def test_layers_of_unequal_kinds_are_split_by_time() -> None:
    """Two dense layers before four of experts: no worse than the same number of layers everywhere."""
    problem = problem_of(MIXTURE, alike(1, gpu_count=2, memory_gib=1), max_num_seqs=48)
    even = hp.optimize(problem, solver="even")
    plan = verified(hp.optimize(problem, solver="alpaserve"))
    assert plan.objective >= even.objective * (1 - 1e-12)


@pytest.mark.parametrize("make", [lambda: tiny_llama(num_hidden_layers=9), lambda: MIXTURE])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_machines_that_are_all_alike_do_no_worse_than_even(make: Callable[[], hp.ModelSpec], count: int) -> None:
    problem = problem_of(make(), alike(count, gpu_count=2, memory_gib=1), max_num_seqs=48, engine="vllm-0.32")
    even, plan = hp.optimize(problem, solver="even"), verified(hp.optimize(problem, solver="alpaserve"))
    assert plan.objective >= even.objective * (1 - 1e-12)


def test_a_model_that_no_pool_holds_alone_is_left_to_others() -> None:
    one, other = (make_machine(f"box-{n}", gpu=make_gpu(f"X{n}", memory_gib=0.13)) for n in "ab")
    cluster = make_cluster((one, make_pool(one)), (other, make_pool(other)))
    problem = problem_of(tiny_llama(), cluster, estimator="paper")
    verified(hp.optimize(problem))
    with pytest.raises(hp.NoSolutionError, match="no group of machines of one pool serves tiny"):
        hp.optimize(problem, solver="alpaserve")


def test_a_demand_beyond_all_groups_is_told_with_what_they_serve() -> None:
    served = hp.optimize(problem_of(tiny_llama(), alike(2), max_num_seqs=8), solver="alpaserve").requests_per_s
    asked = hp.Workload(input_tokens=763, output_tokens=232, requests_per_s=served * 1.01)
    with pytest.raises(hp.NoSolutionError, match=f"{served:.4g}"):
        hp.optimize(problem_of(tiny_llama(), alike(2), asked, objective="cost", max_num_seqs=8), solver="alpaserve")
