"""HexGen (Jiang et al., ICML 2024): genetic search over groups of devices, a dynamic program inside each group.

| symbol | here |
|---|---|
| D, the devices | machines of the cluster's pools |
| a partition of D into pipeline groups | a tuple of keys, each the machines of every pool in one group |
| S, the stages of a pipeline | `Group` list of a chain, from `layout._layouts` |
| D_ij, the devices of a stage | one tensor-parallel group of a machine |
| l_ij, its layers | cuts of a chain, from `layout._proportional` |
| merge, split, swap | `_mutate` |

The first population groups what is close: machines of one pool, machines of one region
or of joined ones, each machine alone.

Departures. HexGen's groups are of GPUs and may share a machine; here a machine belongs to one pipeline, the
inventory's rule, and machines of one pool are counted, not named. Its fitness is simulated attainment of latency
deadlines, and its dynamic program minimises a request's latency; here both look at the objective of the problem,
and the program at the slowest stage for each number of stages. Stages stand in the order of the pools, or in
reverse, and no GPU of a machine stays idle. Layers are shared out by the bytes of each layer, so that unequal kinds of
layers fill memory evenly.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from hetplan.errors import NoSolutionError
from hetplan.estimator.base import make_estimator
from hetplan.plan import Plan
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import OnIncumbent, PipelineChoice, Progress, Solution, check_count, check_time_limit
from hetplan.solvers.placement.bound import refuse_infeasible
from hetplan.solvers.placement.chain import Chains, MachineSet, as_asked, machine_sets
from hetplan.solvers.placement.choice import better, cost_of, objective_of, offer_prices
from hetplan.solvers.placement.layout import Layout, best_layout
from hetplan.solvers.placement.tables import stage_options

# Machines of each pool in one group, and groups in a sorted order: what the same machines share is solved once.
_Key = tuple[int, ...]
_Partition = tuple[_Key, ...]

# Individuals drawn, of which the fittest has the offspring.
_TOURNAMENT = 3


@dataclass(slots=True)
class _Search:
    """What one run knows: the tables, the random numbers, and the best layout and pipeline of each group met."""

    problem: PlacementProblem
    chains: Chains
    sets: list[MachineSet]
    prices: list[float]
    generator: np.random.Generator
    perturbations: int
    layouts: dict[_Key, Layout | None] = field(default_factory=dict)
    chosen: dict[_Key, tuple[PipelineChoice, float] | None] = field(default_factory=dict)

    def layout(self, key: _Key) -> Layout | None:
        if key not in self.layouts:
            self.layouts[key] = best_layout(self.chains, self.sets, key, self.generator, self.perturbations)
        return self.layouts[key]

    def choice(self, key: _Key) -> tuple[PipelineChoice, float] | None:
        if key not in self.chosen:
            found = self.layout(key)
            self.chosen[key] = None if found is None else self.chains.choice(found.groups, found.cuts, found.pools)
        return self.chosen[key]

    def cost(self, key: _Key) -> float:
        return math.fsum(n * price for n, price in zip(key, self.prices, strict=True))


class HexGen:
    """HexGen's two-phase search.

    Parameters
    ----------
    generations : int
        Offspring tried: a limit that is the same on every machine.
    population : int
        Partitions kept.
    perturbations : int
        Layers moved at random in each of a group's best layouts.
    """

    name: ClassVar[str] = "hexgen"

    def __init__(self, generations: int = 400, population: int = 16, perturbations: int = 48) -> None:
        self.generations = check_count(generations, "generations", most=1_000_000)
        self.population = check_count(population, "population")
        self.perturbations = check_count(perturbations, "perturbations")

    def solve(
        self,
        problem: PlacementProblem,
        *,
        time_limit_s: float = 60.0,
        seed: int = 0,
        warm_start: Plan | None = None,
        on_incumbent: OnIncumbent | None = None,
    ) -> Solution:
        """Evolve partitions; see `hetplan.solvers.base.Solver`. The first population is always finished."""
        began = time.monotonic()
        deadline = began + check_time_limit(time_limit_s)
        problem.refuse_unsupported()
        estimator = make_estimator(problem)
        pools = problem.cluster.pools
        if not stage_options(problem, list(range(len(pools))), whole_nodes=False):
            refuse_infeasible(problem, estimator)
        prices = offer_prices(problem)
        search = _Search(
            problem,
            Chains(problem, estimator),
            machine_sets(problem),
            [prices[pool.offer.name] for pool in pools],
            np.random.default_rng(seed),
            self.perturbations,
        )
        best: Solution | None = None
        fittest = -math.inf

        def look(partition: _Partition, generation: int) -> float:
            nonlocal best, fittest
            fitness = _fitness(search, partition)
            if fitness > fittest:
                fittest = fitness
                found = _solution(search, partition, self)
                if found is not None and better(problem, found.objective, None if best is None else best.objective):
                    best = found
                    if on_incumbent is not None:
                        said = f"generation {generation}: {len(found.pipelines)} pipelines"
                        on_incumbent(Progress(time.monotonic() - began, found.objective, None, said))
            return fitness

        kept = {partition: look(partition, 0) for partition in _seeds(problem)}
        for generation in range(1, self.generations + 1):
            if time.monotonic() > deadline and best is not None:
                break
            child = _mutate(search, _parent(search, kept))
            if child in kept:
                continue
            kept[child] = look(child, generation)
            if len(kept) > self.population:
                del kept[min(kept, key=lambda one: kept[one])]
        if best is None:
            refuse_infeasible(problem, estimator)
            raise NoSolutionError(
                f"hexgen found no plan for {problem.model.name} on this cluster, and no limit rules one out. "
                "Try solver='auto', more generations, or more machines"
            )
        return best


def _seeds(problem: PlacementProblem) -> list[_Partition]:
    """Partitions read off the topology."""
    pools = problem.cluster.pools
    counts = [pool.count for pool in pools]
    unit = np.eye(len(pools), dtype=np.int64)
    by_pool = [(unit[p] * n).tolist() for p, n in enumerate(counts) if n]
    alone = [unit[p].tolist() for p, n in enumerate(counts) for _ in range(n)]
    together = [sum(unit[p] * counts[p] for p in group).tolist() for group in problem.cluster.pool_groups()]
    return list(dict.fromkeys(_partition(one) for one in (by_pool, together, alone)))


def _partition(groups: list[list[int]]) -> _Partition:
    return tuple(sorted(tuple(group) for group in groups if any(group)))


def _parent(search: _Search, kept: dict[_Partition, float]) -> _Partition:
    drawn = search.generator.integers(len(kept), size=_TOURNAMENT)
    entrants = list(kept)
    return max((entrants[i] for i in drawn), key=lambda one: kept[one])


def _mutate(search: _Search, parent: _Partition) -> _Partition:
    """Merge two groups, split one at random, or swap a machine of one with a machine of another."""
    draw = search.generator
    groups = [list(group) for group in parent]
    kind = int(draw.integers(3))
    if kind == 1:
        a = int(draw.integers(len(groups)))
        taken = draw.integers(0, np.array(groups[a]) + 1).tolist()
        groups.append(taken)
        groups[a] = [have - n for have, n in zip(groups[a], taken, strict=True)]
    elif len(groups) > 1:
        a, b = draw.choice(len(groups), size=2, replace=False).tolist()
        if kind == 0:
            groups[a] = [x + y for x, y in zip(groups[a], groups[b], strict=True)]
            del groups[b]
        else:
            p, q = (int(draw.choice(np.repeat(np.arange(len(g)), g))) for g in (groups[a], groups[b]))
            for group, gone, come in ((groups[a], p, q), (groups[b], q, p)):
                group[gone] -= 1
                group[come] += 1
    return _partition(groups)


def _fitness(search: _Search, partition: _Partition) -> float:
    """What the plan of a partition is worth: higher is better, also for costs."""
    found = [search.layout(key) for key in partition]
    values = [0.0 if one is None else one.value for one in found]
    costs = [search.cost(key) for key in partition]
    kept = as_asked(search.problem, costs, values)
    total = math.fsum(values[i] for i in kept)
    if search.problem.objective == "throughput":
        return total
    if search.problem.objective == "throughput_per_cost":
        return max((values[i] / costs[i] for i in kept), default=0.0)
    # Short of the demand, whatever serves more is nearer; with it, whatever costs less.
    return -math.fsum(costs[i] for i in kept) if kept else -1e12 + math.fsum(values)


def _solution(search: _Search, partition: _Partition, solver: HexGen) -> Solution | None:
    """The plan of a partition, its batches chosen by the estimator itself."""
    chosen = [one for one in map(search.choice, partition) if one is not None]
    costs = [cost_of(search.problem, [choice]) for choice, _ in chosen]
    kept = [chosen[i] for i in as_asked(search.problem, costs, [value for _, value in chosen])]
    if not kept:
        return None
    return Solution(
        pipelines=tuple(choice for choice, _ in kept),
        objective=objective_of(search.problem, [c for c, _ in kept], [v for _, v in kept]),
        parameters={
            "generations": solver.generations,
            "population": solver.population,
            "perturbations": solver.perturbations,
        },
    )
