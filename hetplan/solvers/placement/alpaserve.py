"""AlpaServe (OSDI'23): equal groups of machines, pipeline and operator parallelism inside, replicas until they run out.

| paper | here |
|---|---|
| bucket | a pool: machines of one offer |
| group partition | groups of equal size: ``_Group.machines`` and ``gpus``; powers of two, and the whole pool |
| (inter_op, intra_op) | ``_Group.stages``, ``_Group.tensor_parallel`` |
| F(s, k), the minimal slowest stage of k layers on s stages | ``_slowest``, over ranges of layers by kind |
| greedy model selection | ``_fill`` (throughput), ``_cover`` (cost) |
| simulated goodput | the estimator's rate at the best micro-batch; nothing under a broken hard limit |

Departures. Goodput of simulated arrivals is replaced by the predicted rate, so one model needs no simulator. A forward
pass has one time per stage; here a stage has two phases, and the split minimises the slowest prefill plus the slowest
decode, which the rate is made of, over a range of batches. A machine serves one pipeline: a group smaller than a
machine leaves its other GPUs idle. Sizes count machines, so that machines of three GPUs form groups too; what equal
groups leave over is cut again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hetplan.errors import NoSolutionError
from hetplan.estimator.base import Estimator, FloatArray, make_estimator
from hetplan.estimator.pipeline import StageShape
from hetplan.plan import Plan
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import OnIncumbent, PipelineChoice, Progress, Solution, check_time_limit
from hetplan.solvers.placement.bound import refuse_infeasible
from hetplan.solvers.placement.choice import better, choose_batch, cost_of, objective_of
from hetplan.solvers.placement.tables import FIRST, LAST, IntArray, StageTables, build_tables, stage_options

# Every batch up to here, then a geometric grid: the best batch of a split is found exactly afterwards.
_EVERY_BATCH = 64
_FURTHER_BATCHES = 32

_Scored = tuple[PipelineChoice, float]


@dataclass(frozen=True, slots=True)
class _Group:
    """How one replica lies on machines of a pool: ``gpus`` of each in groups of ``tensor_parallel``."""

    pool: int
    machines: int
    gpus: int
    tensor_parallel: int

    @property
    def stages(self) -> int:
        return self.machines * self.gpus // self.tensor_parallel


class AlpaServe:
    """Equal groups of each pool, the best factorisation inside, replicated."""

    name: ClassVar[str] = "alpaserve"

    def solve(
        self,
        problem: PlacementProblem,
        *,
        time_limit_s: float = 60.0,
        seed: int = 0,
        warm_start: Plan | None = None,
        on_incumbent: OnIncumbent | None = None,
    ) -> Solution:
        """Try every group, small ones first, then place replicas; see `hetplan.solvers.base.Solver`."""
        began = time.monotonic()
        deadline = began + check_time_limit(time_limit_s)
        problem.refuse_unsupported()
        estimator = make_estimator(problem)
        groups = [group for pool in range(len(problem.cluster.pools)) for group in _groups(problem, pool)]
        tables = cache(lambda pool: build_tables(problem, estimator, stage_options(problem, [pool], whole_nodes=False)))

        best: dict[tuple[int, int], _Scored] = {}
        plan: Solution | None = None
        for group in sorted(groups, key=lambda group: (group.machines, group.stages)):
            if plan is not None and time.monotonic() > deadline:
                break
            found = _best_replica(problem, estimator, tables(group.pool), group)
            key = (group.pool, group.machines)
            if found is None or found[1] <= 0 or (key in best and found[1] <= best[key][1]):
                continue
            best[key] = found
            placed = _place(problem, best)
            pipelines, values = [choice for choice, _ in placed], [value for _, value in placed]
            if not placed or not better(
                problem, objective := objective_of(problem, pipelines, values), plan.objective if plan else None
            ):
                continue
            plan = Solution(pipelines=tuple(pipelines), objective=objective)
            if on_incumbent is not None:
                on_incumbent(Progress(time.monotonic() - began, objective, None, f"{len(pipelines)} replicas"))
        if plan is None:
            refuse_infeasible(problem, estimator)
            if best:
                served = sum(value for _, value in _fill(problem, best))
                raise NoSolutionError(
                    f"{problem.model.name} is asked for {problem.workload.requests_per_s:g} req/s; groups of single "
                    f"pools serve {served:.4g}. Use solver='auto', add machines or lower requests_per_s"
                )
            raise NoSolutionError(
                f"no group of machines of one pool serves {problem.model.name} as asked. "
                "Use solver='auto', which mixes types"
            )
        return plan


# ---- groups and what a replica on one does


def _groups(problem: PlacementProblem, pool: int) -> list[_Group]:
    """Group sizes of a pool with their factorisations."""
    machine = problem.cluster.instance_type(problem.cluster.pools[pool].offer.instance_type)
    count, gpus = problem.cluster.pools[pool].count, machine.gpu_count
    sizes = [(1, used) for used in _powers_of_two(gpus - 1)]
    sizes += [(machines, gpus) for machines in sorted({*_powers_of_two(count), count})]
    groups = [
        _Group(pool, machines, used, degree)
        for machines, used in sizes
        for degree in machine.valid_tensor_parallel(problem.model)
        if used % degree == 0
    ]
    return [group for group in groups if group.stages <= problem.model.layer_count]


def _powers_of_two(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def _best_replica(
    problem: PlacementProblem, estimator: Estimator, tables: StageTables, group: _Group
) -> _Scored | None:
    """The best split of the layers over a group's stages, at its best batch."""
    pool = problem.cluster.pools[group.pool]
    machine = problem.cluster.instance_type(pool.offer.instance_type)
    per_machine = group.gpus // group.tensor_parallel
    best: _Scored | None = None
    for edges in _splits(tables, group, micro_batches=estimator.micro_batches):
        stages = tuple(
            StageShape(layers, machine, group.tensor_parallel, number // per_machine)
            for number, layers in enumerate(pairwise(edges))
        )
        found = choose_batch(problem, estimator, stages, (pool.offer.name,) * group.machines)
        if found is not None and (best is None or found[1] > best[1]):
            best = found
    return best


def _splits(tables: StageTables, group: _Group, *, micro_batches: bool) -> list[tuple[int, ...]]:
    """Layer boundaries that are best at some batch: least slowest prefill plus slowest decode."""
    count = len(tables.prefix) - 1
    if group.stages == 1:
        return [(0, count)]
    option = next(o for o, one in enumerate(tables.options) if one.degree == group.tensor_parallel)
    ranges = tables.prefix[np.newaxis] - tables.prefix[:, np.newaxis]
    in_flight = group.stages if micro_batches else 1
    room = {role: _sequences(tables, option, role, ranges) // in_flight for role in (FIRST, 0, LAST)}
    roles = [FIRST, *[0] * (group.stages - 2), LAST]
    batches = _batches(_largest_batch([room[role] for role in roles]))
    if not batches.size:
        return []

    per_machine = group.gpus // group.tensor_parallel
    # Counts times seconds, not differences of sums: ranges alike take equally long to the last digit, and ties stay.
    seconds = np.zeros((2, *ranges.shape[:2], batches.size))
    for kind in range(ranges.shape[-1]):
        seconds += ranges[..., kind, np.newaxis] * tables.layer_s[option][:, kind, batches][:, np.newaxis, np.newaxis]
    known: dict[tuple[int, bool], tuple[FloatArray, FloatArray]] = {}
    kinds = [(role, bool((s + 1) % per_machine)) for s, role in enumerate(roles)]
    for role, same_node in set(kinds):
        ends = tables.end_s[option, role][:, batches]
        if role != LAST:
            ends = ends + tables.send_s[tables.send_index[group.pool, group.pool, int(same_node)]][:, batches]
        fits = room[role][:, :, np.newaxis] >= batches
        prefill, decode = np.where(fits, seconds + ends[:, np.newaxis, np.newaxis], np.inf)
        known[role, same_node] = (prefill, decode)
    best_edges = _least_sum([known[kind] for kind in kinds])
    return list(dict.fromkeys(tuple(edges) for edges in best_edges.T.tolist()))


def _sequences(tables: StageTables, option: int, role: int, ranges: IntArray) -> IntArray:
    """(low, high) sequences in flight that fit beside layers low to high; zero for no layers."""
    free = tables.room_bytes[option, role] - ranges @ tables.weight_bytes[option]
    ends = tables.end_sequence_bytes[option, role]
    typical = ends + ranges @ tables.sequence_bytes[option]
    fits = (free > 0) & (free >= ends + ranges @ tables.longest_bytes[option]) & (ranges.sum(axis=-1) > 0)
    limit = float(tables.batch_limit[option])
    most = np.divide(free, typical, out=np.full(free.shape, limit), where=typical > 0)
    return np.where(fits, np.floor(np.minimum(most, limit)), 0).astype(np.int64)


def _largest_batch(rooms: list[IntArray]) -> int:
    """The most sequences for which some split fits every stage."""
    reach = np.zeros(len(rooms[0]), dtype=np.int64)
    reach[0] = np.iinfo(np.int64).max
    for room in rooms:
        reach = np.minimum(reach[:, np.newaxis], room).max(axis=0)
    return int(reach[-1])


def _batches(most: int) -> IntArray:
    every = np.arange(1, min(most, _EVERY_BATCH) + 1)
    further = np.geomspace(_EVERY_BATCH, max(most, _EVERY_BATCH), _FURTHER_BATCHES).round().astype(np.int64)
    return np.union1d(every, further[further <= most])


# ---- the dynamic program


def _slowest(stages: list[FloatArray]) -> tuple[FloatArray, IntArray]:
    """(B,) least slowest stage over all splits, and (S + 1, B) the boundaries that reach it."""
    size, _, batches = stages[0].shape
    reach = np.full((size, batches), np.inf)
    reach[0] = 0.0
    came: list[NDArray[np.intp]] = []
    for seconds in stages:
        longest = np.maximum(reach[:, np.newaxis], seconds)
        came.append(longest.argmin(axis=0))
        reach = longest.min(axis=0)
    columns = np.arange(batches)
    edges = [np.full(batches, size - 1, dtype=np.int64)]
    for before in reversed(came):
        edges.append(before[edges[-1], columns].astype(np.int64))
    return reach[-1], np.stack(edges[::-1])


def _least_sum(stages: list[tuple[FloatArray, FloatArray]]) -> IntArray:
    """(S + 1, B) boundaries with the least slowest prefill plus slowest decode.

    The least decode under a cap on prefill, again and again with the cap below what came out, until no
    smaller prefill can make up for the decode that it costs.
    """
    least_prefill, edges = _slowest([prefill for prefill, _ in stages])
    batches = edges.shape[1]
    best, best_edges = np.full(batches, np.inf), edges.copy()
    cap, open_ = np.full(batches, np.inf), np.arange(batches)
    while open_.size:
        # Stages of one kind share their arrays: masked once.
        capped: dict[int, FloatArray] = {}
        for prefill, decode in stages:
            if id(prefill) not in capped:
                capped[id(prefill)] = np.where(prefill[..., open_] < cap, decode[..., open_], np.inf)
        decode_s, edges = _slowest([capped[id(prefill)] for prefill, _ in stages])
        prefill_s = np.max([prefill[edges[s], edges[s + 1], open_] for s, (prefill, _) in enumerate(stages)], axis=0)
        total = np.where(np.isfinite(decode_s), prefill_s + decode_s, np.inf)
        improved = total < best[open_]
        best[open_[improved]] = total[improved]
        best_edges[:, open_[improved]] = edges[:, improved]
        going_on = least_prefill[open_] + decode_s < best[open_]
        open_, cap = open_[going_on], prefill_s[going_on]
    return best_edges


# ---- replication


def _place(problem: PlacementProblem, best: dict[tuple[int, int], _Scored]) -> list[_Scored]:
    """Replicas as the objective asks; none when it cannot be met."""
    if problem.objective == "throughput" or not best:
        return _fill(problem, best)
    if problem.objective == "throughput_per_cost":
        return [max(best.values(), key=lambda one: one[1] / cost_of(problem, [one[0]]))]
    return _cover(problem, best)


def _fill(problem: PlacementProblem, best: dict[tuple[int, int], _Scored]) -> list[_Scored]:
    """Equal groups in each pool, what they leave over cut again; the block that adds most comes first."""
    blocks: list[tuple[float, list[_Scored]]] = []
    for index, pool in enumerate(problem.cluster.pools):
        mine = {size: one for (where, size), one in best.items() if where == index}
        # Of the best cut of so many machines: total value, size of its first groups; none where none fits.
        cuts = [(0.0, 0)]
        for left in range(1, pool.count + 1):
            options = [(v * (left // n) + cuts[left % n][0], n) for n, (_, v) in mine.items() if n <= left]
            cuts.append(max(options, key=lambda option: option[0], default=(0.0, 0)))
        block, left = [], pool.count
        while size := cuts[left][1]:
            block += [mine[size]] * (left // size)
            left %= size
        blocks.append((cuts[-1][0], block))
    return [one for _, block in sorted(blocks, key=lambda block: -block[0]) for one in block]


def _cover(problem: PlacementProblem, best: dict[tuple[int, int], _Scored]) -> list[_Scored]:
    """Replicas of the least cost per request; the plan is finished at each step by the cheapest that suffices."""
    wanted = problem.workload.requests_per_s or 0.0
    left = [pool.count for pool in problem.cluster.pools]
    placed: list[_Scored] = []
    plans: list[list[_Scored]] = []
    while True:
        rest = wanted - sum(value for _, value in placed)
        if placed and rest <= 0:
            plans.append(placed)
            break
        options = [(key, one) for key, one in best.items() if key[1] <= left[key[0]]]
        if not options:
            break
        enough = [one for _, one in options if one[1] >= rest]
        if enough:
            plans.append([*placed, min(enough, key=lambda one: (cost_of(problem, [one[0]]), -one[1]))])
        (pool, size), cheapest = min(options, key=lambda at: (cost_of(problem, [at[1][0]]) / at[1][1], -at[1][1]))
        placed = [*placed, cheapest]
        left[pool] -= size
    return min(plans, key=lambda plan: cost_of(problem, [choice for choice, _ in plan]), default=[])
