"""Every plan of a tiny cluster, tried one by one with the estimator itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from builders import TINY_MIXTURE, make_cluster, make_gpu, make_machine, make_pool, problem_of, tiny_llama

import hetplan as hp
from hetplan.catalog.offers import Cluster
from hetplan.estimator.base import make_estimator
from hetplan.estimator.pipeline import StageShape, micro_batch, pipeline_rates, sequences_that_fit
from hetplan.problem.placement import PlacementProblem

SLOW, FAST = make_gpu("slow", memory_gib=1, gb_per_s=200, tflops=40), make_gpu("fast", memory_gib=1.5, gb_per_s=700)
ROOMY = make_gpu("roomy", memory_gib=4, gb_per_s=120, tflops=20)
SMALL = make_gpu("small", memory_gib=0.5, gb_per_s=400, tflops=80)


def cluster(*pools: tuple[str, int, int]) -> Cluster:
    """(GPU, GPUs of a machine, machines) of each pool."""
    gpus = {gpu.name: gpu for gpu in (SLOW, FAST, ROOMY, SMALL)}
    made = []
    for name, gpu_count, count in pools:
        machine = make_machine(f"{gpu_count}x{name}", gpu=gpus[name], gpu_count=gpu_count)
        made.append((machine, make_pool(machine, count, usd=1.0 + gpu_count)))
    return make_cluster(*made)


# Two or three machines each.
TINY = {
    "alike": cluster(("slow", 1, 2)),
    "one fast": cluster(("slow", 1, 2), ("fast", 1, 1)),
    "memory against speed": cluster(("roomy", 1, 1), ("small", 1, 2)),
    "node of two": cluster(("small", 2, 1), ("fast", 1, 1)),
    "too small alone": cluster(("small", 1, 3)),
    "all unlike": cluster(("slow", 1, 1), ("fast", 1, 1), ("small", 2, 1)),
}
MIXTURE_CLUSTER = cluster(("roomy", 1, 1), ("fast", 1, 1), ("roomy", 2, 1))


def mixture_problem(**options: Any) -> PlacementProblem:
    """Two kinds of layers; 16 sequences at most, so that searches look at every batch."""
    model = hp.ModelSpec.from_config(TINY_MIXTURE, name="tiny-mixture")
    workload = hp.Workload(input_tokens=763, output_tokens=232)
    return problem_of(model, MIXTURE_CLUSTER, workload, **({"max_num_seqs": 16} | options))


@cache
def tiny_problem(name: str, objective: str = "throughput") -> PlacementProblem:
    return problem_of(
        tiny_llama(num_hidden_layers=4), TINY[name], hp.Workload(input_tokens=763, output_tokens=232),
        objective=objective, max_num_seqs=16, max_num_batched_tokens=256,
    )  # fmt: skip


def splits(layers: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield list(itertools.pairwise([0, *cuts, layers]))


def _groups(problem: PlacementProblem, pools: tuple[int, ...]) -> Iterator[list[tuple[int, int]]]:
    """Every way to cut some machines into tensor-parallel groups, as (machine, degree), none of them idle."""
    ways: list[list[tuple[int, ...]]] = []
    for pool in pools:
        machine = problem.cluster.instance_type(problem.cluster.pools[pool].offer.instance_type)
        degrees = machine.valid_tensor_parallel(problem.model)
        ways.append(
            [
                way
                for size in range(1, machine.gpu_count + 1)
                for way in itertools.combinations_with_replacement(degrees, size)
                if sum(way) <= machine.gpu_count
            ]
        )
    for choice in itertools.product(*ways):
        yield [(node, degree) for node, way in enumerate(choice) for degree in way]


def _orders(groups: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every order of the groups in which those of one machine stand side by side."""
    for order in set(itertools.permutations(groups)):
        visits = [node for node, _ in itertools.groupby(node for node, _ in order)]
        if len(visits) == len(set(visits)):
            yield order


@cache
def best_pipeline(name: str, pools: tuple[int, ...]) -> float:
    """Most requests/s of one pipeline on all of these machines."""
    problem = tiny_problem(name)
    estimator, layers, best = make_estimator(problem), problem.model.layer_count, 0.0
    machines = [problem.cluster.instance_type(problem.cluster.pools[pool].offer.instance_type) for pool in pools]
    for groups in _groups(problem, pools):
        if len(groups) > layers:
            continue
        for order in _orders(groups):
            for parts in splits(layers, len(order)):
                stages = [
                    StageShape(part, machines[node], degree, node)
                    for part, (node, degree) in zip(parts, order, strict=True)
                ]
                most = micro_batch(estimator, sequences_that_fit(problem, estimator, stages), len(stages))
                if most >= 1:
                    rates = pipeline_rates(problem, estimator, stages, np.arange(1, most + 1))
                    best = max(best, float(rates.requests_per_s.max()))
    return best


def _plans(machines: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Every partition of the machines; one that is no use makes a pipeline of rate zero."""
    if not machines:
        yield []
        return
    first, *rest = machines
    for size in range(len(rest) + 1):
        for mates in itertools.combinations(range(len(rest)), size):
            others = tuple(pool for i, pool in enumerate(rest) if i not in mates)
            for further in _plans(others):
                yield [(first, *(rest[i] for i in mates)), *further]


def best_plan(name: str) -> float:
    """Most requests/s of any plan."""
    pools = tiny_problem(name).cluster.pools
    machines = tuple(index for index, pool in enumerate(pools) for _ in range(pool.count))
    return max(sum(best_pipeline(name, tuple(sorted(group))) for group in plan) for plan in _plans(machines))
