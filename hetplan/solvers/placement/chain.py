"""Chains of tensor-parallel groups, timed from the tables: what the planners of other papers build pipelines from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetplan.estimator.base import Estimator, FloatArray
from hetplan.estimator.pipeline import PipelineRates, StageShape
from hetplan.problem.placement import PlacementProblem
from hetplan.solvers.base import PipelineChoice
from hetplan.solvers.placement.choice import choose_batch, value_of
from hetplan.solvers.placement.tables import FIRST, LAST, IntArray, StageTables, build_tables, stage_options

# Batches that searches look at, besides the largest: throughput changes little between neighbours.
_BATCHES_TRIED = 24


@dataclass(frozen=True, slots=True)
class Group:
    """A tensor-parallel group of a chain: an option of the tables, on one of the chain's machines."""

    option: int
    node: int


@dataclass(frozen=True, slots=True)
class MachineSet:
    """Pools whose machines may stand in one pipeline, the GPUs each grants and the degrees it may use."""

    gpus: dict[int, int]
    degrees: dict[int, tuple[int, ...]]


def machine_sets(problem: PlacementProblem) -> list[MachineSet]:
    """Sets of pools that pipelines may be made of.

    One per region, or regions that zone links join; and, where the engine has the limit, per number of GPUs per node,
    degree and number format.
    """
    group_of = {index: number for number, group in enumerate(problem.cluster.pool_groups()) for index in group}
    limits = problem.limits
    sets: dict[tuple[int, int, int, str], MachineSet] = {}
    for index, pool in enumerate(problem.cluster.pools):
        machine = problem.cluster.instance_type(pool.offer.instance_type)
        whole, valid = machine.gpu_count, tuple(machine.valid_tensor_parallel(problem.model))
        dtype = problem.compute_dtype(machine.gpu) if "one-dtype" in limits else ""
        alike, equal = "one-tensor-parallel-degree" in limits, "equal-gpus-per-node" in limits
        ways = [(degree,) for degree in valid] if alike else [valid] * bool(valid)
        for gpus in range(1, whole + 1) if equal else [whole]:
            for degrees in ways:
                if equal and gpus % degrees[0]:
                    continue
                key = (group_of[index], gpus if equal else 0, degrees[0] if alike else 0, dtype)
                one = sets.setdefault(key, MachineSet({}, {}))
                one.gpus[index], one.degrees[index] = gpus, degrees
    return [sets[key] for key in sorted(sets)]


class Chains:
    """Values of chains, read from the tables of all pools.

    A chain is a sequence of `Group` and its cuts: group i holds the layers from ``cuts[i]`` to ``cuts[i + 1]``.
    """

    def __init__(self, problem: PlacementProblem, estimator: Estimator) -> None:
        options = stage_options(problem, list(range(len(problem.cluster.pools))), whole_nodes=False)
        self.problem, self.estimator = problem, estimator
        self.tables: StageTables = build_tables(problem, estimator, options)
        self.layer_count = problem.model.layer_count
        self.option = {(option.pool, option.degree): o for o, option in enumerate(options)}
        self.grid = np.unique(np.geomspace(1, self.tables.max_batch, _BATCHES_TRIED).astype(np.int64))
        # (Option, groups, share of the memory for weights) -> requests/s by layers held.
        self.rates: dict[tuple[int, int, float], tuple[float, ...]] = {}
        self._steps = estimator.decode_steps(problem.workload.mean_output_tokens)

    def counts(self, cuts: IntArray) -> IntArray:
        """(S, K) layers of each kind in each group."""
        return np.diff(self.tables.prefix[cuts], axis=0)

    def fitting(self, options: IntArray, counts: FloatArray | IntArray, roles: IntArray) -> FloatArray:
        """(S,) sequences in flight that fit each group; negative by how far weights and longest request do not."""
        t = self.tables
        room = t.room_bytes[options, roles] - (t.weight_bytes[options] * counts).sum(axis=1)
        end = t.end_sequence_bytes[options, roles]
        typical = (t.sequence_bytes[options] * counts).sum(axis=1) + end
        spare = room - (t.longest_bytes[options] * counts).sum(axis=1) - end
        most = np.minimum(room / np.maximum(typical, 1e-9), t.batch_limit[options])
        return np.asarray(np.where(spare >= 0, most, spare / np.maximum(np.abs(t.room_bytes[options, 0]), 1)))

    def value(self, groups: Sequence[Group], cuts: IntArray) -> float:
        """Highest value over the batches tried; negative, by how much it lacks, where the chain does not fit."""
        t, stages = self.tables, len(groups)
        options = np.array([group.option for group in groups])
        roles = _roles(stages)
        counts = self.counts(cuts)
        fit = float(self.fitting(options, counts, roles).min())
        most = int(fit) // stages if self.estimator.micro_batches else int(fit)
        if most < 1:
            return min(fit, 0.0) - 1.0
        tried = np.append(self.grid[self.grid < most], most)
        rows = options[:, np.newaxis]
        seconds = np.einsum("sbpk,sk->sbp", t.layer_s[rows, :, :, tried], counts)
        seconds += t.end_s[rows, roles[:, np.newaxis], :, tried]
        if stages > 1:
            sends = t.send_s[self._sends(groups)[:, np.newaxis], :, tried]
            if not np.isfinite(sends).all():
                return -1.0
            seconds[:-1] += sends
        values = self._values(tried, seconds)
        best = float(values.max() if self.estimator.micro_batches or self.problem.slo else values[-1])
        return best if best > -math.inf else -1.0

    def _sends(self, groups: Sequence[Group]) -> IntArray:
        pools = [self.tables.options[group.option].pool for group in groups]
        return np.array(
            [
                self.tables.send_index[pools[i], pools[i + 1], int(groups[i].node == groups[i + 1].node)]
                for i in range(len(groups) - 1)
            ]
        )

    def _values(self, batches: IntArray, seconds: FloatArray) -> FloatArray:
        """As `hetplan.estimator.pipeline.pipeline_rates`, from (S, B, 2) seconds that begin with batch 1."""
        prefill, decode = seconds[..., 0], seconds[..., 1]
        slowest = prefill.max(axis=0) + decode.max(axis=0)
        rate = np.asarray(batches / slowest)
        if self.problem.slo is None:
            return rate
        latency, ttft = slowest, prefill.max(axis=0)
        if self.estimator.micro_batches:
            latency = seconds.sum(axis=(0, 2))
            ttft = np.full_like(latency, prefill[:, 0].sum())
        tpot = (latency - ttft) / self._steps if self._steps > 0 else np.zeros_like(latency)
        return value_of(self.problem, PipelineRates(rate, ttft if self._steps > 0 else latency, tpot, latency))

    def balanced(self, groups: Sequence[Group]) -> tuple[IntArray, float]:
        """Cuts of least slowest group at some batch tried, the best of these by `value`."""
        stages, layers = len(groups), self.layer_count
        best = (np.arange(stages + 1, dtype=np.int64), -math.inf)
        if stages > layers:
            return best
        t, roles = self.tables, _roles(stages)
        windows = (t.prefix[np.newaxis] - t.prefix[:, np.newaxis]).reshape((layers + 1) ** 2, -1)
        fits = []
        for group, role in zip(groups, roles, strict=True):
            options = np.full(len(windows), group.option)
            fit = self.fitting(options, windows, np.full(len(windows), role))
            fits.append(np.tril(np.full((layers + 1,) * 2, -np.inf)) + fit.reshape((layers + 1,) * 2))
        sends = np.zeros((stages, t.send_s.shape[-1]))
        if stages > 1:
            sends[:-1] = t.send_s[self._sends(groups)].sum(axis=1)
        seen: set[tuple[int, ...]] = set()
        for batch in self.grid[::-1].tolist():
            in_flight = batch * stages if self.estimator.micro_batches else batch
            costs = []
            for s, group in enumerate(groups):
                base = t.end_s[group.option, roles[s], :, batch].sum() + sends[s, batch]
                cost = windows @ t.layer_s[group.option, :, :, batch].sum(axis=0) + base
                costs.append(np.where(fits[s] >= in_flight, cost.reshape(fits[s].shape), np.inf))
            cuts = _least_slowest(costs)
            if cuts is None or tuple(cuts.tolist()) in seen:
                continue
            seen.add(tuple(cuts.tolist()))
            value = self.value(groups, cuts)
            if value > best[1]:
                best = (cuts, value)
        return best

    def choice(
        self, groups: Sequence[Group], cuts: IntArray, pools: Sequence[int]
    ) -> tuple[PipelineChoice, float] | None:
        """The chain as a pipeline at its best batch; ``pools`` names the machines in order. None if worth nothing."""
        edges = cuts.tolist()
        stages = tuple(
            StageShape(
                (edges[i], edges[i + 1]),
                self.tables.options[group.option].machine,
                self.tables.options[group.option].degree,
                group.node,
                self.problem.cluster.pools[self.tables.options[group.option].pool].offer.place,
            )
            for i, group in enumerate(groups)
        )
        offers = tuple(self.problem.cluster.pools[pool].offer.name for pool in pools)
        found = choose_batch(self.problem, self.estimator, stages, offers)
        return found if found is not None and found[1] > 0 else None


def _roles(stages: int) -> IntArray:
    roles = np.zeros(stages, dtype=np.int64)
    roles[0] |= FIRST
    roles[-1] |= LAST
    return roles


def _least_slowest(costs: Sequence[FloatArray]) -> IntArray | None:
    """Cuts whose largest cost is least, by dynamic programming; ``costs[s][from, to]`` is infinite if not allowed."""
    reached, choices = costs[0][0], []
    for cost in costs[1:]:
        through = np.maximum(reached[:, np.newaxis], cost)
        choices.append(through.argmin(axis=0))
        reached = through.min(axis=0)
    if not math.isfinite(reached[-1]):
        return None
    cuts = [len(reached) - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return np.array([0, *cuts[::-1]])


def as_asked(problem: PlacementProblem, costs: Sequence[float], values: Sequence[float]) -> list[int]:
    """Which pipelines a plan keeps: all for throughput, the best per cost, the cheapest that meet a demand.

    Empty when they do not meet it.
    """
    useful = [i for i, value in enumerate(values) if value > 0]
    if problem.objective == "throughput" or not useful:
        return useful
    useful.sort(key=lambda i: costs[i] / values[i])
    if problem.objective == "throughput_per_cost":
        return useful[:1]
    wanted, kept = problem.workload.requests_per_s or 0.0, []
    for i in useful:
        kept.append(i)
        if math.fsum(values[j] for j in kept) >= wanted:
            break
    else:
        return []
    # The last one taken may make an earlier, dearer one needless.
    for i in sorted(kept, key=lambda i: -costs[i]):
        rest = [j for j in kept if j != i]
        if math.fsum(values[j] for j in rest) >= wanted:
            kept = rest
    return kept
